"""The clock interface. Code takes a clock as an argument, so that tests can pass a fake clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of wall-clock time and monotonic time."""

    def unix_seconds(self) -> float:
        """Return the wall-clock time in seconds since 1970, for timestamps that people read."""

    def monotonic_seconds(self) -> float:
        """Return a time in seconds that never goes backwards, for measuring durations."""


class SystemClock:
    """The operating system's clock."""

    unix_seconds = staticmethod(time.time)
    monotonic_seconds = staticmethod(time.perf_counter)
