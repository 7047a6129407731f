"""The supervisor's record of one attempt: why it was started, when it ran and how it ended."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import PolicyError
from holdfast.core.events.event import Event
from holdfast.explain.runs.recordings import Recordings


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorRecord:
    """The supervisor's record of one attempt.

    Attributes:
        number: The number of the attempt, counted from 0.
        events: The events from the start of this attempt to the start of the next attempt.
        restarts: The restarts that preceded this attempt or started it, including restarts for
            which no attempt number was recorded.
        began: The Unix time at which the attempt began; 0 if unknown.
        until: The Unix time at which the next attempt began; infinity if there is no later attempt.
    """

    number: int
    events: tuple[Event, ...]
    restarts: tuple[Event, ...]
    began: float
    until: float

    @property
    def end(self) -> Event | None:
        """Return the event that recorded the end of the attempt, or None if there is none."""
        for event in self.events:
            if event.kind == "attempt_ended":
                return event
        return None

    @property
    def status(self) -> int | None:
        """Return the exit status of the command, or None if unknown."""
        return read_integer(self.end, "status")

    @property
    def stop_signal(self) -> int | None:
        """Return the number of the signal with which the user requested a stop, or None."""
        return read_integer(self.end, "asked_by")

    @property
    def sender(self) -> str | None:
        """Return who sent the signal that ended the command: "user", "supervisor", or None.

        None means that the sender is unknown or that no signal was sent.
        """
        end = self.end
        if end is None:
            return None
        if end.data.get("asked_by") is not None:
            return "user"
        if end.data.get("signal_sent_by_us") is not None:
            return "supervisor"
        return None

    def covers(self, unix_seconds: float) -> bool:
        """Return whether a Unix time is between the starts of this attempt and the next one."""
        return self.began <= unix_seconds < self.until

    def reasons_for_restarts(self) -> list[str]:
        """Return one clause per restart that gives its reason and the changes made for it."""
        clauses = []
        for restart in self.restarts:
            why = restart.data.get("why") or restart.data.get("cause") or "no reason recorded"
            clause = f"restarted: {why}"
            changes = _read_changes(restart)
            if changes:
                settings = ", ".join(f"{name}={value}" for name, value in changes.items())
                clause += f"; changed {settings}"
            clauses.append(clause)
        return clauses

    def applied_changes(self) -> dict[str, Any]:
        """Return the environment variables that the supervisor's restarts set for this attempt."""
        applied: dict[str, Any] = {}
        for restart in self.restarts:
            if read_integer(restart, "attempt") is not None:
                applied.update(_read_changes(restart))
        return applied


def read_supervisor_record(recordings: Recordings, requested: int | None) -> SupervisorRecord:
    """Return the supervisor's record of an attempt.

    Args:
        recordings: The recordings in the run directory.
        requested: The number of the attempt, counted from 0, or None for the newest attempt.

    Raises:
        PolicyError: H105 if the run has no attempt with this number.
    """
    events = recordings.supervisor_events()
    number = _choose_number(recordings, events, requested)
    own_events = _select_events_of_attempt(events, number)
    starts = [event for event in own_events if event.kind == "attempt_started"]
    starts_of_later = [
        event.unix_seconds
        for event in events
        if event.kind == "attempt_started" and (read_integer(event, "attempt") or 0) > number
    ]
    return SupervisorRecord(
        number=number,
        events=tuple(own_events),
        restarts=tuple(_select_restarts_up_to(events, number)),
        began=starts[0].unix_seconds if starts else 0.0,
        until=min(starts_of_later, default=math.inf),
    )


def read_integer(event: Event | None, key: str) -> int | None:
    """Return the integer in a field of an event, or None if there is no event or no integer."""
    value = None if event is None else event.data.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return None


def _choose_number(recordings: Recordings, events: Sequence[Event], requested: int | None) -> int:
    """Return the number of the requested attempt, or of the newest one if None was requested.

    Raises:
        PolicyError: H105 if the run has no attempt with this number.
    """
    numbers = []
    for event in events:
        # A "restart" event announces the next attempt. It counts only if the supervisor was killed,
        # because the announced attempt may then have no event of its own.
        is_announcement = event.kind == "restart" and recordings.supervisor_loss() is None
        number = read_integer(event, "attempt")
        if number is not None and not is_announcement:
            numbers.append(number)
    if requested is None:
        return max(numbers, default=0)
    if requested not in (numbers or [0]):
        oldest = min(numbers, default=0)
        newest = max(numbers, default=0)
        raise PolicyError(
            f"attempt {requested} of {recordings.run}",
            limit=f"attempts {oldest} to {newest} are recorded",
            fix="pass one of these numbers, or omit --attempt to explain the newest attempt.",
            rule="H105",
        )
    return requested


def _select_events_of_attempt(events: Sequence[Event], number: int) -> list[Event]:
    """Return the events from the start of an attempt to the start of the next attempt."""
    current = -1
    if not any(event.kind == "attempt_started" for event in events):
        # The recording is damaged. Assume that all events are about this attempt.
        current = number
    own_events = []
    for event in events:
        if event.kind == "attempt_started":
            started = read_integer(event, "attempt")
            current = current + 1 if started is None else started
        if current == number:
            own_events.append(event)
    return own_events


def _select_restarts_up_to(events: Sequence[Event], number: int) -> Iterator[Event]:
    """Yield the restarts that preceded or started an attempt, or that have no attempt number."""
    for event in events:
        attempt = read_integer(event, "attempt")
        if event.kind == "restart" and (attempt is None or attempt <= number):
            yield event


def _read_changes(restart: Event) -> dict[str, Any]:
    """Return the environment variables that a restart set."""
    changes = restart.data.get("changes")
    return changes if isinstance(changes, dict) else {}
