"""Callbacks that do not keep their owner alive."""

from __future__ import annotations

import weakref
from typing import Any


class WeakCall:
    """Calls a method of an object, if the object still exists.

    A bound method would keep the object alive, and could be part of a reference cycle. A copy of
    the object gets a copy of this.

    Args:
        owner: The object.
        name: Name of the method. Its result is discarded.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = weakref.ref(owner)
        self._name = name

    def __call__(self, *args: Any, **options: Any) -> None:
        """Call the method."""
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._name)(*args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakCall, (self._owner(), self._name)
