"""The detectors compared, re-implemented in a few lines where they are not ours, and series made
by chance.
"""

# ruff: noqa: D102 - `flags` takes one step and says if it is flagged, `suspects` if a state would not be called good now

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

from holdfast.numerics.spikes import Level, SpikeDetector

Row = tuple[str, float, float]


class Ours:
    """The detector as a run with ``spike_action="skip"`` uses it.

    A step that is not finite is hard too.
    """

    def __init__(self, objective: Any = "minimize") -> None:
        self.detector = SpikeDetector(objective=objective)

    def flags(self, name: str, loss: float, norm: float) -> bool:
        level = self.detector.judge(name, loss, norm)
        if level is not Level.HARD:
            self.detector.accepted(name, loss, norm)
        return level in (Level.HARD, Level.DIVERGED) or not (
            math.isfinite(loss) and math.isfinite(norm)
        )

    def suspects(self) -> bool:
        return not self.detector.is_calm()


def _never(_: Any) -> bool:
    return False


class ZClip:
    """z-score 2.5 of the norm over moving averages (0.97), after 25 steps (arXiv 2504.02507)."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.mean = self.variance = 0.0

    def flags(self, _: str, __: float, norm: float) -> bool:
        if len(self.seen) < 25:
            self.seen.append(norm)
            self.mean, self.variance = statistics.fmean(self.seen), statistics.pvariance(self.seen)
            return False
        spread = math.sqrt(self.variance) + 1e-6
        spiked = (norm - self.mean) / spread > 2.5
        value = self.mean + 2.5 * spread * (2.5 / ((norm - self.mean) / spread)) if spiked else norm
        self.mean = 0.97 * self.mean + 0.03 * value
        self.variance = 0.97 * self.variance + 0.03 * (value - self.mean) ** 2
        return spiked

    suspects = _never


class Olmo:
    """Loss or norm above mean + 6 deviations of the last 128, as OLMo-core skips steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    def flags(self, _: str, loss: float, norm: float) -> bool:
        spiked = False
        for kept, value in ((self.losses, loss), (self.norms, norm)):
            if len(kept) == 128:
                sums, squares = sum(kept), sum(number * number for number in kept)
                spread = (
                    math.sqrt(max(0.0, (squares - sums * sums / 128) / 127))
                    if squares < math.inf
                    else math.nan
                )
                spiked = spiked or not value <= sums / 128 + 6 * spread
                kept.pop(0)
            kept.append(value)
        return spiked

    suspects = _never


class Megatron:
    """Loss above ten times the largest of the first 100."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def flags(self, _: str, loss: float, __: float) -> bool:
        if len(self.losses) < 100:
            self.losses.append(loss)
            return False
        return not loss <= 10 * max(self.losses)

    suspects = _never


OTHERS = {"ZClip 2.5": ZClip, "OLMo 6 sd of 128": Olmo, "Megatron 10 x": Megatron}


def student(chance: random.Random, freedom: int) -> float:
    return chance.gauss(0, 1) / math.sqrt(chance.gammavariate(freedom / 2, 2 / freedom))


def log_normal(chance: random.Random) -> tuple[float, float]:
    hardness = chance.gauss(0, 1)
    return math.exp(hardness), math.exp(0.9 * hardness + 0.44 * chance.gauss(0, 1))


def student_2(chance: random.Random) -> tuple[float, float]:
    loss = abs(student(chance, 2))
    return loss, loss * math.exp(chance.gauss(0, 0.3))


def student_3_around_zero(chance: random.Random) -> tuple[float, float]:
    loss = student(chance, 3)
    return loss, 0.1 + abs(loss) * math.exp(chance.gauss(0, 0.3))


def exponential_of_student_3(chance: random.Random) -> tuple[float, float]:
    both = math.exp(min(0.3 * student(chance, 3), 300.0))
    return both, both


SYNTHETIC = (log_normal, student_2, student_3_around_zero, exponential_of_student_3)


def synthetic(
    name: str, draw: Callable[[random.Random], tuple[float, float]], steps: int
) -> list[Row]:
    chance = random.Random(name)
    return [("all", *draw(chance)) for _ in range(steps)]
