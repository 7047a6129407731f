"""Text for people: what a run printed made harmless, and durations, sizes and moments with a unit.

Does not: escape for HTML (the page does, once, where text enters it) or for Rich (which gets
    `Text`, not markup).
"""

from __future__ import annotations

import math
import re
import unicodedata
from datetime import UTC, datetime
from typing import Any

# Escape sequences of terminals (ECMA-48): CSI, the string sequences OSC, DCS, SOS, PM and APC, and
# short ones. A string takes at most 512 characters away: one that never ends would hide all that
# follows.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]{0,512}(?:\x07|\x1b\\)?|\x1b["
    r" -/]*[0-~]|\x9b[0-?]*[ -/]*[@-~]"
)
# Controls, surrogates (which no UTF-8 file takes), private and unassigned code points, and the
# format characters, which include those that reverse the direction of writing; line and paragraph
# separators.
_UNSEEN = frozenset({"Cc", "Cs", "Cf", "Co", "Cn", "Zl", "Zp"})
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def sanitise(value: object, *, most: int = 2000, lines: bool = False) -> str:
    """Return text (anything else as ``str`` has it) that shows what it is and does nothing.

    What is longer than `most` characters is cut and marked by an ellipsis; line breaks stay with
    `lines`, else they become spaces.
    """
    text = value if isinstance(value, str) else str(value)
    text = text[: 4 * most + 64]  # never a regular expression over a gigabyte
    if not text.isascii() or not text.isprintable():
        text = _ESCAPES.sub("", text).expandtabs(4)
        if lines:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        text = "".join(_seen(character, lines=lines) for character in text)
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _seen(character: str, *, lines: bool) -> str:
    if character == "\n":
        return "\n" if lines else " "
    category = unicodedata.category(character)
    return _REPLACEMENT if category in _UNSEEN else " " if category == "Zs" else character


def as_json_value(value: Any, *, depth: int = 8) -> Any:
    """Return a value that every JSON parser takes.

    What is not finite becomes "NaN", "Infinity" or "-Infinity".

    These are the texts that protobuf's JSON mapping uses, and that ``float()`` and JavaScript's
    ``Number()`` read.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if depth == 0:
        return sanitise(value)
    if isinstance(value, dict):
        return {
            _whole(str(key)): as_json_value(each, depth=depth - 1) for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [as_json_value(each, depth=depth - 1) for each in value]
    return _whole(value if isinstance(value, str) else str(value))


def _whole(text: str) -> str:
    """Return the text without lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode("utf-8")


def duration(seconds: float) -> str:
    """Return a duration in its two largest units.

    "4.2 ms", "8.2 s", "45 s", "3 min 5 s", "5 h 3 min", "2 d 4 h".
    """
    if seconds < 60:
        if 0 < seconds < 0.1:
            return f"{1000 * seconds:.3g} ms"
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (rest, "s")]
    large = next(index for index, (count, _) in enumerate(units) if count)
    return " ".join(f"{count} {unit}" for count, unit in units[large : large + 2] if count)


def size(count: float) -> str:
    """Return a number of bytes with three digits and a binary unit."""
    count = min(count, 2**100)  # whatever others have written: larger integers are no floats
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def moment(unix_seconds: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Return a time in UTC, "unknown" if it is none."""
    try:
        return datetime.fromtimestamp(unix_seconds, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "unknown"
