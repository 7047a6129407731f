"""The slope test: what grows without end is told from what warms up, comes and goes, or was
bought once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.supervise.leaks.growth import MemoryReading, find_growth

_MIB = 2**20
_BASE = 800 * _MIB


def _series(
    shape: Callable[[int, random.Random], float], length: int, seed: int
) -> list[MemoryReading]:
    chance = random.Random(seed)
    return [
        MemoryReading(
            step=10 * number,
            seconds=number / 4,
            used_bytes=int(_BASE + shape(number, chance) * _MIB + abs(chance.gauss(0, 2 * _MIB))),
        )
        for number in range(length)
    ]


_HEALTHY: dict[str, Callable[[int, random.Random], float]] = {
    "flat": lambda number, chance: 0,
    "warm-up": lambda number, chance: 300 * (1 - math.exp(-number / 60)),
    "a cache that fills": lambda number, chance: 60 * math.log1p(number),
    "garbage": lambda number, chance: number % 97 * 2,
    "evaluation": lambda number, chance: 400 if number % 200 > 180 else 0,
    "one purchase": lambda number, chance: 500 if number > 600 else 0,
    "ever other shapes": lambda number, chance: min(900, 5 * chance.paretovariate(1.2)),
}


@pytest.mark.parametrize("shape", _HEALTHY.values(), ids=_HEALTHY)
@pytest.mark.parametrize("length", [160, 600, 1500])
def test_healthy_memory_is_no_leak(
    shape: Callable[[int, random.Random], float], length: int
) -> None:
    """Memory that comes to rest, comes and goes, or jumps once is never taken for a leak."""
    assert not [seed for seed in range(40) if find_growth(_series(shape, length, seed)) is not None]


@pytest.mark.parametrize("tooth", [0, 53])
def test_a_leak_is_found_with_its_slope_and_its_end(tooth: int) -> None:
    """A MiB at each reading is found under noise and garbage, and says when memory is used up."""
    for seed in range(20):
        found = find_growth(
            _series(lambda number, chance: number + (number % tooth if tooth else 0), 900, seed)
        )
        assert found is not None
        assert found.low <= found.bytes_per_step <= found.high
        assert found.bytes_per_step * 10 == pytest.approx(_MIB, rel=0.1)
        assert found.minutes_until_used(2400 * _MIB) == pytest.approx(2400 / 4 / 60, rel=0.1)
        assert found.minutes_until_used(-5) == 0


@given(st.lists(st.integers(0, 2**34), max_size=400))
def test_any_series_is_answered(values: list[int]) -> None:
    """Whatever is measured, the test gives growth with a positive slope, or none."""
    found = find_growth(
        [
            MemoryReading(step=step, seconds=float(step), used_bytes=used)
            for step, used in enumerate(values)
        ]
    )
    assert found is None or (found.bytes_per_step > 0 and found.grown_bytes > 0)


@given(st.integers(200, 2000), st.floats(0.2, 50), st.integers(0, 10**6))
def test_any_steady_growth_is_found(length: int, pace: float, seed: int) -> None:
    """A straight line is a leak once it has risen far enough above noise and pools."""
    if length * 0.7 * pace > 60:
        assert find_growth(_series(lambda number, chance: pace * number, length, seed)) is not None
