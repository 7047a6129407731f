"""Load and describe the state of optimizers, using the optimizers' own methods.

An optimizer that wraps another, such as Lookahead, may keep its state in any form. The guard reads
individual entries of a ``state_dict`` only if it has the layout of a torch optimizer's
``state_dict`` (`has_torch_layout`). Any other ``state_dict`` is saved and loaded as one opaque
value.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.guard.optimizers import optimizers_inside

# Entries of a parameter group that choose between implementations of the same optimizer. They are
# properties of the script and its machine, not of the training state, so a resumed run takes them
# from the script.
IMPLEMENTATION_FLAGS = ("fused", "foreach", "capturable", "differentiable")


def has_torch_layout(state: Any) -> bool:
    """Return whether a ``state_dict`` has exactly the layout that torch optimizers use."""
    if not isinstance(state, Mapping) or set(state) != {"state", "param_groups"}:
        return False
    groups = state["param_groups"]
    if not isinstance(state["state"], Mapping) or not isinstance(groups, list):
        return False
    return all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )


# --- loading


def load_optimizer(optimizer: Optimizer, saved: Any) -> None:
    """Load a saved ``state_dict`` through the optimizer's own ``load_state_dict``.

    The optimizer keeps its own `IMPLEMENTATION_FLAGS`. Tensors keep the dtypes in which they were
    saved. Both also apply to a torch optimizer inside a wrapper. If
    a wrapper shared its ``param_groups`` or ``state`` with an inner optimizer, they are shared
    again after loading.
    """
    inner_optimizers = [
        inner for inner in optimizers_inside(optimizer) if isinstance(inner, Optimizer)
    ]
    own_attributes = vars(optimizer)
    shared = [
        (name, inner)
        for name in ("param_groups", "state")
        for inner in inner_optimizers
        if name in own_attributes and _is_shared(own_attributes[name], getattr(inner, name))
    ]

    with contextlib.ExitStack() as stack:
        for inner in inner_optimizers:
            stack.enter_context(_loading_exactly(inner))
        _load_exactly(optimizer, optimizer.load_state_dict, saved)

    for name, inner in shared:
        # torch's load_state_dict creates new groups. If the wrapper kept the old ones, its
        # scheduler would change learning rates that no optimizer reads.
        setattr(optimizer, name, getattr(inner, name))


def _is_shared(first: Any, second: Any) -> bool:
    """Return whether two attributes are the same object, or lists of the same groups."""
    if first is second:
        return True
    if not (isinstance(first, list) and isinstance(second, list)):
        return False
    return [id(group) for group in first] == [id(group) for group in second]


@contextlib.contextmanager
def _loading_exactly(optimizer: Optimizer) -> Iterator[None]:
    """Make a wrapped optimizer use `_load_exactly` when its wrapper calls ``load_state_dict``."""
    own_attributes = vars(optimizer)
    was_replaced = "load_state_dict" in own_attributes
    original = optimizer.load_state_dict
    own_attributes["load_state_dict"] = functools.partial(_load_exactly, optimizer, original)
    try:
        yield
    finally:
        if was_replaced:
            own_attributes["load_state_dict"] = original
        else:
            own_attributes.pop("load_state_dict", None)


def _load_exactly(optimizer: Optimizer, load: Callable[[Any], Any], saved: Any) -> None:
    """Load a saved state with the given method, with its dtypes and the optimizer's own flags.

    While loading, torch casts state tensors to the dtype of their parameter, which would round the
    fp32 moments of bf16 weights. The saved dtypes are therefore restored afterwards.

    Args:
        optimizer: The optimizer that receives the state.
        load: The optimizer's own ``load_state_dict``.
        saved: The saved ``state_dict``.
    """
    if not has_torch_layout(saved):
        load(saved)
        return
    # The flags must be set before loading: torch moves the step counts to the device and dtype that
    # the flags need.
    load({**saved, "param_groups": _groups_with_own_flags(optimizer, saved["param_groups"])})
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, parameter in zip(keys, parameters, strict=False):
        loaded_state = optimizer.state.get(parameter)
        saved_state = saved["state"].get(key)
        if isinstance(loaded_state, dict) and isinstance(saved_state, Mapping):
            _restore_dtypes(loaded_state, saved_state)


def _groups_with_own_flags(
    optimizer: Optimizer, saved_groups: list[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return saved parameter groups in which the flags are those of the optimizer's own groups."""
    if len(saved_groups) != len(optimizer.param_groups):
        # The optimizer itself raises an error that explains the difference.
        return saved_groups
    return [
        {**saved, **{flag: own[flag] for flag in IMPLEMENTATION_FLAGS if flag in own}}
        for saved, own in zip(saved_groups, optimizer.param_groups, strict=True)
    ]


def _restore_dtypes(loaded_state: dict[str, Any], saved_state: Mapping[str, Any]) -> None:
    """Replace each tensor in one parameter's state whose dtype was changed by loading it.

    The step count is left out, because fused and capturable implementations need another dtype than
    the others.
    """
    for entry, saved in saved_state.items():
        if entry == "step":
            continue
        loaded = loaded_state.get(entry)
        if not (isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor)):
            continue
        if loaded.dtype != saved.dtype:
            loaded_state[entry] = saved.to(loaded.device)


# --- describing


def state_tensors(
    optimizer: Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in an optimizer's state, each with a description.

    A description looks like ``"exp_avg of fc.weight"``. If the ``state_dict`` does not have torch's
    layout, the description is the tensor's path in the ``state_dict``, such as ``"slow.0"``.

    Args:
        optimizer: The optimizer, which may be a wrapper.
        names: The names of the parameters, keyed by their ``id``.
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
    """Yield the tensors in nested mappings and sequences with their paths, such as ``"slow.0"``."""
    if isinstance(tree, torch.Tensor):
        yield path, tree
        return
    if isinstance(tree, Mapping):
        entries = list(tree.items())
    elif isinstance(tree, (list, tuple)):
        entries = list(enumerate(tree))
    else:
        return
    for key, value in entries:
        path_of_value = f"{path}.{key}" if path else str(key)
        yield from _tensors_in(value, path_of_value)


def describe_state(optimizer: Optimizer) -> list[tuple[str, list[int]]]:
    """Return the description and shape of each tensor in an optimizer's state, sorted.

    The descriptions refer to a parameter by its group and its position in the group, so that
    replicas of an optimizer yield equal lists on all ranks.
    """
    positions = {
        id(parameter): f"{index}.{position}"
        for index, group in enumerate(optimizer.param_groups)
        for position, parameter in enumerate(group["params"])
    }
    return sorted(
        (description, list(tensor.shape))
        for description, tensor in state_tensors(optimizer, positions)
    )
