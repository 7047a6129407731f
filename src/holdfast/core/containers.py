"""Containers that a batch is nested in.

Taken apart by key, and put together again as what they were.

Known are mappings, lists, tuples, named tuples and dataclasses; everything else is a leaf. Does not
know tensors.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any


def number(value: Any, *, or_none: bool = False) -> Any:
    """Return a number that others may have written.

    A TypeError if it is none, or of more than 64 bits.
    """
    if (
        (value is None and or_none)
        or isinstance(value, float)
        or (isinstance(value, int) and abs(value) < 2**63)
    ):
        return value
    raise TypeError(f"a {type(value).__name__} in place of a number, or a large one")


def count(value: Any, *, least: int = 0, below: int = 2**63) -> int:
    """Return a count that others may have written; a ValueError if it is none."""
    if type(value) is not int or not least <= value < below:
        raise ValueError(f"{str(value)[:50]!r} in place of a count")
    return value


def children_of(node: Any) -> dict[Any, Any] | None:
    """Return the children of a container by key, or None for a leaf."""
    if isinstance(node, Mapping):
        return dict(node)
    if isinstance(node, (list, tuple)):
        return dict(enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {
            field.name: getattr(node, field.name)
            for field in dataclasses.fields(node)
            if field.init
        }
    return None


def rebuilt(node: Any, children: dict[Any, Any], *, checked: bool = True) -> Any:
    """Return a container like another one, with other children by the keys of `children_of`.

    A dataclass is made anew, with its own checks, or copied past them if not `checked`.
    """
    if isinstance(node, MutableMapping):
        made = copy.copy(node)  # keeps the type: Hugging Face's BatchEncoding is a UserDict
        made.update(children)
        return made
    if isinstance(node, Mapping):
        return children
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*children.values())
    if isinstance(node, (list, tuple)):
        return type(node)(children.values())
    if checked:
        return dataclasses.replace(node, **children)
    made = copy.copy(node)
    for name, child in children.items():
        object.__setattr__(made, name, child)  # past a frozen class too
    return made
