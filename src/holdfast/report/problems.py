"""Collect messages about unreadable parts of a run, which are shown at the foot of its page."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from holdfast.core.errors import HoldfastError
from holdfast.core.text import sanitise

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
# Exceptions that may be raised if a file is damaged, missing or not written by holdfast.
READING_ERRORS = (HoldfastError, OSError, ValueError, KeyError, TypeError, struct.error)
_MAX_CHARACTERS = 300


class Problems:
    """Collects one sentence for each part of a run that cannot be read.

    Attributes:
        sentences: The sentences, in the order in which they were added.
    """

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def add(self, sentence: str) -> None:
        """Add a sentence that describes a problem."""
        self.sentences.append(sentence)

    def read(
        self,
        function: Callable[_Arguments, _Result],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result | None:
        """Call a function that reads files, and return its result.

        If it raises one of `READING_ERRORS`, add a sentence about the error, and return None.
        """
        try:
            return function(*args, **kwargs)
        except READING_ERRORS as error:
            self.add(reason(error))
            return None


def reason(error: Exception, most: int = _MAX_CHARACTERS) -> str:
    """Return why a file could not be read, as sanitized text of at most `most` characters."""
    return sanitise(error.what if isinstance(error, HoldfastError) else error, most=most)
