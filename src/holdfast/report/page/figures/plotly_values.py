"""Convert text, numbers and dates for plotly.js.

All text in a figure passes through `label`, because plotly.js renders some HTML tags, and the names
in a run may contain anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.core.text import moment, sanitise
from holdfast.report.curves import FloatArray

# A figure, or a part of one, in the JSON schema of plotly.js.
Figure = dict[str, Any]


def label(value: object, most: int = 120) -> str:
    """Return a value as text that plotly.js shows literally, without control characters.

    Args:
        value: Any object, which is converted to text.
        most: The maximum number of characters.
    """
    text = sanitise(value, most=most)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def json_numbers(numbers: FloatArray) -> list[float | int | None]:
    """Return numbers rounded to seven digits, as precise as float32. None replaces NaN and Inf."""
    return [_json_number(number) for number in numbers.tolist()]


def _json_number(number: float) -> float | int | None:
    if not np.isfinite(number):
        return None
    if number == int(number):
        return int(number)
    return float(f"{number:.7g}")


def date(unix_seconds: float) -> str:
    """Return a Unix time as text in UTC, in the format that plotly's date axes expect."""
    # Drop the last three of the six digits of microseconds, because plotly expects milliseconds.
    return moment(unix_seconds, "%Y-%m-%d %H:%M:%S.%f")[:-3]
