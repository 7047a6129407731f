"""Prepare text for display: sanitize untrusted text, and format sizes, durations and times.

The functions do not escape HTML, which is left to the code that inserts text into a page. Text for
Rich needs no escaping, because it is passed as `Text` objects instead of markup.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

# Terminal escape sequences (ECMA-48): CSI sequences, string sequences (OSC, DCS, SOS, PM and APC)
# and short sequences. At most 512 characters of a string sequence are removed. Otherwise, a string
# sequence without a terminator would remove all text after it.
_ESCAPES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]{0,512}(?:\x07|\x1b\\)?|\x1b["
    r" -/]*[0-~]|\x9b[0-?]*[ -/]*[@-~]"
)
# Unicode categories that are never printed: control characters, surrogates (which UTF-8 cannot
# encode), format characters (which can reverse the direction of the text), private-use and
# unassigned code points, and line and paragraph separators.
_INVISIBLE_CATEGORIES = frozenset({"Cc", "Cs", "Cf", "Co", "Cn", "Zl", "Zp"})
_SPACE_CATEGORY = "Zs"
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


def sanitise(value: object, *, most: int = 2000, lines: bool = False) -> str:
    """Return text without escape sequences or control characters, which could affect a terminal.

    Args:
        value: Text, or an object to convert with ``str``.
        most: The maximum length in characters. Longer text is truncated and ends with an ellipsis.
        lines: Whether to keep line breaks. If False, line breaks become spaces.
    """
    text = value if isinstance(value, str) else str(value)
    # Truncate generously first, to avoid processing a gigabyte of text. The final truncation to
    # `most` comes after the escape sequences have been removed.
    text = text[: 4 * most + 64]
    if not text.isascii() or not text.isprintable():
        text = _ESCAPES.sub("", text).expandtabs(4)
        if lines:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        text = "".join(_visible(character, lines=lines) for character in text)
    if len(text) > most:
        text = text[: most - 1] + _ELLIPSIS
    return text


def _visible(character: str, *, lines: bool) -> str:
    """Return a character, or a visible replacement if the character is not printable."""
    if character == "\n":
        return "\n" if lines else " "
    category = unicodedata.category(character)
    if category in _INVISIBLE_CATEGORIES:
        return _REPLACEMENT
    if category == _SPACE_CATEGORY:
        return " "
    return character


def as_json_value(value: Any, *, depth: int = 8) -> Any:
    """Convert a value to one that every JSON parser accepts once it is serialized.

    NaN and infinities become the strings "NaN", "Infinity" and "-Infinity", as in protobuf's JSON
    mapping; ``float()`` and JavaScript's ``Number()`` can read these strings. Dictionary keys,
    objects of other types, and values nested more than `depth` levels deep become strings.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return _nonfinite_text(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if depth == 0:
        return sanitise(value)
    if isinstance(value, dict):
        return {
            _without_surrogates(str(key)): as_json_value(item, depth=depth - 1)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [as_json_value(item, depth=depth - 1) for item in value]
    return _without_surrogates(value if isinstance(value, str) else str(value))


def _nonfinite_text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode, with question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def duration(seconds: float) -> str:
    """Format a duration, using at most two units.

    Examples: "4.2 ms", "8.2 s", "45 s", "3 min 5 s", "5 h 3 min", "2 d 4 h".
    """
    if seconds < 60:
        return _short_duration(seconds)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    counts = {"d": days, "h": hours, "min": minutes, "s": rest}
    units = list(counts)
    largest = next(index for index, unit in enumerate(units) if counts[unit])
    two_largest = units[largest : largest + 2]
    return " ".join(f"{counts[unit]} {unit}" for unit in two_largest if counts[unit])


def _short_duration(seconds: float) -> str:
    """Format a duration of less than a minute, in seconds or milliseconds."""
    if 0 < seconds < 0.1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s"


def size(count: float) -> str:
    """Format a number of bytes with up to three digits and a binary unit, such as "1.25 GiB"."""
    # A damaged recording may contain an integer that is too large to convert to a float.
    count = min(count, 2**100)
    for unit in ("B", "KiB", "MiB", "GiB"):
        # `:.3g` would format 999.5 and above as "1e+03".
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def number(value: float) -> str:
    """Format a number with four significant digits or as an integer: "0.01235" or "12,346"."""
    if 1000 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(share: float) -> str:
    """Format a fraction between 0 and 1 as a percentage, such as "42 %" or "0.25 %"."""
    if abs(share) >= 0.1:
        return f"{100 * share:.0f} %"
    return f"{100 * share:.2g} %"


def capitalized(text: str) -> str:
    """Return a text whose first letter is a capital letter."""
    return text[:1].upper() + text[1:]


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, such as "1 batch" or "1,200 batches"."""
    if count == 1:
        return f"1 {noun}"
    plural = f"{noun}es" if noun.endswith(("s", "x", "tch", "sh")) else f"{noun}s"
    return f"{count:,} {plural}"


def listed(values: Iterable[object], *, most: int = 5) -> str:
    """Join values as in a sentence, such as "a, b and c" or, beyond `most`, "a, b and 7 more"."""
    words = [str(value) for value in values]
    if len(words) > most + 1:
        words = [*words[:most], f"{len(words) - most} more"]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def moment(unix_seconds: float, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Format a Unix time in UTC with ``strftime``. Return "unknown" if it is out of range."""
    try:
        return datetime.fromtimestamp(unix_seconds, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return "unknown"
