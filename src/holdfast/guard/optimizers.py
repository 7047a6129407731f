"""What a guard asks of an optimizer: checked when the guard is made, and loaded through its own methods only.

An optimizer that wraps another one, such as Lookahead, keeps its state as it likes. Only a
``state_dict`` that is laid out as torch's own (`has_torch_layout`) is looked into; any other one is
saved and loaded as it is.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.core.errors import PolicyError
from holdfast.guard.reachable import levels_inside

# Methods of optimizers that compute gradients a second time within a step (SAM and its relatives).
_TWO_PASSES = ({"first_step", "second_step"}, {"ascent_step", "descent_step"}, {"set_closure"})
# Methods of optimizers that take over the backward pass, so that `step` alone is another algorithm.
_OWN_BACKWARD = ("backward", "pc_backward", "fused_backward")
# Attributes of optimizers that spread their state over the ranks: torch's ZeroRedundancyOptimizer
# and fairscale's OSS, Meta's Shampoo, and Apex's DistributedFusedAdam.
_SHARDED_STATE = ("consolidate_state_dict", "distributed_state_dict", "distributed_process_group")

SPREAD_STATE = "it spreads its state over the ranks, and a checkpoint would hold that of one rank only"
WHOLE_STATE = (
    "use a plain optimizer such as AdamW, and shard its state with the model by fully_shard; "
    "or train without a Guard, under `holdfast run`."
)
# Attributes between a wrapper and the optimizer that it wraps.
_MOST_LEVELS = 2


# --- wrappers -------------------------------------------------------------------------------------------------


def looks_like_an_optimizer(value: Any) -> bool:
    """Return whether an object is an optimizer, or has groups of parameters as one has."""
    return isinstance(value, Optimizer) or bool(_groups_of(value))


def _groups_of(value: Any) -> list[Any]:
    """Return the groups of parameters of an object, nothing where it has none."""
    try:
        groups = value.param_groups
    except Exception:  # noqa: BLE001 - whatever a property or `__getattr__` raises: it has no groups
        return []
    if not isinstance(groups, list):
        return []
    return groups if all(isinstance(group, Mapping) and "params" in group for group in groups) else []


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
    """Return what tells two references to one optimizer: its own id, and those of wrapped ones and of all groups.

    A wrapper and what it wraps have ids in common.
    """
    ids = set()
    for holder in (optimizer, *optimizers_inside(optimizer)):
        ids.add(id(holder))
        ids.update(id(group) for group in _groups_of(holder))
    return ids


# --- checks ---------------------------------------------------------------------------------------------------


def check_optimizer(name: str, optimizer: Optimizer, owned: set[int]) -> None:
    """Refuse an optimizer that a guarded step cannot move, or whose state it cannot save.

    Args:
        name: Of the optimizer.
        optimizer: What is checked.
        owned: Ids of the parameters of all models.

    Raises:
        PolicyError: H105 without groups or state, H106 for parameters of no model, H107 for a second pass within a
            step, H108 for state that is spread over ranks.
    """
    kind = type(optimizer).__name__
    for attribute, needed in (("param_groups", list), ("state", Mapping)):
        if not isinstance(getattr(optimizer, attribute, None), needed):
            raise PolicyError(
                f"optimizer {name!r} is a {kind} without {attribute}",
                limit="a torch optimizer has param_groups and state; they show which parameters it moves",
                fix="give the wrapper those of the optimizer inside it: self.param_groups = inner.param_groups and "
                "self.state = inner.state.",
                rule="H105",
            )
    for holder in (optimizer, *optimizers_inside(optimizer)):
        _check_state_is_whole(name, holder)
        _check_one_pass(name, holder)
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in owned]
    if strangers:
        raise PolicyError(
            f"optimizer {name!r} holds {len(strangers)} parameter(s) of no model given to Guard, "
            f"the first of shape {tuple(strangers[0].shape)}",
            limit="they would be missing from every checkpoint",
            fix='pass the module that owns them too: model={"net": net, "loss": loss_module}; if the model was '
            "moved or copied after the optimizer was made, make the optimizer last.",
            rule="H106",
        )


def _check_state_is_whole(name: str, optimizer: Any) -> None:
    own = getattr(optimizer, "__dict__", {})
    sharded = [method for method in _SHARDED_STATE if hasattr(type(optimizer), method) or method in own]
    if sharded:
        raise PolicyError(
            f"optimizer {name!r} is a {type(optimizer).__name__} ({sharded[0]})",
            limit=SPREAD_STATE,
            fix=WHOLE_STATE,
            rule="H108",
        )


def _check_one_pass(name: str, optimizer: Any) -> None:
    kind = type(optimizer)
    methods = {method for method in dir(kind) if callable(getattr(kind, method, None))}
    for own in _OWN_BACKWARD:
        if own in methods:
            raise PolicyError(
                f"optimizer {name!r} is a {kind.__name__}, which runs the backward pass itself ({own})",
                limit="a guarded step runs it, so that it can be retried, split and skipped",
                fix="compute the same gradient in the loss function, and give Guard the optimizer inside.",
                rule="H107",
            )
    if any(pair <= methods for pair in _TWO_PASSES):
        raise PolicyError(
            f"optimizer {name!r} is a {kind.__name__}, which computes the gradient twice in each step",
            limit="a guarded step runs one forward and backward pass, and then calls step() without a closure",
            fix="let the loss function return the loss at the perturbed weights, and give Guard the base optimizer; "
            "the guide to Guard has the code under 'Two-pass optimizers'.",
            rule="H107",
        )
    if needs_closure(kind):
        raise PolicyError(
            f"optimizer {name!r} is a {kind.__name__}, whose step() needs a closure or another argument",
            limit="the guard calls step() alone; a closure evaluates the loss within the step, which is then not one "
            "transaction",
            fix="use an optimizer whose step() needs no closure, for instance AdamW.",
            rule="H107",
        )


def needs_closure(kind: type) -> bool:
    """Return whether ``step`` of an optimizer class needs its closure or another argument.

    That is told by its signature, and by its source where there is some.
    """
    step = inspect.unwrap(getattr(kind, "step", None) or _without_closure)
    try:
        parameters = list(inspect.signature(step).parameters.values())[1:]
    except (TypeError, ValueError):
        return False
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if any(parameter.default is parameter.empty for parameter in named):
        return True
    positional = [p for p in named if p.kind is not p.KEYWORD_ONLY]
    return bool(positional) and _source_needs(step, positional[0].name)


def _without_closure(_: Any) -> None:
    """Stand in for the ``step`` of a class that has none."""


def _source_needs(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function asserts, calls, or raises without its optional parameter of this name."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return False
    return _needs(getattr(tree.body[0], "body", ()), name)


def _needs(body: Sequence[ast.stmt], name: str) -> bool:
    for statement in body:
        if isinstance(statement, ast.With):
            if _needs(statement.body, name):
                return True
        elif isinstance(statement, ast.Assert):
            if _mentions(statement.test, name):
                return True
        elif isinstance(statement, ast.If):
            if _is_test_of_absence(statement.test, name):
                # Without the closure it raises, or returns before anything below could need it.
                ending = statement.body[-1]
                if isinstance(ending, (ast.Raise, ast.Return)):
                    return isinstance(ending, ast.Raise)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)):
            if _calls(statement, name):
                return True
            if _replaces(statement, name):
                return False
    return False


def _replaces(statement: ast.stmt, name: str) -> bool:
    """Return whether a statement gives the name another value, such as ``closure = closure or default``."""
    if not isinstance(statement, ast.Assign) or isinstance(statement.value, ast.Call):
        return False
    return any(isinstance(target, ast.Name) and target.id == name for target in statement.targets)


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(inner, ast.Name) and inner.id == name for inner in ast.walk(node))


def _is_test_of_absence(test: ast.expr, name: str) -> bool:
    """Return whether a test is ``name is None`` or ``not name``."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _mentions(test.operand, name)
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is) and _mentions(test.left, name)


def _calls(node: ast.AST, name: str) -> bool:
    """Return whether a statement calls this name unconditionally."""
    if isinstance(node, (ast.IfExp, ast.BoolOp, ast.Lambda)):
        return False
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
        return True
    return any(_calls(inner, name) for inner in ast.iter_child_nodes(node))


# --- state ----------------------------------------------------------------------------------------------------


def has_torch_layout(state: Any) -> bool:
    """Return whether a ``state_dict`` is laid out as that of a torch optimizer, and holds nothing else."""
    if not isinstance(state, Mapping) or set(state) != {"state", "param_groups"}:
        return False
    groups = state["param_groups"]
    if not isinstance(state["state"], Mapping) or not isinstance(groups, list):
        return False
    return all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)


def load_optimizer(optimizer: Optimizer, saved: Any) -> None:
    """Load what ``state_dict`` has returned, through the optimizer's own ``load_state_dict``.

    Torch's optimizers inside a wrapper keep the types of their moments, and stay shared with it.
    """
    inside = [other for other in optimizers_inside(optimizer) if isinstance(other, Optimizer)]
    shared = [
        (attribute, other)
        for attribute in ("param_groups", "state")
        for other in inside
        if attribute in vars(optimizer) and _are_the_same(vars(optimizer)[attribute], getattr(other, attribute))
    ]
    with contextlib.ExitStack() as stack:
        for other in inside:
            stack.enter_context(_loading_exactly(other))
        _load_exactly(optimizer, optimizer.load_state_dict, saved)
    for attribute, other in shared:
        # torch's load_state_dict makes new groups. A wrapper that keeps the old ones would change rates that nobody
        # reads any more.
        setattr(optimizer, attribute, getattr(other, attribute))


def _are_the_same(first: Any, second: Any) -> bool:
    """Return whether two attributes are one object, or lists of the same groups."""
    if first is second:
        return True
    if not (isinstance(first, list) and isinstance(second, list)):
        return False
    return [id(group) for group in first] == [id(group) for group in second]


@contextlib.contextmanager
def _loading_exactly(optimizer: Optimizer) -> Iterator[None]:
    """Let the ``load_state_dict`` of a wrapped optimizer, which its wrapper calls, be exact."""
    attributes = vars(optimizer)
    had_own = "load_state_dict" in attributes
    own = optimizer.load_state_dict
    attributes["load_state_dict"] = functools.partial(_load_exactly, optimizer, own)
    try:
        yield
    finally:
        if had_own:
            attributes["load_state_dict"] = own
        else:
            attributes.pop("load_state_dict", None)


def _load_exactly(optimizer: Optimizer, load: Callable[[Any], Any], saved: Any) -> None:
    """Load state, and give each tensor the type back that it was saved with.

    Torch casts state to the type of its parameter; fp32 moments of bf16 weights would lose their bits.
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
            now = state.get(entry)
            if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                state[entry] = value.to(now.device)


def state_tensors(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the state of an optimizer, each with its key and where it belongs.

    Args:
        optimizer: Any; one that keeps state elsewhere is asked for its ``state_dict``.
        names: Of parameters, by their ids.
    """
    saved = optimizer.state_dict()
    if not has_torch_layout(saved):
        yield from _tensors_in(saved, "")
        return
    for parameter, state in optimizer.state.items():
        for key, value in state.items() if isinstance(state, Mapping) else ():
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
    """Return key and shape of each tensor in the state of an optimizer, the same on all ranks that hold the same."""
    positions = {
        id(parameter): f"{index}.{position}"
        for index, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    }
    return sorted((key, list(tensor.shape)) for key, tensor in state_tensors(optimizer, positions))
