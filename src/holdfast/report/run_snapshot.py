"""Records of what is known about a run at one moment, for `holdfast report`, `watch` and `metrics`.

``page.gathering`` fills in a `RunSnapshot` from everything that was recorded, for the page;
``live.watching`` does so incrementally, for the live view and for metrics. Nothing is read here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast.core.secrets import without_secrets
from holdfast.explain.verdict import Verdict
from holdfast.recorder.progress import ProcessPhase, Standing
from holdfast.recorder.run_files import ProcessInfo
from holdfast.recorder.scalars import Scalar
from holdfast.report.run_follower import News
from holdfast.report.sources import RecordedEvent

if TYPE_CHECKING:
    # This module imports numpy, which takes a tenth of a second.
    from holdfast.report.curves import Curve, StepTimes

RunState = Literal["running", "waits to restart", "ended"]
# Roles of processes in the order in which views list them.
_ROLES = ("trainer", "launcher", "other", "loader worker")


def role_order(role: str) -> int:
    """Return the position of a role among the roles of a view; an unknown one counts as "other"."""
    return _ROLES.index(role if role in _ROLES else "other")


def visible_phase(standing: Standing | None, role: str) -> ProcessPhase | None:
    """Return the phase of a process, or None if its board says nothing useful.

    Launchers and loader workers never leave the initial phase of every process.
    """
    if standing is None:
        return None
    if standing.phase is ProcessPhase.STARTING and role in ("launcher", "loader worker"):
        return None
    return standing.phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The steps of one process, or of one of its optimizers if there are several.

    Args:
        label: Display name, such as "rank 3" or "rank 3, generator".
        last_step: Number of the newest step.
        begun: Unix time at which the first recorded step began; None for one of several
            optimizers, and for a process that only logged numbers.
        ended: Unix time at which the newest step ended.
        curves: Curves by name.
        times: When the steps were made.
        of_guard: Whether a guard recorded the steps; otherwise they were observed through hooks.
        rank: None if the run has no ranks.
        optimizer: Name of the optimizer; empty unless there are several.
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
    """One process. Numbers are None, NaN or 0 where they are unknown.

    The field names are those of `holdfast watch --json`.

    Args:
        label: Display name, unique within the run.
        role: A role of ``recorder.run_files``, or "guard".
        info: The process's self-description.
        alive: None if that cannot be determined on this machine.
        stopped: Whether a signal such as SIGSTOP suspends it.
        phase: What it is doing.
        since_seconds: How long it has been in this phase.
        step: Number of its newest step.
        ended: Unix time of its last record.
        spent: On the page: seconds in each phase, indexed by phase number.
        lane: On the page: its steps.
        optimizers: In the live view: one snapshot per optimizer, if there are several.
        steps_per_second: In the live view: over the newest 50 steps.
        loss: In the live view, like all following fields: the newest loss.
        losses: Losses of the newest 600 steps, oldest first.
        grad_norm: The newest gradient norm.
        learning_rate: The newest learning rate.
        wait_share: Share of the time of the newest 600 steps that was spent waiting for data.
        host_bytes: Resident memory of the process.
        device_bytes: Memory that torch has allocated on the device.
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
class CheckpointSummary:
    """One checkpoint on disk; size and time are None if its manifest cannot be read.

    Args:
        name: Name of its folder.
        global_step: Its step.
        status: "complete", or what is wrong with it.
        size_bytes: Size of its files.
        saved: Unix time at which it was saved.
    """

    name: str
    global_step: int
    status: str
    size_bytes: int | None = None
    saved: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStacks:
    """The stacks of a process as text.

    Args:
        name: Path of the file within the run directory.
        text: The end of the file.
    """

    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PageImage:
    """One image on the page: a complete PNG file, and its size in pixels."""

    tag: str
    global_step: int
    png: bytes
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """Everything known about a run. Some fields are filled in only for one kind of view.

    Args:
        path: The run directory.
        start: What the supervisor or, without one, the guard recorded at the start.
        settings: On the page: see ``recorder.run_files.write_settings``.
        state: Whether the run is still running.
        attempt: Number of the newest attempt; the first is 0.
        now: Unix time of the snapshot.
        newest: Unix time of the newest record.
        processes: On the page, by attempt and rank; in the live view, those of the newest attempt,
            trainers first.
        events: Oldest first. The page has the first and last events of frequent kinds; the live
            view has the newest events.
        left_out_events: On the page: how many more events there are, by kind.
        verdict: Why the run ended.
        outlook: In the live view: how far along the run is, as a sentence.
        scalars: In the live view: the newest value of each logged name, newest last.
        guards: Run directories of guards that the run has opened. The live view resolves links and
            leaves out the directory of the run itself.
        news: In the live view: what each source has recorded since the previous snapshot.
        lanes: On the page: the steps of each process and guard.
        checkpoints: On the page: newest first, damaged ones last.
        images: On the page.
        stacks: On the page.
        output: On the page: the end of the run's output.
        problems: What could not be read, one sentence each.
    """

    path: Path
    start: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    state: RunState = "ended"
    attempt: int = 0
    now: float = 0.0
    newest: float | None = None
    processes: tuple[ProcessSnapshot, ...] = ()
    events: tuple[RecordedEvent, ...] = ()
    left_out_events: Mapping[str, int] = field(default_factory=dict)
    verdict: Verdict | None = None
    outlook: str = ""
    scalars: tuple[Scalar, ...] = ()
    guards: tuple[Path, ...] = ()
    news: tuple[News, ...] = ()
    lanes: tuple[Lane, ...] = ()
    checkpoints: tuple[CheckpointSummary, ...] = ()
    images: tuple[PageImage, ...] = ()
    stacks: tuple[RecordedStacks, ...] = ()
    output: str = ""
    problems: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the output of `holdfast watch --json`."""
        return {
            "run": str(self.path),
            "state": self.state,
            "attempt": self.attempt,
            "command": self.command,
            "began": self.began,
            "outlook": self.outlook,
            "processes": [_process_as_json(process) for process in self.processes],
            "scalars": [scalar._asdict() for scalar in self.scalars],
            "verdict": None if self.verdict is None else self.verdict.as_json(),
        }

    @property
    def command(self) -> str:
        """Return the command line without secrets; empty if unknown."""
        argv = self.start.get("argv")
        if not isinstance(argv, list):
            return ""
        return " ".join(without_secrets([str(word) for word in argv]))

    @property
    def began(self) -> float | None:
        """Return the Unix time at which the supervisor or the guard's newest process started."""
        began = self.start.get("started")
        return float(began) if isinstance(began, (int, float)) else None


def _process_as_json(process: ProcessSnapshot) -> dict[str, Any]:
    values = asdict(process)
    if process.phase is not None:
        values["phase"] = process.phase.name
    return values
