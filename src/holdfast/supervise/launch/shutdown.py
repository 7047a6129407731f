"""Decide when the command of an attempt has to end, and when it is killed.

What happens on SIGTERM or Ctrl-C (SIGINT), in order:

1. ``signals`` forwards it to the command, inside the signal handler.
2. `Shutdown.note_signal` starts the grace period, `grace_seconds`. A second Ctrl-C, or any third
   request, ends it at once.
3. Once the command has ended, ``attempt`` asks the processes that it left behind to end, with a
   short grace period of their own.
4. At `kill_at`, ``attempt`` sends SIGKILL to whatever still runs.
5. ``restarts`` refuses another attempt, because the end was requested.

A hang and a failure on another host take the same path, except that the supervisor sends the
SIGTERM itself and that another attempt may follow.

Does not: send signals, or read a clock (``attempt`` passes the time).
"""

from __future__ import annotations

import math
import signal

from holdfast.supervise.launch.signals import ASKING_TO_END, FORWARDED

# The third request to end kills the command at once. So does a second Ctrl-C.
_REQUESTS_TO_KILL = 3
# A shell and a wrapper around us may both forward one Ctrl-C. Another SIGINT within this time after
# the first does not count as a second Ctrl-C.
SAME_INTERRUPT_SECONDS = 0.5
# A shell reports signal n as exit code 128 + n.
_SHELL_SIGNAL_BASE = 128


class Shutdown:
    """Who asked the command to end, and when it is asked and killed.

    All times are on the clock of `time.monotonic`.

    Args:
        grace_seconds: Time between asking the command to end and killing it.
    """

    def __init__(self, grace_seconds: float) -> None:
        self.grace_seconds = grace_seconds
        # The last signal that the supervisor sent on its own initiative, or None.
        self.signal_sent: int | None = None
        # When the supervisor will ask the command to end on its own initiative, or None.
        self.terminate_at = math.inf
        # When everything that still runs will be killed.
        self.kill_at = math.inf
        # Signals that asked us to end, in order.
        self._requests: list[int] = []
        self._forwarded: list[int] = []
        self._first_interrupt_at: float | None = None

    @property
    def is_requested(self) -> bool:
        """Return whether a user or a scheduler has asked us to end."""
        return bool(self._requests)

    @property
    def request_count(self) -> int:
        """Return how many times a user or a scheduler has asked us to end."""
        return len(self._requests)

    def note_signal(self, number: int, arrived_at: float) -> None:
        """Note a forwarded signal; if it asks to end, limit the command's remaining time."""
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
        """Return whether Ctrl-C was pressed twice, as opposed to one press forwarded twice."""
        if self._first_interrupt_at is None:
            self._first_interrupt_at = arrived_at
            return False
        return arrived_at - self._first_interrupt_at >= SAME_INTERRUPT_SECONDS

    def note_terminated(self, now: float) -> None:
        """Note that the supervisor has asked the command to end on its own initiative."""
        self.signal_sent = signal.SIGTERM
        self.terminate_at = math.inf
        self.kill_within(self.grace_seconds, now)

    def note_killed(self) -> None:
        """Note that the supervisor has killed everything that still ran."""
        self.signal_sent = signal.SIGKILL
        self.kill_at = math.inf

    def kill_within(self, seconds: float, now: float) -> None:
        """Move the time of the kill earlier, never later."""
        self.kill_at = min(self.kill_at, now + seconds)

    def requested_by(self, status: int) -> int | None:
        """Return the signal by which somebody requested the end of the command, or None.

        SIGINT and SIGTERM always request the end. After SIGHUP the terminal is gone, so nobody
        would see another attempt. Other signals may mean anything: they count as a request if the
        command died of one.

        Args:
            status: Exit code of the command; the negative number of a signal that killed it.
        """
        if self._requests:
            return self._requests[0]
        if signal.SIGHUP in self._forwarded:
            return signal.SIGHUP
        number = signal_in_status(status)
        return number if number in self._forwarded else None


def signal_in_status(status: int) -> int:
    """Return the signal that a command died of, even if a shell reported it as an exit code.

    Without such a signal, the number is that of none.
    """
    return -status if status < 0 else status - _SHELL_SIGNAL_BASE
