"""Attributes of modules and classes that are replaced for a while, and put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

_MISSING = object()


class Patches(contextlib.ExitStack):
    """Replaced attributes; leaving the context puts them back."""

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute, or add it."""
        previous = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        if previous is _MISSING:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, previous)

    def wrap(self, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
        """Replace a callable, if this torch has it, by one made around it."""
        original = getattr(owner, name, None)
        if original is not None:
            self.replace(owner, name, around(original))
