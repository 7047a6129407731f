"""How reports write durations, sizes and moments: short, with a unit, the same everywhere.

Does not: know anything of runs.
"""

from __future__ import annotations

from datetime import UTC, datetime


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: "8.2 s", "45 s", "3 min 5 s", "5 h 3 min", "2 d 4 h"."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    large, small = ((days, "d"), (hours, "h")) if days else ((hours, "h"), (minutes, "min")) if hours else (
        (minutes, "min"), (rest, "s")
    )  # fmt: skip
    return f"{large[0]} {large[1]}" + (f" {small[0]} {small[1]}" if small[0] else "")


def size(count: float) -> str:
    """Return a number of bytes with three digits and a binary unit."""
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
