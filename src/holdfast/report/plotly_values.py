"""Texts, numbers and dates as plotly.js takes them.

Each text that enters a figure passes through `label`: plotly.js draws some HTML in texts, and a run
may have any name.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.core.text import moment, sanitise
from holdfast.report.curves import Numbers

# A figure, or a part of one, in the JSON schema of plotly.js.
Figure = dict[str, Any]


def label(value: object, most: int = 120) -> str:
    """Return text that plotly.js draws as it is: without tags, entities and control characters.

    Args:
        value: Any text.
        most: Number of characters after which it is cut.
    """
    text = sanitise(value, most=most)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def json_numbers(numbers: Numbers) -> list[float | int | None]:
    """Return numbers with seven digits, about as many as float32 has; None where not finite."""
    return [_json_number(number) for number in numbers.tolist()]


def _json_number(number: float) -> float | int | None:
    if not np.isfinite(number):
        return None
    if number == int(number):
        return int(number)
    return float(f"{number:.7g}")


def date(unix_seconds: float) -> str:
    """Return a time in UTC with milliseconds, as an axis of dates takes it."""
    return moment(unix_seconds, "%Y-%m-%d %H:%M:%S.%f")[:-3]
