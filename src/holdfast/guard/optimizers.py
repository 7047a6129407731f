"""Look inside optimizers that wrap others, and check all optimizers when a guard is created.

``optimizer_state`` saves and loads their state.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, final

from torch.optim import Optimizer

from holdfast.core.errors import PolicyError
from holdfast.core.text import counted
from holdfast.guard.reachable import levels_inside

# An optimizer with all methods from one of these sets computes a second gradient within each step,
# as SAM and related optimizers do.
_TWO_PASS_METHODS = (
    {"first_step", "second_step"},
    {"ascent_step", "descent_step"},
    {"set_closure"},
)
# Optimizers with one of these methods run the backward pass themselves. If only `step` were called,
# they would compute a different algorithm.
_BACKWARD_METHODS = ("backward", "pc_backward", "fused_backward")
# Optimizers with one of these attributes shard their state over the ranks: torch's
# ZeroRedundancyOptimizer and fairscale's OSS, Meta's Shampoo, and Apex's DistributedFusedAdam.
_SHARDED_STATE_ATTRIBUTES = (
    "consolidate_state_dict",
    "distributed_state_dict",
    "distributed_process_group",
)

# The limit and the fix in H108, for optimizers that shard their state themselves.
SHARDED_STATE_LIMIT = (
    "it shards its state over the ranks, so a checkpoint would hold the state of one rank only"
)
SHARDED_STATE_FIX = (
    "use a plain optimizer such as AdamW, and let fully_shard shard its state with the model."
    " Or train without a Guard, under `holdfast run`."
)

# A wrapper's inner optimizer is searched for at most this many attributes deep.
_MOST_LEVELS = 2


# --- wrappers


def looks_like_an_optimizer(value: Any) -> bool:
    """Return whether an object is a torch optimizer or has ``param_groups`` as one does."""
    return isinstance(value, Optimizer) or bool(_groups_of(value))


def _groups_of(value: Any) -> list[Any]:
    """Return an object's ``param_groups``, or an empty list if it has none in torch's format."""
    try:
        groups = value.param_groups
    except Exception:  # noqa: BLE001 - a property or `__getattr__` may raise anything
        return []
    if not isinstance(groups, list):
        return []
    for group in groups:
        if not (isinstance(group, Mapping) and "params" in group):
            return []
    return groups


def optimizers_inside(optimizer: Any) -> list[Any]:
    """Return the optimizers that an optimizer wraps, nearest first."""
    inside: list[Any] = []
    visited = {id(optimizer)}
    waiting = [optimizer]
    while waiting:
        holder = waiting.pop(0)
        for level in levels_inside(holder, looks_like_an_optimizer, most_levels=_MOST_LEVELS):
            new = [inner for inner in level if id(inner) not in visited]
            visited.update(id(inner) for inner in new)
            inside.extend(new)
            waiting.extend(new)
    return inside


def identities(optimizer: Any) -> set[int]:
    """Return the ids of an optimizer, all optimizers that it wraps, and all their parameter groups.

    If the ids of two optimizers overlap, both update the same parameters. For example, a wrapper
    shares ids with the optimizer that it wraps.
    """
    ids = set()
    for holder in (optimizer, *optimizers_inside(optimizer)):
        ids.add(id(holder))
        ids.update(id(group) for group in _groups_of(holder))
    return ids


# --- checks


def check_optimizer(name: str, optimizer: Optimizer, owned: set[int]) -> None:
    """Refuse an optimizer that a guard cannot step, or whose state it cannot save.

    Args:
        name: The optimizer's name in the guard.
        optimizer: The optimizer to check.
        owned: The ids of the parameters of all models.

    Raises:
        PolicyError: H105 if the optimizer has no ``param_groups`` or ``state``. H106 if one of its
            parameters belongs to no model. H107 if its ``step`` needs a closure or a second
            gradient, or if it runs the backward pass itself. H108 if it shards its state over the
            ranks.
    """
    _check_attributes(name, optimizer)
    for holder in (optimizer, *optimizers_inside(optimizer)):
        _check_state_is_not_sharded(name, holder)
        _check_leaves_backward_to_the_guard(name, holder)
        _check_computes_one_gradient(name, holder)
        if _step_has_required_arguments(type(holder)):
            raise closure_missing(name, holder)
    _check_parameters_belong_to_models(name, optimizer, owned)


def _check_attributes(name: str, optimizer: Any) -> None:
    """Raise H105 if an optimizer lacks ``param_groups`` or ``state``."""
    for attribute, needed_type in (("param_groups", list), ("state", Mapping)):
        if isinstance(getattr(optimizer, attribute, None), needed_type):
            continue
        raise PolicyError(
            f"optimizer {name!r} is a {type(optimizer).__name__} without {attribute}",
            limit=(
                "the guard reads param_groups and state to know which parameters an optimizer"
                " updates"
            ),
            fix=(
                "if it wraps another optimizer, share its attributes: self.param_groups ="
                " inner.param_groups and self.state = inner.state."
            ),
            rule="H105",
        )


def _check_state_is_not_sharded(name: str, optimizer: Any) -> None:
    """Raise H108 if an optimizer shards its state over the ranks."""
    kind = type(optimizer)
    own_attributes = getattr(optimizer, "__dict__", {})
    for attribute in _SHARDED_STATE_ATTRIBUTES:
        if hasattr(kind, attribute) or attribute in own_attributes:
            raise PolicyError(
                f"optimizer {name!r} is a {kind.__name__} ({attribute})",
                limit=SHARDED_STATE_LIMIT,
                fix=SHARDED_STATE_FIX,
                rule="H108",
            )


def _check_leaves_backward_to_the_guard(name: str, optimizer: Any) -> None:
    """Raise H107 if an optimizer runs the backward pass itself."""
    kind = type(optimizer)
    for method in _BACKWARD_METHODS:
        if callable(getattr(kind, method, None)):
            raise PolicyError(
                f"optimizer {name!r} is a {kind.__name__}, which runs the backward pass itself"
                f" ({method})",
                limit=(
                    "a guarded step runs the backward pass, so that it can be retried, split and"
                    " skipped"
                ),
                fix=(
                    "compute the same gradient in the loss function, and pass the inner optimizer"
                    " to Guard."
                ),
                rule="H107",
            )


def _check_computes_one_gradient(name: str, optimizer: Any) -> None:
    """Raise H107 if an optimizer computes the gradient a second time in each step."""
    kind = type(optimizer)
    for methods in _TWO_PASS_METHODS:
        if all(callable(getattr(kind, method, None)) for method in methods):
            raise PolicyError(
                f"optimizer {name!r} is a {kind.__name__}, which computes the gradient twice in"
                " each step",
                limit=(
                    "a guarded step runs one forward and backward pass, and then calls step()"
                    " without a closure"
                ),
                fix=(
                    "let the loss function return the loss at the perturbed weights, and pass the"
                    " base optimizer to Guard. See docs/guide/optimizers.md."
                ),
                rule="H107",
            )


def _step_has_required_arguments(kind: type) -> bool:
    """Return whether the ``step`` of an optimizer class has a required argument, as in LBFGS."""
    step = getattr(kind, "step", None)
    if step is None:
        return False
    try:
        parameters = list(inspect.signature(inspect.unwrap(step)).parameters.values())
    except (TypeError, ValueError):
        # Some functions in C extensions have no signature.
        return False
    # Skip the first parameter, which is `self`.
    for parameter in parameters[1:]:
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variable:
            return True
    return False


def _check_parameters_belong_to_models(name: str, optimizer: Optimizer, owned: set[int]) -> None:
    """Raise H106 if an optimizer has a parameter that belongs to none of the guard's models."""
    foreign = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in owned
    ]
    if foreign:
        raise PolicyError(
            f"optimizer {name!r} holds {counted(len(foreign), 'parameter')} outside the models"
            f" passed to Guard, the first of shape {tuple(foreign[0].shape)}",
            limit="every checkpoint would lack their values",
            fix=(
                "pass the module that owns them too:"
                ' model={"net": net, "loss": loss_module}. If the model was moved or copied after'
                " the optimizer was created, create the optimizer last."
            ),
            rule="H106",
        )


def failed_without_closure(error: Exception) -> bool:
    """Return whether ``step()`` seems to have failed because it was called without a closure.

    Some optimizers need a closure even though the signature of ``step`` says ``closure=None``. This
    only becomes apparent in their first step.
    """
    text = str(error)
    if isinstance(error, TypeError) and "'NoneType' object is not callable" in text:
        return True
    return "closure" in text.lower()


def closure_missing(name: str, optimizer: Any) -> PolicyError:
    """Return an H107 error for an optimizer whose ``step`` needs a closure or another argument."""
    return PolicyError(
        f"optimizer {name!r} is a {type(optimizer).__name__}, whose step() needs a closure or"
        " another argument",
        limit=(
            "the guard calls step() without arguments. A closure would evaluate the loss inside the"
            " optimizer step, so the guard could not undo the step as a whole"
        ),
        fix="use an optimizer whose step() needs no closure, for example AdamW.",
        rule="H107",
    )


@final
class OptimizerMemory:
    """Reduces the temporary memory that optimizers use in their steps.

    Args:
        optimizers: The optimizers of the run.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)

    def release(self) -> None:
        """Make optimizers update one tensor at a time, which minimizes temporary memory.

        Fused optimizers are left unchanged.
        """
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if not group.get("fused") and "foreach" in group:
                    group["foreach"] = False
