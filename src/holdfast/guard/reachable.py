"""Find objects that another object refers to, such as the optimizer inside a scheduler."""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

# The search stops at this distance from its root, in attributes. Objects further away probably
# belong to other code, such as a trainer that a closure refers to.
MOST_LEVELS = 4
# The search stops after visiting this many objects, since some objects refer to large parts of the
# program.
MOST_OBJECTS = 5_000
# Objects of these types are not searched.
_LEAF_TYPES = (
    str,
    bytes,
    bytearray,
    int,
    float,
    complex,
    type(None),
    type,
    types.ModuleType,
    torch.Tensor,
    nn.Module,
)
# The items of these containers count as attributes of the object that refers to the container.
_CONTAINER_TYPES = (list, tuple, set, frozenset, deque, Mapping)


def levels_inside(
    root: Any, is_wanted: Callable[[Any], bool], *, most_levels: int = MOST_LEVELS
) -> Iterator[list[Any]]:
    """Yield the wanted objects that an object refers to, nearest first.

    The search is breadth-first. It follows attributes, containers, closures, bound methods,
    `functools.partial` and weak references. It does not look inside tensors, modules or wanted
    objects.

    Args:
        root: The object where the search starts. It is never yielded.
        is_wanted: Returns whether to yield an object.
        most_levels: The maximum distance from the root, in attributes.

    Yields:
        One list for each distance: first the wanted objects one attribute away, then those two
        attributes away, and so on. A list may be empty.
    """
    visited = {id(root)}
    level = [root]
    for _ in range(most_levels):
        wanted = []
        others = []
        for holder in level:
            for value in _values_of(holder):
                if id(value) in visited or len(visited) > MOST_OBJECTS:
                    continue
                visited.add(id(value))
                if is_wanted(value):
                    wanted.append(value)
                else:
                    others.append(value)
        yield wanted
        level = others


def _values_of(holder: Any) -> Iterator[Any]:
    """Yield the objects that an object refers to directly or through containers."""
    waiting = deque(_attributes_of(holder))
    visited_containers = set[int]()
    while waiting:
        value = waiting.popleft()
        if isinstance(value, _LEAF_TYPES):
            continue
        if not isinstance(value, _CONTAINER_TYPES):
            yield value
            continue
        if id(value) in visited_containers or len(visited_containers) >= MOST_OBJECTS:
            continue
        visited_containers.add(id(value))
        if isinstance(value, Mapping):
            waiting.extend(value.values())
        else:
            waiting.extend(value)


def _attributes_of(holder: Any) -> list[Any]:
    """Return the values of an object's attributes.

    For functions, methods, partial objects and weak references, these are the objects that they
    wrap or refer to.
    """
    if isinstance(holder, functools.partial):
        return [holder.func, holder.args, holder.keywords]
    if isinstance(holder, types.MethodType):
        return [holder.__self__, holder.__func__]
    if isinstance(holder, types.FunctionType):
        return [getattr(holder, "__wrapped__", None), contents_of_closure(holder)]
    if isinstance(holder, weakref.ref):
        return [holder()]
    values = []
    for name, value in getattr(holder, "__dict__", {}).items():
        # An optimizer's hooks belong to the code that registered them, such as an observer that
        # refers to all optimizers.
        if not name.startswith("_optimizer_"):
            values.append(value)
    for kind in type(holder).__mro__:
        for slot in _slots_of(kind):
            values.append(getattr(holder, slot, None))
    return values


def _slots_of(kind: type) -> list[str]:
    """Return the attributes that a class itself declares in ``__slots__``."""
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def contents_of_closure(function: types.FunctionType) -> list[Any]:
    """Return the values of a function's free variables, leaving out unassigned ones."""
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:
            # This variable has not been assigned yet.
            continue
    return contents
