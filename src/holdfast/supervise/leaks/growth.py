"""Decide whether memory grows without end: a slope test on readings over many steps.

Growth that is not a leak looks different: a warm-up levels off, a cache fills ever more slowly,
garbage and evaluation go up and down, and a buffer is allocated once. A leak keeps growing at a
constant pace. The functions here are pure.

Does not: read measurements or act on growth (``trends`` does), or find what holds the memory
(``tracer`` does).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_WARM_UP_SHARE = 0.2
_WINDOWS = 12
_MIN_READINGS = 10 * _WINDOWS
# Kendall's S of 12 values reaches 58 of 66 if at most 4 pairs are inverted. 1 + 11 + 65 + 274 + 923
# of the 12! orders have so few inversions, a probability of 2.7e-6 in random order. Four inversions
# are allowed because the minima of a sawtooth may swap up to four pairs.
_MIN_KENDALL_S = 58
# Minimum pace in the last third relative to the first third. Logarithmic growth and an exponential
# approach to a limit stay below it.
_MIN_PACE = 0.65
_MAX_SHARE_OF_ONE_JUMP = 0.5
# Allocator pools cause fluctuations below these values.
_MIN_GROWTH_BYTES = 16 << 20
_MIN_GROWTH_SHARE = 0.01
_MIN_GROWTH_OVER_NOISE = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrowth:
    """Memory that grows with the steps.

    Args:
        bytes_per_step: Slope: the median over all pairs of windows (Theil-Sen).
        low: The 10th percentile of these slopes.
        high: Their 90th percentile.
        bytes_per_second: The slope over time.
        grown_bytes: Total growth over the readings.
        steps: Number of steps that the readings span.
    """

    bytes_per_step: float
    low: float
    high: float
    bytes_per_second: float
    grown_bytes: int
    steps: int

    def minutes_until_used(self, free_bytes: int) -> float:
        """Return after how many minutes this much memory is used up, at this slope."""
        return max(0, free_bytes) / self.bytes_per_second / 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Memory in use at a step.

    Args:
        step: The step; increases from reading to reading.
        seconds: Time of the reading, on any clock.
        used_bytes: Memory in use.
    """

    step: int
    seconds: float
    used_bytes: int


def find_growth(readings: Sequence[MemoryReading]) -> MemoryGrowth | None:
    """Return the endless growth of memory; None if there is none or the readings are too few.

    The first fifth of the readings counts as warm-up. The rest is cut into twelve windows, and only
    the lowest reading of each counts, which removes what comes and goes. These must rise steadily
    (Mann-Kendall), by more than noise and allocator pools, not in one jump, and at the end nearly
    as fast as at the beginning.
    """
    after_warm_up = readings[int(len(readings) * _WARM_UP_SHARE) :]
    if len(after_warm_up) < _MIN_READINGS:
        return None
    windows = _cut_into_windows(after_warm_up)
    lowest = [min(window, key=lambda reading: reading.used_bytes) for window in windows]
    pairs = [
        (earlier, later)
        for earlier, later in itertools.combinations(lowest, 2)
        if later.step > earlier.step
    ]
    if not _rises(pairs) or not _keeps_growing(lowest, windows):
        return None
    slopes = sorted(
        (later.used_bytes - earlier.used_bytes) / (later.step - earlier.step)
        for earlier, later in pairs
    )
    bytes_per_step = statistics.median(slopes)
    first = lowest[0]
    last = lowest[-1]
    seconds_per_step = (last.seconds - first.seconds) / (last.step - first.step)
    if bytes_per_step <= 0 or seconds_per_step <= 0:
        return None
    return MemoryGrowth(
        bytes_per_step=bytes_per_step,
        low=slopes[len(slopes) // 10],
        high=slopes[len(slopes) * 9 // 10],
        bytes_per_second=bytes_per_step / seconds_per_step,
        grown_bytes=last.used_bytes - first.used_bytes,
        steps=last.step - first.step,
    )


def _cut_into_windows(readings: Sequence[MemoryReading]) -> list[Sequence[MemoryReading]]:
    size = len(readings) / _WINDOWS
    return [
        readings[round(number * size) : round((number + 1) * size)] for number in range(_WINDOWS)
    ]


def _rises(pairs: Sequence[tuple[MemoryReading, MemoryReading]]) -> bool:
    """Return whether nearly all pairs rise: Kendall's S is rising minus falling pairs."""
    rising = sum(later.used_bytes > earlier.used_bytes for earlier, later in pairs)
    falling = sum(later.used_bytes < earlier.used_bytes for earlier, later in pairs)
    return rising - falling >= _MIN_KENDALL_S


def _keeps_growing(
    lowest: Sequence[MemoryReading], windows: Sequence[Sequence[MemoryReading]]
) -> bool:
    """Return whether the windows grow by enough, not in one jump, and without slowing down."""
    values = [reading.used_bytes for reading in lowest]
    grown = values[-1] - values[0]
    if grown < max(_MIN_GROWTH_BYTES, _MIN_GROWTH_SHARE * values[0]):
        return False
    jumps = [after - before for before, after in itertools.pairwise(values)]
    if max(jumps) > _MAX_SHARE_OF_ONE_JUMP * grown:
        return False
    if grown < _MIN_GROWTH_OVER_NOISE * _noise_bytes(values, windows):
        return False
    third = len(values) // 3
    first_pace = statistics.fmean(jumps[:third])
    last_pace = statistics.fmean(jumps[-third:])
    return last_pace >= _MIN_PACE * first_pace


def _noise_bytes(values: Sequence[int], windows: Sequence[Sequence[MemoryReading]]) -> float:
    """Return how much memory varies within a window, beyond the window's share of the growth.

    The variation comes from garbage, evaluation and varying batch shapes.
    """
    share_of_growth = (values[-1] - values[0]) / len(windows)
    variations = []
    for window, lowest in zip(windows, values, strict=True):
        middle = statistics.median(reading.used_bytes for reading in window)
        variations.append(max(0.0, middle - lowest - share_of_growth))
    return statistics.median(variations)
