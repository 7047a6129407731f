"""Decide when the command of an attempt is asked to end, and when it is killed.

What happens on SIGTERM or Ctrl-C (SIGINT), in order:

1. ``signals`` forwards the signal to the command from within the signal handler.
2. `Shutdown.note_signal` starts a grace period of `grace_seconds`. A second Ctrl-C, or any third
   signal that requests the end, cuts it short.
3. After the command has ended, ``attempt`` asks the command's remaining processes to end. They have
   a short grace period of their own.
4. At `kill_at`, ``attempt`` sends SIGKILL to all processes that are still running.
5. ``restarts`` does not start another attempt, because the end was requested.

After a hang or a failure on another host, the steps are the same, but the supervisor sends the
SIGTERM itself and another attempt may follow.

This module sends no signals and reads no clock. ``attempt`` sends the signals and passes the time
to this module.
"""

from __future__ import annotations

import math
import signal

from holdfast.supervise.launch.signals import ASKING_TO_END, FORWARDED

# The third request to end the command kills it immediately. So does a second Ctrl-C.
_REQUESTS_TO_KILL = 3
# A SIGINT this soon after the first one does not count as a second Ctrl-C, because a shell and a
# wrapper script may both forward the same Ctrl-C.
SAME_INTERRUPT_SECONDS = 0.5
# A shell reports signal n as exit code 128 + n.
_SHELL_SIGNAL_BASE = 128


class Shutdown:
    """Tracks requests to end the command, and the times at which to terminate and kill it.

    All times are on the clock of `time.monotonic`.

    Args:
        grace_seconds: Time between asking the command to end and killing it.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        # The last signal that the supervisor sent on its own initiative, or None.
        self.signal_sent: int | None = None
        # When the supervisor, on its own initiative, will ask the command to end; `math.inf` means
        # never.
        self.terminate_at = math.inf
        # When all processes that are still running will be killed; `math.inf` means never.
        self.kill_at = math.inf
        # Signals that requested the end of the command, in order of arrival.
        self._requests: list[int] = []
        self._forwarded: list[int] = []
        self._first_interrupt_at: float | None = None

    @property
    def is_requested(self) -> bool:
        """Return whether a user or a scheduler has requested the end."""
        return bool(self._requests)

    @property
    def request_count(self) -> int:
        """Return how many times a user or a scheduler has requested the end."""
        return len(self._requests)

    def note_signal(self, number: int, arrived_at: float) -> None:
        """Record a forwarded signal. If it requests the end, start or shorten the grace period."""
        if number in FORWARDED:
            self._forwarded.append(number)
        if number not in ASKING_TO_END:
            return
        self._requests.append(number)
        is_urgent = self.request_count >= _REQUESTS_TO_KILL
        if number == signal.SIGINT:
            is_urgent = is_urgent or self._is_second_interrupt(arrived_at)
        self.kill_within(0.0 if is_urgent else self.grace_seconds, arrived_at)

    def _is_second_interrupt(self, arrived_at: float) -> bool:
        """Return whether Ctrl-C was pressed a second time, rather than forwarded twice."""
        if self._first_interrupt_at is None:
            self._first_interrupt_at = arrived_at
            return False
        return arrived_at - self._first_interrupt_at >= SAME_INTERRUPT_SECONDS

    def note_terminated(self, now: float) -> None:
        """Record that the supervisor itself has sent SIGTERM, and start the grace period."""
        self.signal_sent = signal.SIGTERM
        self.terminate_at = math.inf
        self.kill_within(self.grace_seconds, now)

    def note_killed(self) -> None:
        """Record that the supervisor has killed all remaining processes."""
        self.signal_sent = signal.SIGKILL
        self.kill_at = math.inf

    def kill_within(self, seconds: float, now: float) -> None:
        """Set the time at which the command is killed; an earlier deadline remains in force."""
        self.kill_at = min(self.kill_at, now + seconds)

    def requested_by(self, status: int) -> int | None:
        """Return the signal by which a user or a scheduler requested the end, or None.

        SIGINT and SIGTERM always request the end. So does SIGHUP: the terminal is gone, so nobody
        would see another attempt. Any other signal counts as a request only if it killed the
        command.

        Args:
            status: Exit code of the command, or the negated number of the signal that killed it.
        """
        if self._requests:
            return self._requests[0]
        if signal.SIGHUP in self._forwarded:
            return signal.SIGHUP
        number = signal_in_status(status)
        return number if number in self._forwarded else None


def signal_in_status(status: int) -> int:
    """Return the number of the signal that killed a command.

    A shell may report the signal as an exit code. If no signal killed the command, the result is
    not a valid signal number.
    """
    return -status if status < 0 else status - _SHELL_SIGNAL_BASE
