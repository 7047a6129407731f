"""A callback that calls a method of an object without keeping the object alive."""

from __future__ import annotations

import weakref
from typing import Any


class WeakCall:
    """A callback that calls a method of an object if the object still exists.

    A bound method would keep the object alive and could create a reference cycle. If an object that
    holds a `WeakCall` to itself is copied, the copy's `WeakCall` refers to the copy.

    Args:
        owner: The object whose method is called.
        name: Name of the method. Its result is discarded.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = weakref.ref(owner)
        self._name = name

    def __call__(self, *args: Any, **options: Any) -> None:
        """Call the method with these arguments, or do nothing if the object no longer exists."""
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._name)(*args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakCall, (self._owner(), self._name)
