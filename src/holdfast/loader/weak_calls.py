"""Callbacks that keep nobody alive."""

from __future__ import annotations

import weakref
from typing import Any


class WeakCall:
    """A method of an object that may be gone: then nothing happens.

    A bound method would be a cycle of references.

    A copy of the object has a copy of this. What the method returns is not passed on.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._owner = weakref.ref(owner)
        self._name = name

    def __call__(self, *args: Any, **named: Any) -> None:
        """Call the method."""
        owner = self._owner()
        if owner is not None:
            getattr(owner, self._name)(*args, **named)

    def __reduce__(self) -> tuple[Any, ...]:
        return WeakCall, (self._owner(), self._name)
