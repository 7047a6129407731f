"""The clock of this machine."""

from __future__ import annotations

import time

from holdfast.core.clock import SystemClock


def test_the_two_times_are_of_different_kinds() -> None:
    """Wall-clock time lies between two looks at the system's, and the monotonic one never goes back."""
    clock = SystemClock()
    before, found, after = time.time(), clock.unix_seconds(), time.time()
    assert before <= found <= after
    times = [clock.monotonic_seconds() for _ in range(100)]
    assert times == sorted(times)
