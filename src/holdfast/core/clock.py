"""The clock, which is passed in, so that tests never sleep."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What holdfast needs to know about time."""

    def unix_seconds(self) -> float:
        """Return the wall-clock time in seconds since 1970, for people to read."""

    def monotonic_seconds(self) -> float:
        """Return a time in seconds that never goes back, for durations."""


class SystemClock:
    """The clock of this machine."""

    unix_seconds = staticmethod(time.time)
    monotonic_seconds = staticmethod(time.perf_counter)
