"""What a forward pass leaves behind in plain attributes of modules: counters, growing lists, state carried along.

Such state is in no checkpoint, and an attempt that is made again changes it once more: nothing puts it back.

Does not: look at parameters and buffers (see ``buffers``), or at objects outside the models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_LOOKED_AT = 64  # entries of a container; a longer one is known by its length
_OWN = frozenset(vars(nn.Module()))  # what torch keeps in every module


def find_side_effects(models: Mapping[str, nn.Module], forward: Callable[[], None]) -> tuple[str, ...]:
    """Return the attributes that another forward pass over the same samples changes, such as ``"layer.calls"``.

    What a pass only overwrites (the last attention, a cache that is filled once) is the same after the second pass as
    after the first, and is not named.

    Args:
        models: By name.
        forward: Runs them once, the same each time.
    """
    forward()
    once = _attributes(models)
    forward()
    twice = _attributes(models)
    changed = [name for name, value in twice.items() if name in once and not _same(once[name], value)]
    return tuple(sorted({*changed, *(set(once) ^ set(twice))}))


def _attributes(models: Mapping[str, nn.Module]) -> dict[str, Any]:
    return {
        ".".join(part for part in (name if len(models) > 1 else "", prefix, key) if part): _snapshot(value, depth=2)
        for name, model in models.items()
        for prefix, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _OWN
    }


def _snapshot(value: Any, depth: int) -> Any:
    """Return plain values as they are and tensors as copies, in containers to some depth; all else by its type."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping) and depth and len(value) <= _LOOKED_AT:
        return {str(key): _snapshot(entry, depth - 1) for key, entry in value.items()}
    if hasattr(value, "__iter__") and hasattr(value, "__len__"):
        entries = list(value) if depth and len(value) <= _LOOKED_AT and not isinstance(value, nn.Module) else []
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
