"""Check optimizers when the guard is made, and save and load their state through their own methods.

An optimizer that wraps another one, such as Lookahead, may keep its state in any form. The guard
reads the entries of a ``state_dict`` only if it has the layout of torch's own (`has_torch_layout`);
any other ``state_dict`` is saved and loaded as one opaque value.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.core.errors import PolicyError
from holdfast.guard.reachable import levels_inside

# An optimizer that has all methods of one of these sets computes the gradient a second time within
# a step, as SAM and its relatives do.
_TWO_PASS_METHODS = (
    {"first_step", "second_step"},
    {"ascent_step", "descent_step"},
    {"set_closure"},
)
# Methods of optimizers that run the backward pass themselves. Calling only their `step` would train
# with another algorithm.
_BACKWARD_METHODS = ("backward", "pc_backward", "fused_backward")
# Attributes of optimizers that shard their state over the ranks: torch's ZeroRedundancyOptimizer
# and fairscale's OSS, Meta's Shampoo, and Apex's DistributedFusedAdam.
_SHARDED_STATE_ATTRIBUTES = (
    "consolidate_state_dict",
    "distributed_state_dict",
    "distributed_process_group",
)

SPREAD_STATE = (
    "it shards its state over the ranks, so a checkpoint would hold the state of one rank only"
)
WHOLE_STATE = (
    "use a plain optimizer such as AdamW, and shard its state with the model by fully_shard; "
    "or train without a Guard, under `holdfast run`."
)
# The inner optimizer of a wrapper is searched for at most this many attributes deep.
_MOST_LEVELS = 2


# --- wrappers


def looks_like_an_optimizer(value: Any) -> bool:
    """Return whether an object is a torch optimizer or has the ``param_groups`` of one."""
    return isinstance(value, Optimizer) or bool(_groups_of(value))


def _groups_of(value: Any) -> list[Any]:
    """Return the ``param_groups`` of an object, or an empty list if it has none of the usual
    form.
    """
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
            new = [other for other in level if id(other) not in visited]
            visited.update(map(id, new))
            inside += new
            waiting += new
    return inside


def identities(optimizer: Any) -> set[int]:
    """Return the ids of an optimizer, of the optimizers that it wraps, and of all their parameter
    groups.

    Two objects drive the same parameters if these sets overlap: a wrapper shares ids with the
    optimizer that it wraps.
    """
    ids = set()
    for holder in (optimizer, *optimizers_inside(optimizer)):
        ids.add(id(holder))
        ids.update(id(group) for group in _groups_of(holder))
    return ids


# --- checks


def check_optimizer(name: str, optimizer: Optimizer, owned: set[int]) -> None:
    """Refuse an optimizer that a guarded step cannot use, or whose state a checkpoint cannot hold.

    Args:
        name: The optimizer's name in the guard.
        optimizer: The optimizer to check.
        owned: The ids of the parameters of all models.

    Raises:
        PolicyError: H105 if it has no ``param_groups`` or ``state``; H106 if it holds a parameter
            of no model; H107 if its ``step`` needs a closure or a second pass, or if it runs the
            backward pass itself; H108 if it shards its state over the ranks.
    """
    kind = type(optimizer).__name__
    for attribute, needed in (("param_groups", list), ("state", Mapping)):
        if not isinstance(getattr(optimizer, attribute, None), needed):
            raise PolicyError(
                f"optimizer {name!r} is a {kind} without {attribute}",
                limit=(
                    "the guard reads param_groups and state to know which parameters an optimizer"
                    " moves"
                ),
                fix=(
                    "if it wraps another optimizer, share its attributes: self.param_groups ="
                    " inner.param_groups and self.state = inner.state."
                ),
                rule="H105",
            )
    for holder in (optimizer, *optimizers_inside(optimizer)):
        _check_state_is_whole(name, holder)
        _check_one_pass(name, holder)
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in owned]
    if foreign:
        raise PolicyError(
            f"optimizer {name!r} holds {len(foreign)} parameter(s) of no model given to Guard, "
            f"the first of shape {tuple(foreign[0].shape)}",
            limit="they would be missing from every checkpoint",
            fix=(
                'pass the module that owns them too: model={"net": net, "loss": loss_module}; if'
                " the model was moved or copied after the optimizer was made, make the optimizer"
                " last."
            ),
            rule="H106",
        )


def _check_state_is_whole(name: str, optimizer: Any) -> None:
    """Raise H108 for an optimizer that shards its state over the ranks."""
    kind = type(optimizer)
    attributes = getattr(optimizer, "__dict__", {})
    for attribute in _SHARDED_STATE_ATTRIBUTES:
        if hasattr(kind, attribute) or attribute in attributes:
            raise PolicyError(
                f"optimizer {name!r} is a {kind.__name__} ({attribute})",
                limit=SPREAD_STATE,
                fix=WHOLE_STATE,
                rule="H108",
            )


def _check_one_pass(name: str, optimizer: Any) -> None:
    """Raise H107 for an optimizer whose ``step()`` alone is not its whole algorithm."""
    kind = type(optimizer)
    methods = {method for method in dir(kind) if callable(getattr(kind, method, None))}
    for method in _BACKWARD_METHODS:
        if method in methods:
            raise PolicyError(
                f"optimizer {name!r} is a {kind.__name__}, which runs the backward pass itself"
                f" ({method})",
                limit=(
                    "a guarded step runs the backward pass, so that it can be retried, split and"
                    " skipped"
                ),
                fix=(
                    "compute the same gradient in the loss function, and give Guard the inner"
                    " optimizer."
                ),
                rule="H107",
            )
    if any(two_pass_methods <= methods for two_pass_methods in _TWO_PASS_METHODS):
        raise PolicyError(
            f"optimizer {name!r} is a {kind.__name__}, which computes the gradient twice in each"
            " step",
            limit=(
                "a guarded step runs one forward and backward pass, and then calls step() without a"
                " closure"
            ),
            fix=(
                "let the loss function return the loss at the perturbed weights, and give Guard the"
                " base optimizer; see 'Two-pass optimizers' in the guide to Guard."
            ),
            rule="H107",
        )
    if _step_has_required_arguments(kind):
        raise closure_missing(name, optimizer)


def _step_has_required_arguments(kind: type) -> bool:
    """Return whether ``step`` of an optimizer class, as LBFGS's, cannot be called without an
    argument.
    """
    step = getattr(kind, "step", None)
    if step is None:
        return False
    try:
        parameters = list(inspect.signature(inspect.unwrap(step)).parameters.values())
    except (TypeError, ValueError):
        # Some functions written in C have no signature.
        return False
    for parameter in parameters[1:]:
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variable:
            return True
    return False


def failed_without_closure(error: Exception) -> bool:
    """Return whether ``step()`` seems to have failed because it was called without a closure.

    The signature of such an optimizer says ``closure=None``, so only its first step shows that it
    needs one.
    """
    text = str(error)
    calls_none = isinstance(error, TypeError) and "'NoneType' object is not callable" in text
    return calls_none or "closure" in text.lower()


def closure_missing(name: str, optimizer: Any) -> PolicyError:
    """Return H107 for an optimizer whose ``step`` needs a closure or another argument."""
    return PolicyError(
        f"optimizer {name!r} is a {type(optimizer).__name__}, whose step() needs a closure or"
        " another argument",
        limit=(
            "the guard calls step() without arguments; a closure would evaluate the loss within the"
            " step, which could then not be taken back as one transaction"
        ),
        fix="use an optimizer whose step() needs no closure, for instance AdamW.",
        rule="H107",
    )


# --- state


def has_torch_layout(state: Any) -> bool:
    """Return whether a ``state_dict`` has exactly the entries of a torch optimizer's, in their
    usual form.
    """
    if not isinstance(state, Mapping) or set(state) != {"state", "param_groups"}:
        return False
    groups = state["param_groups"]
    if not isinstance(state["state"], Mapping) or not isinstance(groups, list):
        return False
    return all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )


def load_optimizer(optimizer: Optimizer, saved: Any) -> None:
    """Load the value of ``state_dict`` through the optimizer's own ``load_state_dict``.

    Tensors keep the dtypes with which they were saved, also in torch optimizers inside a wrapper. A
    wrapper that shared its ``param_groups`` or ``state`` with an inner optimizer shares them again
    afterwards.
    """
    inner_optimizers = [
        inner for inner in optimizers_inside(optimizer) if isinstance(inner, Optimizer)
    ]
    attributes = vars(optimizer)
    shared = [
        (name, inner)
        for name in ("param_groups", "state")
        for inner in inner_optimizers
        if name in attributes and _is_shared(attributes[name], getattr(inner, name))
    ]
    with contextlib.ExitStack() as stack:
        for inner in inner_optimizers:
            stack.enter_context(_loading_exactly(inner))
        _load_exactly(optimizer, optimizer.load_state_dict, saved)
    for name, inner in shared:
        # torch's load_state_dict makes new groups. A scheduler of a wrapper that kept the old ones
        # would change learning rates that no optimizer reads any more.
        setattr(optimizer, name, getattr(inner, name))


def _is_shared(first: Any, second: Any) -> bool:
    """Return whether two attributes are one object, or lists of the same groups."""
    if first is second:
        return True
    if not (isinstance(first, list) and isinstance(second, list)):
        return False
    return [id(group) for group in first] == [id(group) for group in second]


@contextlib.contextmanager
def _loading_exactly(optimizer: Optimizer) -> Iterator[None]:
    """Replace ``load_state_dict`` of a wrapped optimizer, which its wrapper will call, by
    `_load_exactly`.
    """
    attributes = vars(optimizer)
    was_replaced = "load_state_dict" in attributes
    original = optimizer.load_state_dict
    attributes["load_state_dict"] = functools.partial(_load_exactly, optimizer, original)
    try:
        yield
    finally:
        if was_replaced:
            attributes["load_state_dict"] = original
        else:
            attributes.pop("load_state_dict", None)


def _load_exactly(optimizer: Optimizer, load: Callable[[Any], Any], saved: Any) -> None:
    """Load state with the given method, and give each tensor back the dtype with which it was
    saved.

    torch casts state to the dtype of its parameter, so fp32 moments of bf16 weights would lose
    bits.
    """
    load(saved)
    if not has_torch_layout(saved):
        return
    ids = [key for group in saved["param_groups"] for key in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, parameter in zip(ids, parameters, strict=False):
        state = optimizer.state.get(parameter)
        entries = saved["state"].get(key)
        if not isinstance(state, dict) or not isinstance(entries, Mapping):
            continue
        for entry, value in entries.items():
            loaded = state.get(entry)
            if not (isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor)):
                continue
            if loaded.dtype != value.dtype:
                state[entry] = value.to(loaded.device)


def state_tensors(
    optimizer: Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the state of an optimizer, each with a description such as ``"exp_avg of
    fc.weight"``.

    If the ``state_dict`` has another layout than torch's, the description is the path in it, such
    as ``"slow.0"``.

    Args:
        optimizer: The optimizer, which may be a wrapper.
        names: The names of the parameters, by their ids.
    """
    saved = optimizer.state_dict()
    if not has_torch_layout(saved):
        yield from _tensors_in(saved, "")
        return
    for parameter, state in optimizer.state.items():
        if not isinstance(state, Mapping):
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"{key} of {names.get(id(parameter), '?')}", value


def _tensors_in(tree: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _tensors_in(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from _tensors_in(value, f"{path}.{index}")


def form_of_state(optimizer: Optimizer) -> list[tuple[str, list[int]]]:
    """Return the description and shape of each tensor in the state of an optimizer, sorted.

    Parameters are named by group and position, so replicas of one optimizer return equal lists on
    all ranks.
    """
    positions = {
        id(parameter): f"{index}.{position}"
        for index, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    }
    return sorted((key, list(tensor.shape)) for key, tensor in state_tensors(optimizer, positions))
