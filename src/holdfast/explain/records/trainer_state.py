"""Read the log history in ``trainer_state.json``, which the Trainer of transformers saves.

The file is read piece by piece, because the log history of a long run is large.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from holdfast.explain.records.damage import DamagedError
from holdfast.explain.records.record import Record

# The keys before the log history, which are sorted, are a few hundred characters long.
_MAX_CHARACTERS_BEFORE = 1 << 20
# An entry of the log history has a few hundred characters.
_MAX_CHARACTERS_OF_ENTRY = 1 << 20
_PIECE = 1 << 16
# Larger integers are not metrics, and some of them cannot be converted to a float.
_MAX_INT = 2**63
_REPLACED_BY_ZERO = (
    "In the file, such a loss is 0, because the Trainer hides losses that are not finite"
    " (`logging_nan_inf_filter=False` shows them)."
)
_LOG_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")


def holds_log_history(beginning: str) -> bool:
    """Return whether the beginning of a JSON file contains the log history's key."""
    return _LOG_HISTORY.search(beginning) is not None


def read_into(path: Path, record: Record) -> None:
    """Add the numbers in the log history to a record.

    If a loss is not finite, the Trainer writes 0 instead (`logging_nan_inf_filter`), and only the
    norm of the gradients is NaN. Such a loss is added as NaN.

    Args:
        path: The file.
        record: Receives the numbers, a sentence if losses were replaced, and a clause if the file
            ends inside the log history.

    Raises:
        DamagedError: If the file has no log history, or is damaged before its first entry.
        OSError: If the file cannot be read.
    """
    count = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        try:
            for entry in _entries(file):
                numbers = _numbers_in(entry)
                step = numbers.pop("step", math.nan)
                if not math.isfinite(step):
                    continue
                if numbers.get("loss") == 0.0 and not math.isfinite(numbers.get("grad_norm", 0.0)):
                    numbers["loss"] = math.nan
                    record.note(_REPLACED_BY_ZERO)
                for name, value in numbers.items():
                    record.add(name, int(step), value)
                count += 1
        except DamagedError as error:
            if count == 0:
                raise
            record.note_missing(f"the log history after entry {count:,} has {error}")


def _entries(file: TextIO) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of the log history."""
    decoder = json.JSONDecoder()
    text = _text_after_key(file)
    position = 0
    while True:
        between = _BETWEEN.match(text, position)
        position = between.end() if between is not None else position
        if text.startswith("]", position):
            return
        try:
            entry, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            piece = file.read(_PIECE)
            if not piece or len(text) - position > _MAX_CHARACTERS_OF_ENTRY:
                raise DamagedError("an entry that is cut off or is not JSON") from error
            text = text[position:] + piece
            position = 0
            continue
        if not isinstance(entry, dict):
            raise DamagedError("an entry that is not an object")
        yield entry


def _text_after_key(file: TextIO) -> str:
    """Read up to the log history, and return the text that was read after its key."""
    text = ""
    while len(text) < _MAX_CHARACTERS_BEFORE:
        piece = file.read(_PIECE)
        text += piece
        match = _LOG_HISTORY.search(text)
        if match is not None:
            return text[match.end() :]
        if not piece:
            break
    raise DamagedError("no log history")


def _numbers_in(entry: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in entry.items()
        if isinstance(value, float) or (type(value) is int and abs(value) < _MAX_INT)
    }
