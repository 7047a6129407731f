"""Decide whether a run is running, waiting to restart, or has ended, judged from outside it.

The signs are collected by ``watching``; the decision here is a table of rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

RunState = Literal["running", "waits to restart", "ended"]

# A run has ended when its lock is free, its processes are gone, and nothing was recorded for this
# long: a process that has just started may not have recorded anything yet.
SILENT_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSigns:
    """What can be observed about a run from the outside.

    Args:
        supervisor_event: Kind of the newest event of the supervisor; empty without one.
        lock_is_held: Whether a supervisor holds the lock of the run; None if that is unknown.
        supervisor_is_lost: Whether the supervisor was killed.
        processes_alive: Whether each process is alive; None if unknown.
        closed: Whether the newest event shows that a guard closed the run.
        silent_seconds: Time since the last sign of life, or since watching began.
    """

    supervisor_event: str
    lock_is_held: bool | None
    supervisor_is_lost: bool
    processes_alive: tuple[bool | None, ...]
    closed: bool
    silent_seconds: float

    @property
    def of_life(self) -> bool:
        """Return whether the supervisor or a process is certainly alive."""
        return self.lock_is_held is True or True in self.processes_alive


def decide_state(signs: RunSigns) -> RunState:
    """Return the answer of the first rule in `RULES` that has one, or "running"."""
    for rule in RULES:
        state = rule(signs)
        if state is not None:
            return state
    return "running"


StateRule: TypeAlias = Callable[[RunSigns], RunState | None]


def supervisor_waits_to_restart(signs: RunSigns) -> RunState | None:
    """Between two attempts, no process runs, but the supervisor has announced the next one."""
    if signs.supervisor_event == "restart" and signs.lock_is_held is not False:
        return "waits to restart"
    return None


def supervisor_or_process_is_alive(signs: RunSigns) -> RunState | None:
    """A live supervisor holds its lock, and live processes can be observed directly."""
    return "running" if signs.of_life else None


def processes_are_elsewhere(signs: RunSigns) -> RunState | None:
    """Processes on another machine cannot be observed, so they may be alive."""
    if None in signs.processes_alive and not signs.supervisor_is_lost:
        return "running"
    return None


def end_was_recorded(signs: RunSigns) -> RunState | None:
    """The supervisor or the guard recorded the end of the run, or the supervisor was killed."""
    if signs.supervisor_event == "stopped" or signs.supervisor_is_lost or signs.closed:
        return "ended"
    return None


def silent_for_too_long(signs: RunSigns) -> RunState | None:
    """If all processes of a run were killed, its end was not recorded."""
    was_seen = bool(signs.processes_alive or signs.supervisor_event)
    return "ended" if was_seen and signs.silent_seconds >= SILENT_SECONDS else None


# The first rule that has an answer wins. What can be observed now takes precedence over what was
# recorded, and both over what is inferred from silence.
RULES: tuple[StateRule, ...] = (
    supervisor_waits_to_restart,
    supervisor_or_process_is_alive,
    processes_are_elsewhere,
    end_was_recorded,
    silent_for_too_long,
)
