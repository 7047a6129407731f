"""The clock interface. Code receives a clock as an argument, so that tests never sleep."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """The two kinds of time that holdfast needs."""

    def unix_seconds(self) -> float:
        """Return the wall-clock time in seconds since 1970, for people to read."""

    def monotonic_seconds(self) -> float:
        """Return a time in seconds that never goes backwards, for durations."""


class SystemClock:
    """The clock of this machine."""

    unix_seconds = staticmethod(time.time)
    monotonic_seconds = staticmethod(time.perf_counter)
