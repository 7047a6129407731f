"""Collect the signs that show how an attempt ended: statuses, signals, hangs and kernel kills.

The rules in ``ends`` interpret these signs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.core.events.event import Event
from holdfast.explain import observations
from holdfast.explain.evidence import Ending, Evidence
from holdfast.explain.exit_status import as_signal


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitSigns:
    """The signs that show how one attempt ended."""

    evidence: Evidence
    # How the command ended, or None if unknown.
    command: Ending | None
    # How the training process that failed first ended, or None if no training process failed.
    first_failure: Ending | None
    # The status of the command or of the training process that failed first: an exit code, or the
    # negated signal number. None if neither is known.
    status: int | None
    # The hang that led the supervisor to end the attempt, or None.
    hang: Event | None
    # How many processes the kernel killed for lack of memory; None if unknown.
    kernel_kills: int | None

    @property
    def first_rank(self) -> int | None:
        """Return the rank that failed first, or None if unknown."""
        return self.first_failure.rank if self.first_failure is not None else None

    @property
    def stop_requested_at(self) -> float | None:
        """Return the Unix time at which the user's signal reached the supervisor, or None."""
        if self.evidence.stop_signal is None:
            return None
        for event in self.evidence.events:
            if event.kind == "signal":
                return event.unix_seconds
        return None


def collect_signs(evidence: Evidence) -> ExitSigns:
    """Extract from the evidence the signs that show how an attempt ended."""
    command = _ending_of_command(evidence.endings)
    first_failure = _first_failure(evidence.endings)
    return ExitSigns(
        evidence=evidence,
        command=command,
        first_failure=first_failure,
        status=_decisive_status(command, first_failure),
        hang=_hang_that_ended_it(evidence.events, command),
        kernel_kills=observations.count_kernel_kills(evidence.endings),
    )


def _ending_of_command(endings: Iterable[Ending]) -> Ending | None:
    """Return the newest record of how the whole command ended, or None if unknown."""
    command = None
    for ending in endings:
        # An ending from a launcher's failure table has no PID either, but describes a training
        # process.
        if ending.pid is None and ending.role != "trainer":
            command = ending
    return command


def _first_failure(endings: Iterable[Ending]) -> Ending | None:
    """Return how the first training process to fail ended, or None if none failed."""
    failed = [ending for ending in endings if ending.role == "trainer" and ending.status]
    return min(failed, key=lambda ending: ending.unix_seconds or 0.0, default=None)


def _decisive_status(command: Ending | None, first_failure: Ending | None) -> int | None:
    """Return the status of the command, or of the training process that failed first.

    The training process's status takes precedence if the command's status is unknown or a nonzero
    exit code, because that exit code may only say that the launcher failed.
    """
    status = as_signal(command.status) if command is not None else None
    if first_failure is not None and (status is None or status > 0):
        return as_signal(first_failure.status)
    return status


def _hang_that_ended_it(events: Iterable[Event], command: Ending | None) -> Event | None:
    """Return the hang that led the supervisor to end the attempt, or None."""
    if command is None or command.sent_by != "supervisor":
        return None
    hangs = [
        event for event in events if event.kind == "hang" and event.data.get("remedy") != "wait"
    ]
    return hangs[-1] if hangs else None
