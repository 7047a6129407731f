"""Callbacks that do not keep the object that they call alive."""

from __future__ import annotations

import weakref
from typing import Any


class WeakCall:
    """A callback that calls a method of an object if the object still exists.

    A bound method would keep the object alive and could create a reference cycle. If the object is
    copied, its copy gets a `WeakCall` that refers to the copy.

    Args:
        owner: The object whose method is called.
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
