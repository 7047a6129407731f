"""The usual losses and gradient norms of a run, and the bounds above which values are suspicious.

The *scatter* of values is how far above their median they usually are, comparable to a standard
deviation. Distances are measured in scatters. All constants below were chosen based on the design
runs of ``benchmarks/spikes_runs``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.core.containers import check_number

# --- Distances above the median, in scatters. In 18,000 healthy steps of the design runs, the
# recent level of the losses was at most 1.2 scatters above the median. No step had both its loss
# and its norm more than 2.8 scatters above it on the logarithmic scale, or 6.9 on the linear scale.

# The largest distance at which a norm still counts as usual.
USUAL_SCATTERS = 2.5
# The distance beyond which a loss or norm is far from the usual ones, on the logarithmic scale.
_FAR = 6.0
# The corresponding distance on the linear scale.
_FAR_LINEAR = 15.0
# Distances of levels; see the fields of `Bounds` with the same names. A level is "gone" if it is so
# high that the run has diverged.
_SHORT_ODD = 1.8
_RAISED = 0.7
_GONE = 2.2
# A level also counts as gone if it is farther than this from the best level that the run has had.
_DRIFTED = 3.5

# --- The smallest scatters and the smallest relevant rises, as fractions of the value. They keep
# the noise of a very calm run from raising an alarm. To count as far from the usual ones, a loss
# must rise by at least 20% and a norm by at least 82%. To count as gone, a level must rise by at
# least 28%.

# The smallest scatter of losses.
LOSS_FLOOR = 0.03
# The smallest scatter of gradient norms.
NORM_FLOOR = 0.1
# The smallest rise of a loss that counts as odd.
_ODD_RISE = 0.1
# The smallest rise of a level that counts as raised or gone.
_LEAST_RISE = 0.25
# A rise of the level is relevant only if the run loses at least this fraction of its progress. For
# example, a rise from 1e-6 to 1e-4 is irrelevant in a run that began at a loss of 1.0.
_LEAST_LOSS = 0.1

# Limits that keep the arithmetic below finite.
_LARGEST = 1e300
_SMALLEST = 1e-300
_LARGEST_EXPONENT = 700.0

# Quantiles of the standard normal distribution at 0.75, 0.95 and about 0.99.
_SIGMAS_AT_UPPER_QUARTILE = 0.6745
_SIGMAS_AT_95 = 1.645
_SIGMAS_AT_SECOND_LARGEST = 2.4


@dataclass(frozen=True, slots=True)
class UsualValues:
    """The median and the scatter of the values in a window.

    If all values are positive, the scale is logarithmic: the scatter is that of their logarithms.
    Otherwise, the scale is linear.
    """

    # The median.
    middle: float
    upper_quartile: float
    scatter: float
    # The mean magnitude of the values, or None on the logarithmic scale. On the linear scale,
    # fractions such as `LOSS_FLOOR` are relative to it.
    unit: float | None

    @classmethod
    def of(cls, values: Sequence[float], floor: float) -> UsualValues:
        """Compute the statistics of the values in a window.

        Args:
            values: The values in the window.
            floor: The smallest possible scatter, as a fraction of the value.
        """
        # The scatter is computed from quantiles above the median instead of the median absolute
        # deviation. This takes only one sort, and logarithms of only three values.
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
        # Divide before summing, so that the sum stays finite.
        unit = sum(abs(value) / len(ordered) for value in ordered)
        scatter = max(
            (upper - middle) / _SIGMAS_AT_UPPER_QUARTILE,
            (high - middle) / _SIGMAS_AT_95,
            (ordered[-2] - middle) / _SIGMAS_AT_SECOND_LARGEST,
        )
        if high == middle:
            # Nearly all values are equal, such as the zeros of a hinge loss. Only the largest value
            # shows any scatter.
            scatter = ordered[-1] - middle
        scatter = min(max(scatter, floor * unit, _SMALLEST), _LARGEST)
        return cls(middle, upper, scatter, unit)

    @classmethod
    def from_state(cls, state: Sequence[Any] | None) -> UsualValues | None:
        """Create the statistics from a result of `state`. Returns None if `state` is None."""
        if state is None:
            return None
        return cls(*(check_number(value, or_none=True) for value in state))

    def state(self) -> list[float | None]:
        """Return the fields as a list of JSON values."""
        return [self.middle, self.upper_quartile, self.scatter, self.unit]

    def far(self) -> float:
        """Return the value above which values are far from the usual ones."""
        return self.above(_FAR if self.unit is None else _FAR_LINEAR)

    def above(self, scatters: float, least_rise: float = 0.0) -> float:
        """Return the value at a given distance above the median.

        Args:
            scatters: The distance in scatters.
            least_rise: The smallest possible distance, as a fraction of the value.
        """
        if self.unit is None:
            exponent = max(scatters * self.scatter, least_rise)
            return self.middle * math.exp(min(exponent, _LARGEST_EXPONENT))
        if self.unit == 0:
            # All values are 0, so there is no scale on which to measure a distance.
            return math.inf
        return self.middle + max(scatters * self.scatter, least_rise * self.unit)

    def distance(self, value: float) -> float:
        """Return by how many scatters a value exceeds the median. It must be above the median."""
        if self.unit is None:
            rise = _logarithm(value / self.middle)
        else:
            rise = value - self.middle
        return min(rise / self.scatter, _LARGEST)


def _upper_quantiles(ordered: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the quantiles at 0.75 and 0.95 of sorted values."""
    size = len(ordered)
    return ordered[size // 2], ordered[size * 3 // 4], ordered[size * 19 // 20]


def _logarithm(ratio: float) -> float:
    # A ratio of two finite numbers may be Inf.
    return math.log(min(ratio, _LARGEST))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Upper bounds of usual values. A value above its bound is suspicious.

    With the default bounds, nothing is suspicious. They apply until there are enough values.
    """

    # Above this bound, a loss is far from the usual ones.
    loss_far: float = math.inf
    # Above this bound, a gradient norm is far from the usual ones.
    norm_far: float = math.inf
    # Above this bound, the median of the newest seven losses is a sign of a divergence.
    short_odd: float = math.inf
    # Losses above this bound increase the CUSUM.
    odd: float = math.inf
    # The run has diverged if the recent level is above this bound after many odd losses.
    raised: float = math.inf
    # The run has diverged as soon as the recent level is above this bound.
    gone: float = math.inf

    @classmethod
    def of(
        cls, loss: UsualValues, norm: UsualValues, best: UsualValues, first_level: float
    ) -> Bounds:
        """Compute the bounds of a run.

        Args:
            loss: The usual losses.
            norm: The usual gradient norms.
            best: The usual losses at the time when their median was lowest.
            first_level: The median loss at the beginning of the run.
        """
        progress = max(0.0, first_level - best.middle)
        # Above this level, the run has lost a relevant fraction of its progress.
        relevant = best.middle + _LEAST_LOSS * progress
        gone = min(loss.above(_GONE, _LEAST_RISE), best.above(_DRIFTED, _LEAST_RISE))
        return cls(
            loss_far=loss.far(),
            norm_far=norm.far(),
            short_odd=loss.above(_SHORT_ODD),
            odd=max(loss.upper_quartile, loss.above(0.0, _ODD_RISE), relevant),
            raised=max(loss.above(_RAISED, _LEAST_RISE), relevant),
            gone=max(gone, relevant),
        )
