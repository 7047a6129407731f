"""A run at one moment, as `holdfast report`, `watch` and `metrics` show it.

`gathering.gather` makes it of everything that was recorded, `watching.Watched` of what is new.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast.core.secrets import without_secrets
from holdfast.explain.verdict import Verdict
from holdfast.recorder.progress import Phase, Standing
from holdfast.recorder.run_files import ProcessInfo
from holdfast.recorder.scalars import Scalar
from holdfast.report.run_follower import News
from holdfast.report.sources import EventSeen

if TYPE_CHECKING:  # numpy takes a tenth of a second
    from holdfast.report.images import PageImage
    from holdfast.report.series import Moments, Numbers, Series

State = Literal["running", "waits to restart", "ended"]


def phase_seen(standing: Standing | None, role: str) -> Phase | None:
    """Return what a process does.

    A launcher and a worker of a loader show nothing but that they have started.
    """
    if standing is None or (
        standing.phase is Phase.STARTING and role in ("launcher", "loader worker")
    ):
        return None
    return standing.phase


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """What one process trained: to which step, when (Unix times), and its curves by name.

    `begun` is the end of the first step that is recorded, less its duration; None of one of several
    optimizers, and of who only logged numbers.
    `moments`: times, and the steps made until then; `made`: how many these are, and their seconds,
        of an observed
    process their number. `rank` and `optimizer` are None and empty where there is one.
    """

    label: str
    last_step: int = 0
    begun: float | None = None
    ended: float | None = None
    columns: Mapping[str, Series]
    moments: Moments
    made: tuple[Numbers, ...] = ()
    of_guard: bool = False
    rank: int | None = None
    optimizer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSnapshot:
    """One process; numbers are None, NaN or 0 where they are unknown.

    `alive` is None if that cannot be seen from here. Of `watch` only: `losses` and `wait_share` are
        those of the
    newest 600 steps, `steps_per_second` that of the newest 50, and `optimizers` the same for each
    of several. Of the
    page only: `spent`, seconds in each phase by its number.
    """

    label: str
    role: str
    info: ProcessInfo | None = None
    alive: bool | None = None
    stopped: bool = False
    phase: Phase | None = None
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
class CheckpointSeen:
    """One checkpoint; sizes and times are None if its manifest cannot be read."""

    name: str
    global_step: int
    status: str
    size_bytes: int | None = None
    saved: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """What is known of a run; without `supervised.json` it is one of a plain guard.

    `start`, of the page only, is what that says, or what the guard says. `settings`, of the page
        only: see
    `write_settings`. `processes`: the page's by their start, `watch`'s of the newest attempt with
        trainers first.
    `events`, oldest first: of a frequent kind the page has the first and the last
        (`left_out_events` counts the
    others), `watch` the newest. `outlook`, of `watch` only: how far it is. `scalars`: `watch`'s
    newest of each name
    logged lately, newest last. `guards`: directories of guards that its processes opened, of
        `watch` with links
    resolved and without its own. `news`: what each source has recorded since the look before.
        `stacks`: name and
    text. `problems`: what could not be read, one sentence each. `now` and `newest` (what was
        recorded last) are Unix
    times.
    """

    path: Path
    supervised: Mapping[str, Any] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    state: State = "ended"
    attempt: int = 0
    now: float = 0.0
    newest: float | None = None
    processes: tuple[ProcessSnapshot, ...] = ()
    events: tuple[EventSeen, ...] = ()
    left_out_events: Mapping[str, int] = field(default_factory=dict)
    verdict: Verdict | None = None
    outlook: str = ""
    scalars: tuple[Scalar, ...] = ()
    guards: tuple[Path, ...] = ()
    news: tuple[News, ...] = ()
    lanes: tuple[Lane, ...] = ()
    checkpoints: tuple[CheckpointSeen, ...] = ()
    images: tuple[PageImage, ...] = ()
    stacks: tuple[tuple[str, str], ...] = ()
    output: str = ""
    problems: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return what `watch` shows, for machines."""
        facts = {
            name: getattr(self, name)
            for name in ("state", "attempt", "command", "began", "outlook")
        }
        facts["processes"] = [
            {**asdict(each), "phase": each.phase and each.phase.name} for each in self.processes
        ]
        facts["scalars"] = [each._asdict() for each in self.scalars]
        return {"run": str(self.path), **facts, "verdict": self.verdict and self.verdict.as_json()}

    @property
    def command(self) -> str:
        """Return what was started, or an empty text."""
        argv = (self.start or self.supervised).get("argv")
        return " ".join(without_secrets(list(map(str, argv)))) if isinstance(argv, list) else ""

    @property
    def began(self) -> float | None:
        """Return the Unix time at which the supervisor began, or the newest process of a guard
        alone; or None.
        """
        began = (self.start or self.supervised).get("started")
        return float(began) if isinstance(began, (int, float)) else None
