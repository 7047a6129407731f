"""Take nested batch containers apart, and rebuild them with different contents.

Mappings, lists, tuples, named tuples and dataclasses are containers; everything else, including a
tensor, is a leaf. `check_number` and `check_count` validate values from untrusted files.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

# Integers of this magnitude or more do not fit into the signed 64-bit fields of records and
# tensors.
_INTEGER_LIMIT = 2**63
_MAX_SHOWN_CHARACTERS = 50


def check_number(value: Any, *, or_none: bool = False) -> Any:
    """Check that a value from an untrusted file is a number, and return it unchanged.

    Args:
        value: The value to check.
        or_none: Whether None is also accepted.

    Raises:
        TypeError: If the value is not a number, or is an integer that does not fit into 64 bits.
    """
    if value is None and or_none:
        return value
    if isinstance(value, float):
        return value
    if isinstance(value, int) and abs(value) < _INTEGER_LIMIT:
        return value
    raise TypeError(f"expected a number of at most 64 bits, got a {type(value).__name__}")


def check_count(value: Any, *, least: int = 0, below: int = _INTEGER_LIMIT) -> int:
    """Check that a value from an untrusted file is a count, and return it unchanged.

    Args:
        value: The value to check.
        least: The smallest accepted count.
        below: The exclusive upper bound of accepted counts.

    Raises:
        ValueError: If the value is not an integer with ``least <= value < below``.
    """
    if type(value) is not int or not least <= value < below:
        raise ValueError(f"expected a count, got {str(value)[:_MAX_SHOWN_CHARACTERS]!r}")
    return value


def children_of(node: Any) -> dict[Any, Any] | None:
    """Return a container's children as a dict from key, index or field name; None for a leaf."""
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


def rebuild(node: Any, children: dict[Any, Any], *, checked: bool = True) -> Any:
    """Return a container of the same type as `node`, but with different children.

    Args:
        node: The original container.
        children: The new children, under the keys that `children_of` returned.
        checked: Whether to rebuild a dataclass through its constructor, which may validate its
            fields. If False, the dataclass is copied, and the fields of the copy are set directly.
    """
    if isinstance(node, MutableMapping):
        # Copying preserves the type: Hugging Face's BatchEncoding, for example, is a UserDict.
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
    node_copy = copy.copy(node)
    for name, child in children.items():
        # Unlike `setattr`, `object.__setattr__` also works for frozen dataclasses.
        object.__setattr__(node_copy, name, child)
    return node_copy
