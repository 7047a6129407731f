"""The usual losses and gradient norms of a run, and the bounds above which a value is suspicious.

Distances are measured in units of the upward scatter of the usual values. The figures below were
chosen on the design runs of ``benchmarks/spikes_runs``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.containers import check_number

# --- Distances above the middle, in units of the scatter. In 18,000 healthy steps of the design
# runs the recent level reached 1.2 at most, and loss and norm together 2.8 (logarithmic) and 6.9
# (linear).

# A norm is usual up to this distance.
USUAL_SCATTERS = 2.5
# A single loss or norm is far above this, on the logarithmic and on the linear scale.
_FAR = 6.0
_FAR_LINEAR = 15.0
# Levels: see the fields of `Bounds`.
_SHORT_ODD = 1.8
_RAISED = 0.7
_GONE = 2.2
# A level is also gone above this distance from the best one that the run ever had.
_DRIFTED = 3.5

# --- Least scatter and least rises, as shares of the value, so that a ripple in a very calm run
# raises no alarm. A loss must rise by 20 % and a norm by 82 % to be far, and a level by 28 % to be
# gone.

LOSS_FLOOR = 0.03
NORM_FLOOR = 0.1
_ODD_RISE = 0.1
_LEAST_RISE = 0.25
# The share of its gain that a run must lose before a level counts. A rise from 1e-6 to 1e-4 after a
# start at 1.0 does not.
_LEAST_LOSS = 0.1

# The largest number that the arithmetic below may reach, so that it stays finite.
_LARGEST = 1e300
_SMALLEST = 1e-300
_LARGEST_EXPONENT = 700.0

# Quantiles of the standard normal distribution, at 0.75, 0.95 and about 0.99.
_SIGMAS_AT_UPPER_QUARTILE = 0.6745
_SIGMAS_AT_95 = 1.645
_SIGMAS_AT_SECOND_LARGEST = 2.4


@dataclass(frozen=True, slots=True)
class UsualValues:
    """The middle and the upward scatter of some values, logarithmic if all of them are positive."""

    middle: float
    upper_quartile: float
    scatter: float
    # The mean magnitude, which shares are relative to, or None on the logarithmic scale.
    unit: float | None

    @classmethod
    def of(cls, values: Sequence[float], floor: float) -> UsualValues:
        """Return the statistics of some values.

        Args:
            values: Those of a window.
            floor: The least scatter, as a share of the value.
        """
        # Quantiles of the upper half stand for the median absolute deviation: they need one sort,
        # and logarithms of three values only.
        ordered = sorted(values)
        if ordered[0] > 0:
            return cls._logarithmic(ordered, floor)
        return cls._linear(ordered, floor)

    @classmethod
    def _logarithmic(cls, ordered: Sequence[float], floor: float) -> UsualValues:
        middle, upper, high = _upper_quantiles(ordered)
        scatter = max(
            _logarithm(upper / middle) / _SIGMAS_AT_UPPER_QUARTILE,
            _logarithm(high / middle) / _SIGMAS_AT_95,
            floor,
        )
        return cls(middle, upper, scatter, None)

    @classmethod
    def _linear(cls, ordered: Sequence[float], floor: float) -> UsualValues:
        middle, upper, high = _upper_quantiles(ordered)
        # Divided before they are summed, which stays finite.
        unit = sum(abs(value) / len(ordered) for value in ordered)
        scatter = max(
            (upper - middle) / _SIGMAS_AT_UPPER_QUARTILE,
            (high - middle) / _SIGMAS_AT_95,
            (ordered[-2] - middle) / _SIGMAS_AT_SECOND_LARGEST,
        )
        if high == middle:
            # Nearly all are equal, such as the zeros of a hinge loss: only the largest value shows
            # a scatter.
            scatter = ordered[-1] - middle
        scatter = min(max(scatter, floor * unit, _SMALLEST), _LARGEST)
        return cls(middle, upper, scatter, unit)

    @classmethod
    def from_state(cls, state: Sequence[Any] | None) -> UsualValues | None:
        """Return what `state` returned, or None for None."""
        if state is None:
            return None
        return cls(*(check_number(value, or_none=True) for value in state))

    def state(self) -> list[float | None]:
        """Return the fields as JSON values."""
        return [self.middle, self.upper_quartile, self.scatter, self.unit]

    def far(self) -> float:
        """Return the threshold above which a value is far from the usual ones."""
        return self.above(_FAR if self.unit is None else _FAR_LINEAR)

    def above(self, scatters: float, least_rise: float = 0.0) -> float:
        """Return the value that lies this many scatters above the middle.

        Args:
            scatters: The distance.
            least_rise: The least distance, as a share of the value.
        """
        if self.unit is None:
            exponent = max(scatters * self.scatter, least_rise)
            return self.middle * math.exp(min(exponent, _LARGEST_EXPONENT))
        if self.unit == 0:
            # All values are 0, so there is no scale to measure a distance by.
            return math.inf
        return self.middle + max(scatters * self.scatter, least_rise * self.unit)

    def distance(self, value: float) -> float:
        """Return by how many scatters a value exceeds the middle; the value must be larger."""
        if self.unit is None:
            rise = _logarithm(value / self.middle)
        else:
            rise = value - self.middle
        return min(rise / self.scatter, _LARGEST)


def _upper_quantiles(ordered: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the quantiles at 0.75 and 0.95."""
    size = len(ordered)
    return ordered[size // 2], ordered[size * 3 // 4], ordered[size * 19 // 20]


def _logarithm(ratio: float) -> float:
    # A ratio of two finite numbers may be Inf.
    return math.log(min(ratio, _LARGEST))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The values above which a loss, a norm or a level is suspicious. Without statistics, none."""

    loss_far: float = math.inf
    norm_far: float = math.inf
    # For the median of the newest seven losses.
    short_odd: float = math.inf
    # For single losses, which CUSUM counts.
    odd: float = math.inf
    # For the recent level, once losses have been odd for long.
    raised: float = math.inf
    # For the recent level, at once.
    gone: float = math.inf

    @classmethod
    def of(
        cls, loss: UsualValues, norm: UsualValues, best: UsualValues, first_level: float
    ) -> Bounds:
        """Return the bounds of a run.

        Args:
            loss: The usual losses.
            norm: The usual gradient norms.
            best: The usual losses when their level was best.
            first_level: The level that the run began with.
        """
        gained = max(0.0, first_level - best.middle)
        # Above this level a noticeable share of what the run has gained is lost.
        matters = best.middle + _LEAST_LOSS * gained
        gone = min(loss.above(_GONE, _LEAST_RISE), best.above(_DRIFTED, _LEAST_RISE))
        return cls(
            loss_far=loss.far(),
            norm_far=norm.far(),
            short_odd=loss.above(_SHORT_ODD),
            odd=max(loss.upper_quartile, loss.above(0.0, _ODD_RISE), matters),
            raised=max(loss.above(_RAISED, _LEAST_RISE), matters),
            gone=max(gone, matters),
        )
