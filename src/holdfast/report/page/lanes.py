"""Convert recorded steps and scalars to lanes: the steps and curves of a process or guard.

The recordings are read one process at a time, so that a run of many processes fits into memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from holdfast.recorder.history import NAMES, Rows, read_history
from holdfast.recorder.reader import describe_lost_steps
from holdfast.recorder.ring import read_ring
from holdfast.recorder.run_files import read_optimizers
from holdfast.recorder.scalars import SCALARS_FILE, Scalar, scalars_of
from holdfast.report.curves import (
    CURVES_OF_AN_OPTIMIZER,
    LOGGED,
    MAX_POINTS,
    Curve,
    StepTimes,
    curves_of_scalars,
    curves_of_steps,
    rows_of_ring,
    thinned,
)
from holdfast.report.problems import Problems
from holdfast.report.run_snapshot import Lane
from holdfast.report.sources import RecordedEvent, RunSource

# Maximum number of lanes on a page. 48 curves of 2,000 points in each of seven panels are about 10
# MB of JSON.
MAX_LANES = 48
_MAX_TOTAL_POINTS = MAX_LANES * MAX_POINTS // 2
_MIN_POINTS = 200
# A step duration above this limit, about a third of a year, can only be corrupt data.
_LONGEST_STEP_SECONDS = 1e7
_SECONDS = NAMES.index("seconds")


class LaneReader:
    """Reads the lanes of sources.

    Args:
        problems: Collects sentences about records that cannot be read or were overwritten.
        validated: Validation results, keyed by source label. They are drawn like values that the
            script logged.
    """

    def __init__(self, problems: Problems, validated: Mapping[str, Sequence[Scalar]]) -> None:
        self._problems = problems
        self._validated = validated

    def lanes_of(self, source: RunSource, most_points: int = MAX_POINTS) -> list[Lane]:
        """Return the lane of a source and, if it has several optimizers, one lane for each of them.

        Args:
            source: A process or a guard.
            most_points: Maximum number of points per curve.

        Returns:
            The lanes. The first one covers the whole source. Empty if nothing was recorded.
        """
        path = source.steps_path
        ring = self._problems.read(rows_of_ring, path)
        if ring is None or not len(ring):
            return self._lanes_without_steps(source, most_points)
        self._note_lost_steps(source)
        history = read_history(path).rows
        steps = _RecordedSteps(history=history[history["time"] < ring["time"][0]], ring=ring)
        times = steps.times(is_guard=source.kind == "guard")
        curves, curves_by_optimizer = _curves_by_optimizer(
            thinned(steps.history, ring, most_points), read_optimizers(source.directory)
        )
        lane = Lane(
            label=source.label,
            last_step=int(ring["step"][-1]),
            begun=steps.begun,
            ended=int(ring["time"][-1]) / 1e9,
            curves={**curves, **self._logged_curves(source, times, most_points)},
            times=times,
            rank=source.rank,
            of_guard=source.kind == "guard",
        )
        lanes_of_optimizers = [
            replace(
                lane,
                label=f"{source.label}, {optimizer}",
                optimizer=optimizer,
                begun=None,
                curves=own_curves,
            )
            for optimizer, own_curves in curves_by_optimizer.items()
        ]
        return [lane, *lanes_of_optimizers]

    def _lanes_without_steps(self, source: RunSource, most_points: int) -> list[Lane]:
        """Return the lane of a source that logged or validated values but recorded no steps."""
        curves = self._logged_curves(source, StepTimes.none(), most_points)
        if not curves:
            return []
        return [Lane(label=source.label, curves=curves, times=StepTimes.none(), rank=source.rank)]

    def _note_lost_steps(self, source: RunSource) -> None:
        sentence = self._problems.read(describe_lost_steps, source.directory)
        if sentence:
            self._problems.add(f"{source.label}: {sentence}")

    def _logged_curves(
        self, source: RunSource, times: StepTimes, most_points: int
    ) -> dict[str, Curve]:
        """Return the curves of logged values and validation results."""
        records = self._problems.read(read_ring, source.directory / SCALARS_FILE) or []
        logged = scalars_of(records)
        if logged and records[0].sequence > 1:
            lost = records[0].sequence - 1
            self._problems.add(
                f"{source.label}: the values logged before step {logged[0].step:,} are lost,"
                f" since {lost:,} older records were overwritten"
            )
        scalars = [*logged, *self._validated.get(source.label, ())]
        curves = curves_of_scalars(scalars, times, most_points)
        names = {scalar.name for scalar in scalars}
        if len(names) > len(curves):
            self._problems.add(
                f"{source.label}: only the first {len(curves)} of {len(names)} logged names are"
                " drawn"
            )
        return curves


def points_per_lane(processes: int) -> int:
    """Return the maximum number of points per curve if this many processes have curves."""
    share = _MAX_TOTAL_POINTS // max(processes, 1)
    return max(_MIN_POINTS, min(MAX_POINTS, share))


def without_observed_curves(lanes: Sequence[Lane], observed: Sequence[Lane]) -> list[Lane]:
    """Return guard lanes without the curves that observed processes have recorded too.

    Curves of values that the script logged are kept, because no value is logged twice.

    Args:
        lanes: The lanes of guards.
        observed: The lanes of observed processes.
    """
    names = {name for lane in observed for name in lane.curves if not name.startswith(LOGGED)}
    reduced = []
    for lane in lanes:
        curves = {name: curve for name, curve in lane.curves.items() if name not in names}
        if curves:
            reduced.append(replace(lane, curves=curves))
    return reduced


def validations(events: Sequence[RecordedEvent]) -> dict[str, list[Scalar]]:
    """Return the validation results in events as logged scalars, keyed by source label."""
    by_source: dict[str, list[Scalar]] = {}
    for recorded in events:
        event = recorded.event
        value = event.data.get("loss")
        if event.kind == "validated" and isinstance(value, float):
            scalar = Scalar(
                name=f"validation {event.data.get('name')}",
                value=value,
                step=event.global_step,
                epoch=None,
                unix_seconds=event.unix_seconds,
            )
            by_source.setdefault(recorded.source, []).append(scalar)
    return by_source


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordedSteps:
    """All recorded steps of a source, in the row format of ``recorder.history``.

    Args:
        history: Rows about older steps, which were overwritten in the ring. Each row covers many
            steps.
        ring: Rows about the newest steps, one per step. There is at least one row.
    """

    history: Rows
    ring: Rows

    @property
    def begun(self) -> float:
        """Return the Unix time at which the first recorded step started."""
        first = self.history[0] if len(self.history) else self.ring[0]
        ended = int(first["time"]) / 1e9
        seconds = float(first["mean"][_SECONDS])
        return ended - seconds if 0 <= seconds < _LONGEST_STEP_SECONDS else ended

    def times(self, *, is_guard: bool) -> StepTimes:
        """Return the times of the steps. `StepTimes` explains how a guard's times differ."""
        rows = np.concatenate([self.history, self.ring])
        counts = rows["finite"][:, _SECONDS].astype(np.float64)
        mean_seconds = rows["mean"][:, _SECONDS].astype(np.float64)
        seconds = np.clip(mean_seconds, 0.0, _LONGEST_STEP_SECONDS) * counts
        return StepTimes(
            unix_seconds=rows["time"] / 1e9,
            steps=rows["step"].astype(np.float64),
            counts=counts,
            seconds=seconds if is_guard else counts,
        )


def _curves_by_optimizer(
    rows: Rows, optimizers: Sequence[str]
) -> tuple[dict[str, Curve], dict[str, dict[str, Curve]]]:
    """Return the curves of a source, and the separate curves of each of its optimizers by name.

    If there are several optimizers, curves that depend on the optimizer are only in the second
    result. If there is only one, the second result is empty.
    """
    curves = curves_of_steps(rows)
    if len(optimizers) < 2:
        return curves, {}
    by_optimizer = {}
    for number, optimizer in enumerate(optimizers, start=1):
        own_curves = curves_of_steps(rows[rows["optimizer"] == number])
        by_optimizer[optimizer] = _only(own_curves, CURVES_OF_AN_OPTIMIZER)
    shared = [name for name in curves if name not in CURVES_OF_AN_OPTIMIZER]
    return _only(curves, shared), by_optimizer


def _only(curves: Mapping[str, Curve], names: Sequence[str]) -> dict[str, Curve]:
    return {name: curves[name] for name in names if name in curves}
