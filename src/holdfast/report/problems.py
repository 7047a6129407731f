"""What could not be read of a run, as sentences for the foot of a page."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from holdfast.core.errors import HoldfastError
from holdfast.core.text import sanitise

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
# What a damaged, missing or foreign file raises when it is read.
READING_ERRORS = (HoldfastError, OSError, ValueError, KeyError, TypeError, struct.error)
_MOST_CHARACTERS = 300


class Problems:
    """Collects a sentence for each part of a run that cannot be read.

    Attributes:
        sentences: The sentences so far, in the order in which they were added.
    """

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def add(self, sentence: str) -> None:
        """Add a sentence."""
        self.sentences.append(sentence)

    def read(
        self,
        function: Callable[_Arguments, _Result],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result | None:
        """Return what a function reads; if it fails, note the reason and return None."""
        try:
            return function(*args, **kwargs)
        except READING_ERRORS as error:
            self.add(reason(error))
            return None


def reason(error: Exception, most: int = _MOST_CHARACTERS) -> str:
    """Return why something could not be read, as one harmless sentence."""
    return sanitise(error.what if isinstance(error, HoldfastError) else error, most=most)
