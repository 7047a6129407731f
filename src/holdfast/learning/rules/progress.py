"""Whether a run gets anywhere, read from its losses: the question that the window rules share.

The level of a loss says something only where the objective is to make it small and where one loss drives the run;
otherwise the answer is ``"unknown"``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from holdfast.learning.rules.registry import Facts, each

State = Literal["unknown", "learning", "flat", "constant", "diverged"]
_FEWEST = 40
_CONSTANT = {"cross_entropy": 0.97, "nll_loss": 0.97, "binary_cross_entropy": 0.97}
_CONSTANT_REGRESSION = 0.97
"""A loss at this share of the best constant's, or above, has learnt nothing from the inputs: numerics.md 4.4, 28,
where 0.9 of the variance was proposed; regressions with little to learn are healthy at 0.95, so 0.97."""
_DIVERGED = 1.5
"""End over start of a loss that diverged: numerics.md 4.4, 26."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How the loss went.

    Args:
        state: ``"constant"``: no better than the best constant prediction; ``"flat"``: as at the start.
        start: Median loss of the first tenth.
        end: Median loss of the last quarter.
        noise: Spread of the losses at the end, robust.
        baseline: Loss of the best constant prediction at the place that came nearest to it.
        best: Loss at that place.
    """

    state: State
    start: float = 0.0
    end: float = 0.0
    noise: float = 0.0
    baseline: float | None = None
    best: float | None = None

    @property
    def failing(self) -> bool:
        """Return whether the run gets nowhere."""
        return self.state in ("flat", "constant", "diverged")

    @property
    def poor(self) -> bool:
        """Return whether little was learnt: at least 85 % of the best constant's loss is left."""
        known = self.best is not None and self.baseline is not None
        return self.failing or (known and (self.best or 0.0) > 0.85 * (self.baseline or 0.0))

    def evidence(self) -> dict[str, Any]:
        """Return the numbers that it rests on."""
        numbers = {"start": self.start, "end": self.end, "noise": self.noise, "best_constant": self.baseline}
        return {key: value for key, value in numbers.items() if value is not None}


def middle(values: Sequence[float]) -> float:
    """Return the median."""
    return sorted(values)[len(values) // 2]


def main_losses(facts: Facts) -> list[list[float]]:
    """Return the pairs of step and loss of the one loss that drives the run, empty if there is no such."""
    if facts.get("objective", "minimize") != "minimize":
        return []
    found = [optimizer["losses"] for _, optimizer in each(facts, "optimizers") if optimizer.get("losses")]
    return found[0] if found and all(other == found[0] for other in found) else []


def progress_of(facts: Facts) -> Progress:
    """Return how the run goes."""
    points = main_losses(facts)
    if len(points) < _FEWEST:
        return Progress(state="unknown")
    losses = [loss for _, loss in points]
    return _judged(losses, _nearest_constant(facts))


def _judged(losses: list[float], constant: tuple[str, float, float] | None) -> Progress:
    head, tail = losses[: max(5, len(losses) // 10)], losses[-max(10, len(losses) // 4) :]
    start, end = middle(head), middle(tail)
    noise = 1.4826 * middle([abs(loss - end) for loss in tail])
    made = functools.partial(Progress, start=start, end=end, noise=noise)
    if constant is not None:
        made = functools.partial(made, baseline=constant[1], best=constant[2])
    if start > 0 and end > _DIVERGED * start and end - start > 2 * noise:
        return made(state="diverged")
    if constant is not None:
        share = _CONSTANT.get(constant[0].removesuffix("_with_logits"), _CONSTANT_REGRESSION)
        slowly = constant[2] < 0.995 * constant[1] and _still_falls(losses, noise)
        beaten = constant[2] < share * constant[1] or slowly
        return made(state="learning" if beaten else "constant")
    still = abs(start - end) < max(0.02 * abs(start), 0.5 * noise)
    return made(state="flat" if still else "learning")


def _still_falls(losses: list[float], noise: float) -> bool:
    """Return whether the loss of a slow starter fell over its last half, beyond the error of a mean."""
    half = losses[len(losses) // 2 :]
    size = len(half) // 2
    before, after = sum(half[:size]) / size, sum(half[-size:]) / size
    return before - after > noise / math.sqrt(size)


def _nearest_constant(facts: Facts) -> tuple[str, float, float] | None:
    """Return function, constant's loss and loss of the place that did best against its constant."""
    best: tuple[str, float, float] | None = None
    for _, site in each(facts, "losses"):
        values, baseline = site.get("values", ()), site.get("baseline")
        if baseline is None or baseline <= 1e-6 or len(values) < _FEWEST:
            continue
        end = middle(values[-max(10, len(values) // 4) :])
        if best is None or end / baseline < best[2] / best[1]:
            best = site["function"], baseline, end
    return best
