"""Compute curves over steps, reduced to the resolution of a screen.

Each point of a curve represents a range of consecutive steps. A curve shows the mean of each range,
with a band from the minimum to the maximum, so that peaks stay visible even in long runs.
``page.figures.steps`` draws the curves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.explain.records.series import SeriesPoint
from holdfast.recorder.history import NAMES, Rows, merge_rows, rows_of
from holdfast.recorder.ring import read_ring, slot_struct
from holdfast.recorder.scalars import Scalar

FloatArray = NDArray[np.float64]
# The number of values in each range of steps, or a bool that is True if there are any.
Counts = NDArray[Any]

# Screens are at most about 4,000 pixels wide, and each point has a band, so more points would not
# be visible.
MAX_POINTS = 2000
# Curves that are kept separate for each optimizer: loss, gradient norm and learning rate.
CURVES_OF_AN_OPTIMIZER = NAMES[:3]
# Prefix for the names of curves that the script logged.
LOGGED = "logged: "
# Maximum number of logged names to draw. Each one takes a panel, and more panels would make the
# page unusable.
MAX_LOGGED = 24
# A step that a script logs is assumed to be an optimizer step if it differs from the current
# training step by at most a factor of 2 or by at most this many steps. Otherwise the script counts
# something else, such as epochs or samples.
_NEAR_STEPS = 10

_INDEX_OF = {name: index for index, name in enumerate(NAMES)}
# The type of rows like those in ``recorder.history``, but with one quantity instead of all `NAMES`.
_SCALAR_ROW = np.dtype(
    [
        ("number", "<u8"),
        ("optimizer", "u1"),
        ("step", "<f8"),
        ("low", "<f8", (1,)),
        ("mean", "<f8", (1,)),
        ("high", "<f8", (1,)),
        ("finite", "<u4", (1,)),
        ("odd", "<u4", (1,)),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The area between the minimum and the maximum of each range of steps."""

    steps: FloatArray
    low: FloatArray
    high: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One quantity over steps, in the order in which the steps were recorded.

    Args:
        steps: First step of each range. NaN marks a gap, for example where the run returned to an
            earlier step.
        values: Mean of each range; NaN in a gap, or if no value is finite.
        nonfinite: First steps of the ranges that contain infinite or NaN values.
        band: The minimum and maximum of each range; None if they are equal in every range.
        own_scale: Whether `steps` counts something other than optimizer steps, such as epochs.
    """

    steps: FloatArray
    values: FloatArray
    nonfinite: FloatArray
    band: Band | None
    own_scale: bool = False

    @property
    def finite(self) -> FloatArray:
        """Return all finite means, and the minimum and maximum of each range, in one array."""
        parts = [self.values]
        if self.band is not None:
            parts += [self.band.low, self.band.high]
        values: FloatArray = np.concatenate(parts)
        return values[np.isfinite(values)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The times of training steps, with one entry per recorded range of steps, oldest first.

    Args:
        unix_seconds: Time at which each range was recorded.
        steps: Number of the first step in each range.
        counts: How many steps in each range have a known duration.
        seconds: Total duration of these steps. For a process without a guard, this equals `counts`,
            because only the proportions between ranges are used.
    """

    unix_seconds: FloatArray
    steps: FloatArray
    counts: FloatArray
    seconds: FloatArray

    @classmethod
    def none(cls) -> StepTimes:
        """Return empty times, for a process that recorded no steps."""
        empty: FloatArray = np.array([])
        return cls(unix_seconds=empty, steps=empty, counts=empty, seconds=empty)

    def __len__(self) -> int:
        return len(self.steps)


def rows_of_ring(path: Path) -> Rows:
    """Return the records of a ring of steps in the row format of ``recorder.history``.

    The oldest record comes first.

    Raises:
        RunDirectoryError: H305 if the ring is damaged; see `read_ring`.
    """
    records = read_ring(path)
    slot = slot_struct(len(records[0].payload) if records else 0)
    slots = [
        slot.pack(record.sequence, record.nanoseconds, record.payload, record.sequence)
        for record in records
    ]
    rows, _ = rows_of(b"".join(slots), slot.size)
    return rows


def thinned(history: Rows, ring: Rows, most: int = MAX_POINTS) -> Rows:
    """Merge rows into at most `most` rows: half of them for the history, half for the ring.

    Args:
        history: Rows about older steps, which were overwritten in the ring.
        ring: Rows about the newest steps.
        most: The maximum number of rows to return.
    """
    return np.concatenate([merge_rows(history, most // 2), merge_rows(ring, most // 2, finest=2)])


def curves_of_steps(rows: Rows) -> dict[str, Curve]:
    """Return the curves of a process by name, omitting quantities that were never recorded."""
    curves = {}
    for name, index in _INDEX_OF.items():
        if name != "wait_seconds":
            curves[name] = _curve(_ranges_of(rows, index))
    curves["wait_share"] = _curve(_wait_shares(rows))
    return {name: curve for name, curve in curves.items() if curve is not None}


def curves_of_scalars(
    scalars: Sequence[Scalar], times: StepTimes, most: int = MAX_POINTS
) -> dict[str, Curve]:
    """Return the curves of the first `MAX_LOGGED` names that a script logged.

    Args:
        scalars: The logged values, oldest first.
        times: Times of the training steps of the same process. They show whether the steps of a
            scalar are optimizer steps.
        most: Maximum number of points of a curve that has a history, as in `thinned`. Scalars have
            no history, so their curves get half as many points.

    Returns:
        Curves by name, with the prefix `LOGGED`.
    """
    by_name: dict[str, list[Scalar]] = {}
    for scalar in scalars:
        by_name.setdefault(scalar.name, []).append(scalar)

    curves = {}
    for name in list(by_name)[:MAX_LOGGED]:
        rows = merge_rows(_rows_of_scalars(by_name[name]), most // 2, finest=2)
        curve = _curve(_ranges_of(rows, 0))
        if curve is not None:
            own_scale = not _counts_optimizer_steps(by_name[name][-1], times)
            curves[LOGGED + name] = replace(curve, own_scale=own_scale)
    return curves


def curve_of_points(points: Sequence[SeriesPoint], most: int = MAX_POINTS) -> Curve | None:
    """Return the curve of a metric that another tool recorded, or None if it has no values.

    Args:
        points: The points of its series, oldest first.
        most: Maximum number of points of the curve.
    """
    rows = np.zeros(len(points), _SCALAR_ROW)
    rows["number"] = np.arange(len(points))
    if points:
        steps, low, mean, high, finite, odd = zip(*points, strict=True)
        rows["step"] = steps
        rows["low"][:, 0] = low
        rows["mean"][:, 0] = mean
        rows["high"][:, 0] = high
        rows["finite"][:, 0] = finite
        rows["odd"][:, 0] = odd
    return _curve(_ranges_of(merge_rows(rows, most, finest=2), 0))


def _counts_optimizer_steps(scalar: Scalar, times: StepTimes) -> bool:
    """Return whether a scalar's step is close to the training step at the time of logging."""
    if len(times) == 0:
        return True
    trained = np.interp(scalar.unix_seconds, times.unix_seconds, times.steps)
    return bool(trained / 2 - _NEAR_STEPS <= scalar.step <= 2 * trained + _NEAR_STEPS)


def _rows_of_scalars(scalars: Sequence[Scalar]) -> Rows:
    """Return the values logged under one name as rows of `_SCALAR_ROW`."""
    values = np.array([[scalar.value] for scalar in scalars], np.float64)
    finite = np.isfinite(values)
    rows = np.zeros(len(values), _SCALAR_ROW)
    rows["number"] = np.arange(len(values))
    rows["step"] = [scalar.step for scalar in scalars]
    rows["finite"] = finite
    rows["odd"] = ~finite
    # Rows without a finite value contain the neutral elements of minimum, sum and maximum, as in
    # ``recorder.history``, so that they do not change the result of merging rows.
    rows["low"] = np.where(finite, values, np.inf)
    rows["mean"] = np.where(finite, values, 0.0)
    rows["high"] = np.where(finite, values, -np.inf)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepRanges:
    """One quantity over ranges of steps: the columns of rows as in ``recorder.history``.

    Args:
        steps: First step of each range.
        finite: Number of finite values. If it is 0, `mean`, `low` and `high` are undefined.
        nonfinite: Number of values that are infinite or NaN.
        mean: Mean of the finite values.
        low: Minimum of the finite values.
        high: Maximum of the finite values.
    """

    steps: FloatArray
    finite: Counts
    nonfinite: Counts
    mean: FloatArray
    low: FloatArray
    high: FloatArray


def _ranges_of(rows: Rows, index: int) -> _StepRanges:
    """Return one quantity from rows, given its index: in `NAMES`, or 0 for rows of scalars."""
    return _StepRanges(
        steps=rows["step"].astype(np.float64),
        finite=rows["finite"][:, index],
        nonfinite=rows["odd"][:, index],
        mean=rows["mean"][:, index],
        low=rows["low"][:, index],
        high=rows["high"][:, index],
    )


def _wait_shares(rows: Rows) -> _StepRanges:
    """Return, for each range of steps, the share of time spent waiting for the data loader."""
    totals = rows["mean"] * rows["finite"]
    seconds = totals[:, _INDEX_OF["seconds"]]
    wait_seconds = totals[:, _INDEX_OF["wait_seconds"]]
    is_known = (seconds > 0) & (rows["finite"][:, _INDEX_OF["wait_seconds"]] > 0)
    share = np.clip(wait_seconds / np.where(is_known, seconds, 1.0), 0.0, 1.0)
    return _StepRanges(
        steps=rows["step"].astype(np.float64),
        finite=is_known,
        nonfinite=np.zeros_like(is_known),
        mean=share,
        low=share,
        high=share,
    )


def _curve(ranges: _StepRanges) -> Curve | None:
    """Return the curve of a quantity, or None if it was never recorded."""
    has_finite = ranges.finite > 0
    has_nonfinite = ranges.nonfinite > 0
    is_recorded = has_finite | has_nonfinite
    if not is_recorded.any():
        return None

    band = None
    if (ranges.low < ranges.high).any():
        band = Band(
            steps=ranges.steps[has_finite],
            low=ranges.low[has_finite],
            high=ranges.high[has_finite],
        )
    steps = ranges.steps[is_recorded]
    values = np.where(has_finite, ranges.mean, np.nan)[is_recorded]
    # Leave a gap where the run returned to an earlier step, because a line would show training that
    # never happened. `np.diff` compares each step with the next one, so add 1 for the index of the
    # step after the return.
    returns = np.flatnonzero(np.diff(steps) < 0) + 1
    return Curve(
        steps=np.insert(steps, returns, np.nan),
        values=np.insert(values, returns, np.nan),
        nonfinite=ranges.steps[has_nonfinite],
        band=band,
    )
