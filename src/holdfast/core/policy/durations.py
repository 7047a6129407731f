"""Read durations as people and batch schedulers write them."""

from __future__ import annotations

import re
from datetime import timedelta

# Numbers with units, the largest unit first: "11h30m", "90m", "45s", "1d2h".
_WITH_UNITS = re.compile(
    r"(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9})s)?"
)
# Slurm's "H:MM:SS" and "D-HH:MM:SS". Its shorter forms are refused, because programs disagree on
# them: "11:30" is 11 minutes and 30 seconds for Slurm, and 11 hours and 30 minutes for others.
_CLOCK = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9}):([0-5][0-9]):([0-5][0-9])")
# The number of seconds in a day, an hour, a minute and a second.
_UNITS = (86400, 3600, 60, 1)


def seconds_of(duration: str | timedelta) -> float:
    """Return a duration in seconds.

    Args:
        duration: A text such as ``"11h30m"``, ``"11:30:00"`` or ``"1-02:00:00"``, or a timedelta.

    Raises:
        ValueError: If the text has another form. A number without a unit has another form, too.

    Example:
        >>> seconds_of("1h30m"), seconds_of("01:30:00")
        (5400.0, 5400.0)
    """
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    match = _WITH_UNITS.fullmatch(duration) or _CLOCK.fullmatch(duration)
    if match is None:
        raise ValueError(f"{duration!r} is not a duration")
    counts = [int(count or 0) for count in match.groups()]
    return float(sum(count * unit for count, unit in zip(counts, _UNITS, strict=True)))


def is_time_limit(value: str | timedelta | None) -> bool:
    """Return whether a value may be the value of ``Policy.max_time``.

    Raises:
        ValueError: If the value is a text that is neither ``"auto"`` nor a duration.
    """
    if value is None or value == "auto":
        return True
    return seconds_of(value) > 0
