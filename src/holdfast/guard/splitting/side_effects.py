"""What a loss function leaves behind in plain attributes of modules and in its own variables: counters, lists, state.

Such state is in no checkpoint, and an attempt that is made again changes it once more: nothing puts it back.

Does not: look at parameters and buffers (see ``buffers``), at registered state (see ``states``), or at objects that
the loss function reaches through others.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from holdfast.guard.splitting.two_pass import TwoPass

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_CONTAINERS = (list, tuple, set, frozenset, deque, np.ndarray)  # to iterate another might do anything
_LOOKED_AT = 64  # entries of a container; a longer one is known by its length
_OWN = frozenset(vars(nn.Module()))  # what torch keeps in every module


def find_side_effects(
    models: Mapping[str, nn.Module], loss_fn: Callable[[Any], Any], forward: Callable[[], float]
) -> tuple[str, ...]:
    """Return what another pass over the same samples changes, such as ``"layer.calls"`` or ``"loss_fn: hidden"``.

    What a pass only overwrites (the last attention, a cache that is filled once) is the same after the second pass as
    after the first, and is not named.

    Args:
        models: By name.
        loss_fn: Its variables are those that it takes from outside, and the attributes of the object that it is of.
        forward: Runs it once, the same each time, and returns the loss. Variables of the loss function, which may be
            counters or logs, are named only if the second loss is another one than the first.
    """
    losses, seen = [], []
    for _ in range(2):
        losses.append(forward())
        seen.append((_attributes(models), _variables(loss_fn)))
    (once, before), (twice, after) = seen
    changed = _changed(once, twice)
    if losses[0] != losses[1] and not any(map(math.isnan, losses)):  # NaN: memory was short
        changed |= _changed(before, after) or (set() if changed else {"loss_fn: its loss changes, not seen why"})
    return tuple(sorted(changed))


def _changed(once: Mapping[str, Any], twice: Mapping[str, Any]) -> set[str]:
    changed = {name for name, value in twice.items() if name in once and not _same(once[name], value)}
    return changed | (set(once) ^ set(twice))


def _attributes(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    return {
        ".".join(part for part in (name if len(models) > 1 else "", prefix, key) if part): _snapshot(value, depth=2)
        for name, model in models.items()
        for prefix, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _OWN
    }


def _variables(function: Any) -> dict[str, Any]:
    """Return what a function sees outside of itself: free variables, globals, attributes of its object, arguments."""
    found: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        found |= {"argument": [*function.args, *function.keywords.values()]}
        function = function.func
    if isinstance(function, TwoPass):
        return {**_variables(function.outputs), **_variables(function.loss)}
    owner = getattr(function, "__self__", function)
    if not isinstance(owner, (nn.Module, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)):
        found |= getattr(owner, "__dict__", {})
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        outside = inspect.getclosurevars(function)
        found |= {**outside.globals, **outside.nonlocals}
    return {
        f"loss_fn: {name}": _snapshot(value, depth=2)
        for name, value in found.items()
        if not isinstance(value, (nn.Module, types.ModuleType, types.FunctionType, type))
    }


def _snapshot(value: Any, depth: int) -> Any:
    """Return plain values as they are and tensors as copies, in containers to some depth; all else by its type."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping) and depth and len(value) <= _LOOKED_AT:
        return {str(key): _snapshot(entry, depth - 1) for key, entry in value.items()}
    if isinstance(value, _CONTAINERS):
        entries = list(value) if depth and len(value) <= _LOOKED_AT else []
        return [len(value), *(_snapshot(entry, depth - 1) for entry in entries)]
    return type(value).__name__


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and bool(
            ((first == second) | ((first != first) & (second != second))).all()
        )
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second) or (first != first and second != second)
