"""Decide from outside whether a run is running, is waiting to restart, or has ended.

``watching`` collects what can be observed, and a table of rules makes the decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

RunState = Literal["running", "waits to restart", "ended"]

# If a run's lock is free and its processes no longer exist, the run counts as ended only if no
# record has been written for this long, because a process that has just started may not have
# recorded anything yet.
SILENT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSigns:
    """What can be observed from outside about the activity of a run.

    Args:
        supervisor_event: Kind of the supervisor's newest event; empty if there is none.
        lock_is_held: Whether a supervisor holds the lock of the run; None if unknown.
        supervisor_is_lost: Whether the supervisor was killed.
        processes_alive: Whether each process is alive; None for a process on another machine.
        closed: Whether the newest event is that a guard has closed the run.
        silent_seconds: Time since the last sign of life or, if there was none, since watching
            began.
    """

    supervisor_event: str
    lock_is_held: bool | None
    supervisor_is_lost: bool
    processes_alive: tuple[bool | None, ...]
    closed: bool
    silent_seconds: float

    @property
    def of_life(self) -> bool:
        """Return whether the supervisor or a process is known to be alive."""
        return self.lock_is_held is True or True in self.processes_alive


def decide_state(signs: RunSigns) -> RunState:
    """Return the state that the first applicable rule in `RULES` returns; by default "running"."""
    for rule in RULES:
        state = rule(signs)
        if state is not None:
            return state
    return "running"


StateRule: TypeAlias = Callable[[RunSigns], RunState | None]


def supervisor_waits_to_restart(signs: RunSigns) -> RunState | None:
    """Return "waits to restart" if a supervisor that may be alive has announced a restart."""
    if signs.supervisor_event == "restart" and signs.lock_is_held is not False:
        return "waits to restart"
    return None


def supervisor_or_process_is_alive(signs: RunSigns) -> RunState | None:
    """Return "running" if the supervisor or a process is known to be alive."""
    return "running" if signs.of_life else None


def processes_are_elsewhere(signs: RunSigns) -> RunState | None:
    """Return "running" if a process is on another machine, so that it cannot be checked."""
    if None in signs.processes_alive and not signs.supervisor_is_lost:
        return "running"
    return None


def end_was_recorded(signs: RunSigns) -> RunState | None:
    """Return "ended" if the end of the run was recorded or the supervisor was killed."""
    if signs.supervisor_event == "stopped" or signs.supervisor_is_lost or signs.closed:
        return "ended"
    return None


def silent_for_too_long(signs: RunSigns) -> RunState | None:
    """Return "ended" after a long silence, assuming that all processes were killed."""
    was_seen = bool(signs.processes_alive or signs.supervisor_event)
    return "ended" if was_seen and signs.silent_seconds >= SILENT_SECONDS else None


# The first rule that returns a state wins. Direct observations take precedence over recorded
# events, and both take precedence over silence.
RULES: tuple[StateRule, ...] = (
    supervisor_waits_to_restart,
    supervisor_or_process_is_alive,
    processes_are_elsewhere,
    end_was_recorded,
    silent_for_too_long,
)
