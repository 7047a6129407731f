"""Decide whether memory grows without bound, with a slope test on readings over many steps.

A leak makes memory grow at a constant rate. Other causes look different: memory levels off after a
warm-up, a cache fills ever more slowly, garbage and evaluation make memory rise and fall, and a
buffer is allocated only once. All functions in this module are pure.

``trends`` reads the measurements and acts on growth, and ``tracer`` finds the objects that hold the
memory.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_WARM_UP_SHARE = 0.2
_WINDOWS = 12
_MIN_READINGS = 10 * _WINDOWS
# Kendall's S of 12 values is at least 58 (of at most 66) if no more than 4 pairs are inverted. Of
# all 12! orders, 1 + 11 + 65 + 274 + 923 have so few inversions, which gives a probability of
# 2.7e-6 for a random order. Four inversions are allowed because up to four pairs of a sawtooth's
# minima may be swapped.
_MIN_KENDALL_S = 58
# Minimum growth rate in the last third, relative to the first third. Logarithmic growth and an
# exponential approach to a limit stay below this ratio.
_MIN_PACE = 0.65
_MAX_SHARE_OF_ONE_JUMP = 0.5
# Less growth than this may be due to fluctuations of the allocator's pools.
_MIN_GROWTH_BYTES = 16 << 20
_MIN_GROWTH_SHARE = 0.01
_MIN_GROWTH_OVER_NOISE = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrowth:
    """Rate and amount of memory growth.

    Args:
        bytes_per_step: The slope: the median of the slopes over all pairs of windows (Theil-Sen).
        low: The 10th percentile of these slopes.
        high: The 90th percentile of these slopes.
        bytes_per_second: The slope over time instead of steps.
        grown_bytes: Total growth over the readings.
        steps: Number of steps from the first to the last reading.
    """

    bytes_per_step: float
    low: float
    high: float
    bytes_per_second: float
    grown_bytes: int
    steps: int

    def minutes_until_used(self, free_bytes: int) -> float:
        """Return how many minutes it takes to use up `free_bytes` of memory at this slope."""
        return max(0, free_bytes) / self.bytes_per_second / 60


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """The memory in use at one step.

    Args:
        step: The step, which increases from reading to reading.
        seconds: Time of the reading, on any clock.
        used_bytes: Memory in use.
    """

    step: int
    seconds: float
    used_bytes: int


def find_growth(readings: Sequence[MemoryReading]) -> MemoryGrowth | None:
    """Return the growth of leaking memory, or None if there is no leak or too few readings.

    The first fifth of the readings is ignored as warm-up. The rest is divided into twelve windows,
    and only the lowest reading of each window is used, so that temporary memory is ignored. These
    lowest readings must rise steadily (Mann-Kendall test) and by more than noise and allocator
    pools can explain. They must not rise in a single jump, and must rise nearly as fast at the end
    as at the beginning.
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
    """Return whether memory rises in nearly all pairs of readings.

    Kendall's S is the number of rising pairs minus the number of falling pairs.
    """
    rising = sum(later.used_bytes > earlier.used_bytes for earlier, later in pairs)
    falling = sum(later.used_bytes < earlier.used_bytes for earlier, later in pairs)
    return rising - falling >= _MIN_KENDALL_S


def _keeps_growing(
    lowest: Sequence[MemoryReading], windows: Sequence[Sequence[MemoryReading]]
) -> bool:
    """Return whether memory grows enough, without slowing down, and not in a single jump.

    Args:
        lowest: The lowest reading of each window.
        windows: All readings of each window.
    """
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
    """Return the typical variation of memory within a window, apart from steady growth.

    Such variation comes from garbage, evaluation and changing batch shapes.
    """
    share_of_growth = (values[-1] - values[0]) / len(windows)
    variations = []
    for window, lowest in zip(windows, values, strict=True):
        middle = statistics.median(reading.used_bytes for reading in window)
        variations.append(max(0.0, middle - lowest - share_of_growth))
    return statistics.median(variations)
