"""Does memory grow without end? A slope test on what was measured at steps; pure, no torch.

Other growth has another shape: a warm-up comes to rest, a cache fills ever more slowly,
garbage and evaluation go up and down, and a buffer is bought once. A leak grows on, at the same
pace.

Does not: find what holds the memory (``supervise.leaks``), read or act.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_WARM_UP_SHARE = 0.2
_WINDOWS = 12
_LEAST_SAMPLES = 10 * _WINDOWS
# Kendall's S of 12 values reaches 58 of 66 with at most 4 inversions, which 1 + 11 + 65 + 274 + 923
# of 12! orders have: a probability of 2.7e-6 in random order. A sawtooth's minima may swap up to
# four pairs.
_LEAST_ORDER = 58
# Of the last third against the first; growth like a logarithm or an exponential rest is below it
_LEAST_PACE = 0.65
_MOST_IN_ONE_JUMP = 0.5
_LEAST_GROWTH_BYTES = 16 * 2**20  # below it, allocators' own pools come and go
_LEAST_GROWTH_SHARE = 0.01
_LEAST_OVER_NOISE = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Memory that grows with the steps."""

    bytes_per_step: float  # slope, the median of all pairs' (Theil-Sen)
    low: float  # its 10th percentile
    high: float  # its 90th percentile
    bytes_per_second: float  # the same by time
    grown_bytes: int  # how much it was over what was looked at
    steps: int  # over how many steps

    def minutes_until(self, bytes_left: int) -> float:
        """Return when so many bytes are used up, at this slope."""
        return max(0, bytes_left) / self.bytes_per_second / 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Memory at a step."""

    step: int  # which; rising
    seconds: float  # when, on any clock
    used_bytes: int  # what was used


def find_growth(readings: Sequence[Reading]) -> Growth | None:
    """Return how memory grows without end, or None if it does not, or too little was seen.

    The first fifth is taken for a warm-up. The rest is cut into twelve windows, and only the lowest
    reading of each counts, which takes out what comes and goes. These must rise one after another
    (Mann-Kendall), by more than noise and pools, not in one jump, and at the end nearly as fast as
    at the beginning.
    """
    rest = readings[int(len(readings) * _WARM_UP_SHARE) :]
    if len(rest) < _LEAST_SAMPLES:
        return None
    size = len(rest) / _WINDOWS
    windows = [
        rest[round(number * size) : round((number + 1) * size)] for number in range(_WINDOWS)
    ]
    lowest = [min(window, key=lambda reading: reading.used_bytes) for window in windows]
    pairs = [
        (one, other) for one, other in itertools.combinations(lowest, 2) if other.step > one.step
    ]
    order = sum(
        (other.used_bytes > one.used_bytes) - (other.used_bytes < one.used_bytes)
        for one, other in pairs
    )
    if order < _LEAST_ORDER or not _grows_on(lowest, windows):
        return None
    slopes = sorted(
        (other.used_bytes - one.used_bytes) / (other.step - one.step) for one, other in pairs
    )
    slope = statistics.median(slopes)
    seconds_per_step = (lowest[-1].seconds - lowest[0].seconds) / (lowest[-1].step - lowest[0].step)
    if slope <= 0 or seconds_per_step <= 0:
        return None
    return Growth(
        bytes_per_step=slope,
        low=slopes[len(slopes) // 10],
        high=slopes[len(slopes) * 9 // 10],
        bytes_per_second=slope / seconds_per_step,
        grown_bytes=lowest[-1].used_bytes - lowest[0].used_bytes,
        steps=lowest[-1].step - lowest[0].step,
    )


def _grows_on(lowest: Sequence[Reading], windows: Sequence[Sequence[Reading]]) -> bool:
    values = [reading.used_bytes for reading in lowest]
    grown = values[-1] - values[0]
    if grown < max(_LEAST_GROWTH_BYTES, _LEAST_GROWTH_SHARE * values[0]):
        return False
    jumps = [after - before for before, after in itertools.pairwise(values)]
    if max(jumps) > _MOST_IN_ONE_JUMP * grown:
        return False
    # What a window varies by itself, beyond its share of the growth, is noise: garbage, evaluation,
    # other shapes.
    share = grown / len(windows)
    noise = statistics.median(
        max(0.0, statistics.median(reading.used_bytes for reading in window) - low - share)
        for window, low in zip(windows, values, strict=True)
    )
    if grown < _LEAST_OVER_NOISE * noise:
        return False
    third = len(values) // 3
    first = statistics.fmean(jumps[:third])
    return statistics.fmean(jumps[-third:]) >= _LEAST_PACE * first
