"""Take apart the containers that a batch is nested in, and rebuild them with other contents.

Mappings, lists, tuples, named tuples and dataclasses are containers; everything else is a leaf.
Tensors are not known here. `number` and `count` check leaves that somebody else has written.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

# Larger integers do not fit the records and tensors that numbers are put into.
_BELOW = 2**63
_MAX_SHOWN_CHARACTERS = 50


def number(value: Any, *, or_none: bool = False) -> Any:
    """Return a number that somebody else may have written.

    Args:
        value: What was written.
        or_none: Whether it may be None.

    Raises:
        TypeError: If it is not a number, or an integer of more than 64 bits.
    """
    if value is None and or_none:
        return value
    if isinstance(value, float):
        return value
    if isinstance(value, int) and abs(value) < _BELOW:
        return value
    raise TypeError(f"a {type(value).__name__} in place of a number, or a large one")


def count(value: Any, *, least: int = 0, below: int = _BELOW) -> int:
    """Return a count that somebody else may have written.

    Raises:
        ValueError: If it is not an integer of at least `least` and less than `below`.
    """
    if type(value) is not int or not least <= value < below:
        raise ValueError(f"{str(value)[:_MAX_SHOWN_CHARACTERS]!r} in place of a count")
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
    """Return a container like another one, with other children.

    Args:
        node: The other container.
        children: The children, by the keys of `children_of`.
        checked: Whether a dataclass is made by its constructor, with its own checks. Otherwise it
            is copied, and its fields are set past the checks.
    """
    if isinstance(node, MutableMapping):
        # A copy keeps the type, such as Hugging Face's BatchEncoding, which is a UserDict.
        mapping = copy.copy(node)
        mapping.update(children)
        return mapping
    if isinstance(node, Mapping):
        return children
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)(*children.values())
    if isinstance(node, (list, tuple)):
        return type(node)(children.values())
    if checked:
        return dataclasses.replace(node, **children)
    twin = copy.copy(node)
    for name, child in children.items():
        # This sets the fields of a frozen class, too.
        object.__setattr__(twin, name, child)
    return twin
