"""Dataclasses that describe a run at one moment. This module reads no recordings itself.

``page.gathered_run`` and ``live.live_run`` extend `RunSnapshot` for their views.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.secrets import without_secrets
from holdfast.explain.verdict import Verdict
from holdfast.recorder.progress import ProcessPhase, Standing
from holdfast.recorder.run_files import ProcessInfo
from holdfast.report.sources import RecordedEvent

if TYPE_CHECKING:
    # `curves` imports numpy, which takes 0.1 s, so it is imported only for type checking.
    from holdfast.report.curves import Curve, StepTimes

# Roles of processes, in the order in which views list them.
_ROLES = ("trainer", "launcher", "other", "loader worker")


def role_order(role: str) -> int:
    """Return the sort key of a role in lists of processes. An unknown role counts as "other"."""
    return _ROLES.index(role if role in _ROLES else "other")


def visible_phase(standing: Standing | None, role: str) -> ProcessPhase | None:
    """Return the phase of a process, or None if its phase is unknown or meaningless.

    Launchers and loader workers never leave the initial phase, so it is meaningless for them.
    """
    if standing is None:
        return None
    if standing.phase is ProcessPhase.STARTING and role in ("launcher", "loader worker"):
        return None
    return standing.phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The steps and curves of one process, or of one of its optimizers if there are several.

    Args:
        label: Display name, such as "rank 3" or "rank 3, generator".
        last_step: Number of the newest step.
        begun: Unix time at which the first recorded step started. None for the lane of an
            optimizer, and for a process that only logged numbers.
        ended: Unix time at which the newest step ended.
        curves: Curves, keyed by name.
        times: Times of the steps.
        of_guard: Whether a guard recorded the steps. Otherwise they were observed through hooks.
        rank: None if the run has no ranks.
        optimizer: Name of the optimizer if there are several, otherwise empty.
    """

    label: str
    last_step: int = 0
    begun: float | None = None
    ended: float | None = None
    curves: Mapping[str, Curve]
    times: StepTimes
    of_guard: bool = False
    rank: int | None = None
    optimizer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """The state of one process. Unknown numbers are None, NaN or 0.

    The field names are those of `holdfast watch --json`.

    Args:
        label: Display name, unique within the run.
        role: A role from ``recorder.run_files``, or "guard".
        info: The description that the process recorded of itself.
        alive: Whether the process is alive; None if that cannot be determined from this machine.
        stopped: Whether the process is suspended by a signal such as SIGSTOP.
        phase: Current phase of the process.
        since_seconds: How long the process has been in this phase, in seconds.
        step: Number of the newest step.
        ended: Unix time of the last record.
        spent: Seconds spent in each phase, indexed by phase number (only on the page).
        lane: Steps and curves of the process (only on the page).
        optimizers: One snapshot per optimizer, if there are several (only in the live view, like
            all following fields).
        steps_per_second: Mean rate over the newest 50 steps.
        loss: The newest loss.
        losses: Losses of the newest 600 steps, oldest first.
        grad_norm: The newest gradient norm.
        learning_rate: The newest learning rate.
        wait_share: Share of time spent waiting for data, over the newest 600 steps.
        host_bytes: Resident memory of the process.
        device_bytes: Device memory that torch has allocated for tensors.
    """

    label: str
    role: str
    info: ProcessInfo | None = None
    alive: bool | None = None
    stopped: bool = False
    phase: ProcessPhase | None = None
    since_seconds: float | None = None
    step: int = 0
    ended: float | None = None
    spent: tuple[float, ...] = ()
    lane: Lane | None = None
    optimizers: tuple[ProcessSnapshot, ...] = ()
    steps_per_second: float = math.nan
    loss: float | None = None
    losses: tuple[float, ...] = ()
    grad_norm: float | None = None
    learning_rate: float | None = None
    wait_share: float = math.nan
    host_bytes: int = 0
    device_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """The part of a run's state at one moment that all views use.

    Args:
        path: The run directory.
        start: The start record of the supervisor or, without a supervisor, of the guard.
        attempt: Number of the newest attempt, counted from 0.
        processes: The observed processes.
        events: Events of all sources, oldest first.
        verdict: Why the run ended.
        guards: Run directories of the guards that processes of the run have opened.
        problems: One sentence for each part of the run that could not be read.
    """

    path: Path
    start: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 0
    processes: tuple[ProcessSnapshot, ...] = ()
    events: tuple[RecordedEvent, ...] = ()
    verdict: Verdict | None = None
    guards: tuple[Path, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """Return the run's command line, with secrets removed; empty if unknown."""
        argv = self.start.get("argv")
        if not isinstance(argv, list):
            return ""
        return " ".join(without_secrets([str(word) for word in argv]))

    @property
    def began(self) -> float | None:
        """Return the Unix time at which the supervisor (or the guard's newest process) started."""
        began = self.start.get("started")
        return float(began) if isinstance(began, (int, float)) else None
