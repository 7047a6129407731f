"""`LiveRun`: a snapshot of a run for the live view, created by ``watching.Watched``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from holdfast.explain.speed_finding import SpeedFinding
from holdfast.recorder.scalars import Scalar
from holdfast.report.live.run_state import RunState
from holdfast.report.run_follower import News
from holdfast.report.run_snapshot import ProcessSnapshot, RunSnapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun(RunSnapshot):
    """The state of a run at one moment, as the live view shows it.

    The snapshot contains only the newest events and only the processes of the newest attempt,
    trainers first. In the paths in `guards`, symbolic links are resolved.

    Args:
        state: Whether the run is running, waiting to restart, or has ended.
        now: Unix time of the snapshot.
        newest: Unix time of the newest record.
        outlook: The progress of the run and the time left, in words.
        speed: What the training loop spends its time on; see `Verdict.speed`.
        scalars: The newest value of each logged name; the most recently logged comes last.
        news: New records of each source since the previous snapshot.
    """

    state: RunState
    now: float = 0.0
    newest: float | None = None
    outlook: str = ""
    speed: tuple[SpeedFinding, ...] = ()
    scalars: tuple[Scalar, ...] = ()
    news: tuple[News, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the output of `holdfast watch --json`."""
        return {
            "run": str(self.path),
            "state": self.state,
            "attempt": self.attempt,
            "command": self.command,
            "began": self.began,
            "outlook": self.outlook,
            "speed": [asdict(finding) for finding in self.speed],
            "processes": [_process_as_json(process) for process in self.processes],
            "scalars": [scalar._asdict() for scalar in self.scalars],
            "verdict": None if self.verdict is None else self.verdict.as_json(),
        }


def _process_as_json(process: ProcessSnapshot) -> dict[str, Any]:
    values = asdict(process)
    if process.phase is not None:
        values["phase"] = process.phase.name
    return values
