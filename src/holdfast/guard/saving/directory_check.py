"""`DirectoryCheck`: whether the run still holds the lock of its run directory."""

from __future__ import annotations

import contextlib

from holdfast.core.clock import Clock
from holdfast.core.events import run_events
from holdfast.guard.directory import RunDirectory
from holdfast.guard.record import RunRecord

# The shortest time between two checks at step boundaries, in seconds. A check takes a few
# microseconds, or perhaps a millisecond on a network disk. Each save checks the lock too.
_HOLD_SECONDS = 5.0


class DirectoryCheck:
    """Checks that no other run writes into this run's directory.

    Args:
        directory: The run directory.
        record: The record that receives events.
        clock: The source of time.
    """

    def __init__(self, directory: RunDirectory, record: RunRecord, clock: Clock) -> None:
        self._directory = directory
        self._record = record
        # When the lock was last checked at a step boundary.
        self._checked_at = clock.monotonic_seconds()

    def check(self) -> None:
        """Check that this run holds the lock, and take it again if the directory was removed.

        Raises:
            RunDirectoryError: H301 if another run has taken the directory.
            OSError: If the disk does not respond.
        """
        if self._directory.hold():
            what = (
                f"{self._directory.path} was removed or moved during the run, and has been created"
                " again"
            )
            self._record.emit(run_events.RecordingMovedAside(what=what))

    def at_boundary(self, now: float) -> None:
        """Check the lock if the last check was some seconds ago.

        Args:
            now: The current time in seconds.

        Raises:
            RunDirectoryError: H301 if another run has taken the directory.
        """
        if now - self._checked_at > _HOLD_SECONDS:
            self._checked_at = now
            # If this fails, the next save will fail with the same error and report it.
            with contextlib.suppress(OSError):
                self.check()
