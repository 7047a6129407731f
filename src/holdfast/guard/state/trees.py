"""Copy, traverse and compare nested state, such as the return value of ``state_dict()``.

In this module, nested state is called a tree, and the values and containers in it are nodes.
"""

from __future__ import annotations

import collections
import copy
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from holdfast.checkpoint.kinds import (
    bits_of,
    bytes_of,
    computable,
    has_no_values,
    is_plain,
    parts_of,
    same_bits,
)

_PLAIN = frozenset((bool, int, float, str, bytes, type(None)))
_MAPPINGS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)


def copied_to_host(tree: Any) -> Any:
    """Return an independent copy of a tree, with all tensors in host memory."""
    return copied(tree, lambda tensor: tensor.to("cpu", copy=True))


def copied(tree: Any, copy_tensor: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> Any:
    """Return an independent copy of a tree.

    Args:
        tree: The nested state to copy.
        copy_tensor: Function that returns a copy of a tensor.
    """
    if isinstance(tree, torch.Tensor):
        return copy_tensor(tree.detach())
    if type(tree) in _MAPPINGS:
        factory = (tree.default_factory,) if isinstance(tree, collections.defaultdict) else ()
        container = type(tree)(*factory)
        for key, value in tree.items():
            container[key] = copied(value, copy_tensor)
        return container
    if is_flat(tree):
        return type(tree)(tree)
    if type(tree) in (list, tuple):
        return type(tree)([copied(value, copy_tensor) for value in tree])
    if type(tree) is collections.deque:
        return collections.deque([copied(value, copy_tensor) for value in tree], tree.maxlen)
    return tree if type(tree) in _PLAIN else copy.deepcopy(tree)


def is_flat(tree: Any) -> bool:
    """Return whether a node is a list or tuple that contains only plain values."""
    return type(tree) in (list, tuple) and _PLAIN.issuperset(map(type, tree))


def children_of(tree: Any) -> list[Any]:
    """Return the keys and values of a container, or an empty list for any other node."""
    if type(tree) in _MAPPINGS:
        return [*tree, *tree.values()]
    return list(tree) if type(tree) in (list, tuple, collections.deque) else []


def is_small(tree: Any, *, most_entries: int, most_bytes: int) -> bool:
    """Return whether a tree is small, that is, whether it exceeds neither of the two limits.

    Args:
        tree: The nested state to measure.
        most_entries: The largest number of nodes.
        most_bytes: The largest size of all tensors and arrays together, in bytes.
    """
    entries = 0
    size = 0
    remaining = [tree]
    while remaining:
        node = remaining.pop()
        if isinstance(node, torch.Tensor):
            size += bytes_of(node)
        elif isinstance(node, np.ndarray):
            size += node.nbytes
        entries += 1
        children = children_of(node)
        if entries > most_entries or size > most_bytes or len(children) > most_entries:
            return False
        remaining += children
    return True


def fingerprint(tree: Any) -> list[Any]:
    """Return a list that almost certainly changes if any value in the tree changes.

    A tensor contributes its shape and the sum of its bits. Any other leaf contributes a checksum.
    This function synchronizes with the device.
    """
    entries: list[Any] = []
    remaining = [tree]
    while remaining:
        node = remaining.pop()
        children = children_of(node)
        if isinstance(node, torch.Tensor) and not has_no_values(node):
            entries += [(tuple(part.shape), bits_of(part).sum()) for part in parts_of(node)]
        elif not children:
            entries.append(zlib.crc32(repr(node).encode()))
        remaining += children
    sums = [entry[1].cpu() for entry in entries if isinstance(entry, tuple)]
    numbers = iter(torch.stack(sums).tolist() if sums else [])
    return [(entry[0], next(numbers)) if isinstance(entry, tuple) else entry for entry in entries]


def same(first: Any, second: Any, *, tolerance: float = 0.0) -> bool:
    """Return whether two trees contain the same values. NaN equals NaN.

    Args:
        first: A tree.
        second: Another tree.
        tolerance: The largest allowed difference between two tensors or floats, relative to the L2
            norm of the first. 0.0 means that they must be equal.
    """
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return _same_tensors(first, second, tolerance)
    if type(first) is not type(second):
        return False
    for kinds, compare in _COMPARISONS:
        if isinstance(first, kinds):
            return compare(first, second, tolerance)
    return _same_objects(first, second, tolerance)


def _same_arrays(
    first: np.ndarray[Any, Any], second: np.ndarray[Any, Any], _tolerance: float
) -> bool:
    return bool(np.array_equal(first, second, equal_nan=first.dtype.kind in "fc"))


def _same_floats(first: float, second: float, tolerance: float) -> bool:
    if abs(float(first) - float(second)) <= tolerance * abs(float(first)):
        return True
    are_nan = first != first and second != second
    return first == second or are_nan


def _same_mappings(first: Mapping[Any, Any], second: Mapping[Any, Any], tolerance: float) -> bool:
    return first.keys() == second.keys() and all(
        same(first[key], second[key], tolerance=tolerance) for key in first
    )


def _same_sequences(first: Sequence[Any], second: Sequence[Any], tolerance: float) -> bool:
    return len(first) == len(second) and all(
        same(item, other_item, tolerance=tolerance)
        for item, other_item in zip(first, second, strict=True)
    )


def _same_objects(first: Any, second: Any, tolerance: float) -> bool:
    # An object whose class does not define `__eq__` equals only itself, so compare the attributes.
    has_own_equality = any("__eq__" in vars(kind) for kind in type(first).__mro__[:-1])
    if hasattr(first, "__dict__") and not has_own_equality:
        return same(vars(first), vars(second), tolerance=tolerance)
    return bool(first == second)


# How to compare two values of the same type. The first kind that the values belong to counts.
_COMPARISONS: tuple[tuple[Any, Callable[[Any, Any, float], bool]], ...] = (
    (np.ndarray, _same_arrays),
    ((float, np.floating), _same_floats),
    (Mapping, _same_mappings),
    ((list, tuple, collections.deque), _same_sequences),
)


def _same_tensors(first: Any, second: Any, tolerance: float) -> bool:
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return False
    if has_no_values(first) or has_no_values(second):
        return first is second
    if _form_of(first) != _form_of(second):
        return False
    first = first.detach()
    second = second.detach()
    if not is_plain(first):
        if same_bits(first, second):
            return True
        if not tolerance:
            return False
    return _same_values(computable(first), computable(second), tolerance)


def _form_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.layout


def _same_values(first: torch.Tensor | None, second: torch.Tensor | None, tolerance: float) -> bool:
    """Compare the values of two tensors, each None if torch cannot compute with its values."""
    if first is None or second is None or first.shape != second.shape:
        return False
    are_nan = (first != first) & (second != second)
    if bool(((first == second) | are_nan).all()):
        return True
    if not tolerance or not first.is_floating_point():
        return False
    allowed = tolerance * torch.linalg.vector_norm(first.float())
    return bool(torch.linalg.vector_norm((first - second).float()) <= allowed)
