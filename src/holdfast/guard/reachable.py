"""Find what an object holds through its attributes, such as the optimizer that a scheduler
drives.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

# An object that is more attributes away belongs to something else, such as a trainer in a closure.
MOST_LEVELS = 4
# Bounds the work for objects that refer to half of a program.
MOST_OBJECTS = 5_000
# Objects of these types are not looked into.
_LEAVES = (
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


def levels_inside(
    root: Any, is_wanted: Callable[[Any], bool], *, most_levels: int = MOST_LEVELS
) -> Iterator[list[Any]]:
    """Yield the wanted objects that an object refers to.

    First those one attribute away, then two, and so on.

    The search is breadth-first. It follows attributes, containers, closures, bound methods,
    `functools.partial` and weak references, but no tensors and modules, and it does not continue
    behind a wanted object.

    Args:
        root: The object at which the search begins. It is not yielded itself.
        is_wanted: A function that returns whether to yield an object.
        most_levels: How many attributes away the search ends.

    Yields:
        For each distance a list, which may be empty.
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
    """Yield the objects that an object refers to directly.

    Items of a container count as its attributes.
    """
    waiting = deque(_attributes_of(holder))
    containers = set[int]()
    while waiting:
        value = waiting.popleft()
        if isinstance(value, _LEAVES):
            continue
        if not isinstance(value, (list, tuple, set, frozenset, deque, Mapping)):
            yield value
        elif id(value) not in containers and len(containers) < MOST_OBJECTS:
            containers.add(id(value))
            waiting.extend(value.values() if isinstance(value, Mapping) else value)


def _attributes_of(holder: Any) -> list[Any]:
    """Return the values of an object's attributes, or of a function's closure."""
    if isinstance(holder, functools.partial):
        return [holder.func, holder.args, holder.keywords]
    if isinstance(holder, types.MethodType):
        return [holder.__self__, holder.__func__]
    if isinstance(holder, types.FunctionType):
        return [getattr(holder, "__wrapped__", None), contents_of_closure(holder)]
    if isinstance(holder, weakref.ref):
        return [holder()]
    # The hooks of an optimizer belong to the code that registered them, such as an observer of all
    # optimizers.
    own = getattr(holder, "__dict__", {})
    attributes = [value for name, value in own.items() if not name.startswith("_optimizer_")]
    slots = [name for kind in type(holder).__mro__ for name in _slots_of(kind)]
    return attributes + [getattr(holder, name, None) for name in slots]


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def contents_of_closure(function: types.FunctionType) -> list[Any]:
    """Return the values of a function's free variables, as far as they have one."""
    contents = []
    for cell in function.__closure__ or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:
            # The variable was not assigned yet.
            continue
    return contents
