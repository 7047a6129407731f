"""`Series`: the values that were logged under one name, kept in bounded memory."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# If there are more points, neighboring points are merged in pairs. A screen is about 4,000 pixels
# wide.
_MAX_POINTS = 8192
# How many new values are collected before they become points. Larger than one, because working on
# whole lists is much faster than working on each value.
_VALUES_AT_ONCE = 4096


class SeriesPoint(NamedTuple):
    """Consecutive values of a series: a single one, or more if the series is long.

    Attributes:
        step: The step of the first value.
        low: The smallest finite value; inf if no value is finite.
        mean: The mean of the finite values; 0 if no value is finite.
        high: The largest finite value; -inf if no value is finite.
        finite: The number of finite values.
        nonfinite: The number of values that are NaN or infinite.
    """

    step: int
    low: float
    mean: float
    high: float
    finite: int
    nonfinite: int


class SeriesEnd(NamedTuple):
    """How a series ends.

    Attributes:
        size: The number of values in the series.
        last_step: The step of the newest value.
        last: The newest value, which may be NaN.
        nonfinite_since: The step of the first value after the last finite one. None if the newest
            value is finite.
        nonfinite: The number of values from there to the end.
    """

    size: int
    last_step: int
    last: float
    nonfinite_since: int | None = None
    nonfinite: int = 0


class Series:
    """The values that were logged under one name, in the order in which they were logged.

    A long series is kept as at most `_MAX_POINTS` points. The first and the last step, the extremes
    and the step since which the values are not finite remain exact.
    """

    def __init__(self) -> None:
        self._points: list[SeriesPoint] = []
        self._values_per_point = 1
        # How the points end. Only `end` brings it up to date.
        self._end = SeriesEnd(size=0, last_step=0, last=math.nan)
        # Values that are not in `_points` yet.
        self._new_steps = array("d")
        self._new_values = array("d")

    def extend(self, steps: Sequence[int], values: Sequence[float]) -> None:
        """Append values, with the step of each."""
        self._new_steps.extend(steps)
        self._new_values.extend(values)
        if len(self._new_values) >= max(_VALUES_AT_ONCE, self._values_per_point):
            self._make_points()

    def points(self) -> Sequence[SeriesPoint]:
        """Return the points of this series, oldest first."""
        self._make_points()
        return self._points

    def end(self) -> SeriesEnd:
        """Return how this series ends."""
        self._make_points()
        return self._end

    @property
    def first_step(self) -> int:
        """Return the step of the first value; 0 if there is none."""
        points = self.points()
        return points[0].step if points else 0

    @property
    def low(self) -> float:
        """Return the smallest finite value; inf if there is none."""
        return min((point.low for point in self.points()), default=math.inf)

    @property
    def high(self) -> float:
        """Return the largest finite value; -inf if there is none."""
        return max((point.high for point in self.points()), default=-math.inf)

    def _make_points(self) -> None:
        """Turn the new values into points."""
        steps = self._new_steps
        values = self._new_values
        if not values:
            return
        self._end = _extend_end(self._end, steps, values)
        size = self._values_per_point
        for start in range(0, len(values), size):
            self._points.append(_make_point(int(steps[start]), values[start : start + size]))
        self._new_steps = array("d")
        self._new_values = array("d")
        while len(self._points) > _MAX_POINTS:
            self._points = list(_merge_in_pairs(self._points))
            self._values_per_point *= 2


def _extend_end(end: SeriesEnd, steps: Sequence[float], values: Sequence[float]) -> SeriesEnd:
    """Return the end of a series to which values were added.

    Args:
        end: The end before.
        steps: The steps of the new values, of which there is at least one.
        values: The new values.
    """
    nonfinite = 0
    for value in reversed(values):
        if math.isfinite(value):
            break
        nonfinite += 1
    since = int(steps[-nonfinite]) if nonfinite else None
    if nonfinite == len(values) and end.nonfinite_since is not None:
        since = end.nonfinite_since
        nonfinite += end.nonfinite
    return SeriesEnd(
        size=end.size + len(values),
        last_step=int(steps[-1]),
        last=values[-1],
        nonfinite_since=since,
        nonfinite=nonfinite,
    )


def _make_point(step: int, values: Sequence[float]) -> SeriesPoint:
    """Return the point for consecutive values, the first of which was logged at `step`."""
    finite = [value for value in values if math.isfinite(value)]
    nonfinite = len(values) - len(finite)
    if not finite:
        return SeriesPoint(
            step, low=math.inf, mean=0.0, high=-math.inf, finite=0, nonfinite=nonfinite
        )
    mean = sum(finite) / len(finite)
    if not math.isfinite(mean):
        # The sum of large losses is infinite, but their mean is not.
        mean = sum(value / len(finite) for value in finite)
    return SeriesPoint(step, min(finite), mean, max(finite), len(finite), nonfinite)


def _merge_in_pairs(points: Sequence[SeriesPoint]) -> Iterator[SeriesPoint]:
    """Yield one point for every two consecutive points."""
    for index in range(0, len(points) - 1, 2):
        yield _merge_points(points[index], points[index + 1])
    if len(points) % 2:
        yield points[-1]


def _merge_points(first: SeriesPoint, second: SeriesPoint) -> SeriesPoint:
    finite = first.finite + second.finite
    mean = 0.0
    if finite:
        # Weights instead of a sum, because the sum of two large losses could be infinite.
        mean = first.mean * (first.finite / finite) + second.mean * (second.finite / finite)
    return SeriesPoint(
        step=first.step,
        low=min(first.low, second.low),
        mean=mean,
        high=max(first.high, second.high),
        finite=finite,
        nonfinite=first.nonfinite + second.nonfinite,
    )
