"""`Progress`: whether a run gets anywhere, read from its losses.

The level of a loss means something only where the objective is to minimise one loss; otherwise the
answer is ``"unknown"``. A threshold alone fires on healthy runs (of the published ones all but one
did, on 23), so rules name a cause only where the run gets nowhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.learning.measures import median
from holdfast.learning.observations import Observations, ObservedLoss

State = Literal["unknown", "learning", "flat", "constant", "diverged"]

# Losses before anything is said about a run.
FEWEST_LOSSES = 24
# A loss at this share of the best constant's, or above, has learnt nothing from the inputs. 0.9 of
# the variance has been proposed; regressions with little to learn are healthy at 0.95, so 0.97.
NO_BETTER_THAN_CONSTANT = 0.97
# The same for a run whose loss still falls.
NO_BETTER_ALTHOUGH_FALLING = 0.995
# Share of the best constant's loss that is left of a run that has learnt little.
LITTLE_LEARNT = 0.85
# Loss at the end, relative to the start, of a run that has diverged.
DIVERGED_RATIO = 1.5
# Change of the loss, relative to the start, below which it is flat.
FLAT_CHANGE = 0.02
# Turns a median absolute deviation into the standard deviation of a normal distribution.
DEVIATION_OF_NORMAL = 1.4826
# Gain over the constant, in its loss, that counts as one; and in errors of the mean.
FEWEST_GAIN = 0.005
GAIN_IN_ERRORS = 3
# Gains before their error is known.
FEWEST_GAINS = 10
# A baseline below this is a task without anything to learn.
SMALLEST_BASELINE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How the loss developed.

    Args:
        state: ``"constant"``: no better than the best constant prediction. ``"flat"``: no better
            than at the start, where that constant is unknown.
        start: Median loss of the first tenth.
        end: Median loss of the last quarter.
        baseline: Loss of the best constant prediction, at the call that did best against it.
        best: Loss at that call.
    """

    state: State
    start: float = 0.0
    end: float = 0.0
    baseline: float | None = None
    best: float | None = None

    @property
    def is_failing(self) -> bool:
        """Whether the run gets nowhere."""
        return self.state in ("flat", "constant", "diverged")

    @property
    def is_poor(self) -> bool:
        """Whether the run gets nowhere, or little was learnt."""
        if self.is_failing:
            return True
        if self.best is None or self.baseline is None:
            return False
        return self.best > LITTLE_LEARNT * self.baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainstConstant:
    """The loss of one call beside that of the best constant prediction."""

    loss: float
    baseline: float


def measure_progress(run: Observations) -> Progress:
    """Return how the run develops."""
    losses = driving_losses(run)
    if len(losses) < FEWEST_LOSSES:
        return Progress(state="unknown")
    tail = newest_quarter(losses)
    start = median(losses[: max(5, len(losses) // 10)])
    end = median(tail)
    # Standard deviation of the loss at the end, which single outliers do not change.
    noise = DEVIATION_OF_NORMAL * median([abs(loss - end) for loss in tail])
    diverged = start > 0 and end > DIVERGED_RATIO * start and end - start > 2 * noise
    state: State = "diverged" if diverged else "learning"

    against = best_against_constant(run)
    if against is None:
        is_flat = abs(start - end) < max(FLAT_CHANGE * abs(start), 0.5 * noise)
        if is_flat and not diverged:
            state = "flat"
        return Progress(state=state, start=start, end=end)
    if not diverged and not has_learnt(run, against, losses, noise):
        state = "constant"
    return Progress(state=state, start=start, end=end, baseline=against.baseline, best=against.loss)


def driving_losses(run: Observations) -> list[float]:
    """Return the values of the one loss that drives the run, empty if there is no such loss."""
    histories = [optimizer.losses for optimizer in run.optimizers.values() if optimizer.losses]
    if run.objective != "minimize" or not histories:
        return []
    # Optimizers that share one loss have the same history; players have losses of their own.
    if any(history != histories[0] for history in histories):
        return []
    return [loss for _, loss in histories[0]]


def newest_quarter(values: Sequence[float]) -> Sequence[float]:
    """Return the last quarter, but at least ten values."""
    return values[-max(10, len(values) // 4) :]


def best_against_constant(run: Observations) -> AgainstConstant | None:
    """Return the call that did best against its constant, None if no constant is known."""
    calls = [
        AgainstConstant(loss=median(newest_quarter(loss.values)), baseline=loss.baseline)
        for loss in run.losses.values()
        if loss.baseline is not None
        and loss.baseline > SMALLEST_BASELINE
        and len(loss.values) >= FEWEST_LOSSES
    ]
    return min(calls, key=lambda call: call.loss / call.baseline, default=None)


def has_learnt(
    run: Observations, against: AgainstConstant, losses: list[float], noise: float
) -> bool:
    """Return whether a model does better than the best constant prediction."""
    if against.loss < NO_BETTER_THAN_CONSTANT * against.baseline:
        return True
    if against.loss < NO_BETTER_ALTHOUGH_FALLING * against.baseline and still_falls(losses, noise):
        return True
    least = FEWEST_GAIN * against.baseline
    return any(gains_over_constant(loss, least) for loss in run.losses.values())


def still_falls(losses: list[float], noise: float) -> bool:
    """Return whether the loss fell over its last half, by more than the error of a mean."""
    half = losses[len(losses) // 2 :]
    size = len(half) // 2
    before = statistics.fmean(half[:size])
    after = statistics.fmean(half[-size:])
    return before - after > noise / math.sqrt(size)


def gains_over_constant(loss: ObservedLoss, least: float) -> bool:
    """Return whether the last half of the losses lies below the constant's on the same batches."""
    late = loss.gains[len(loss.gains) // 2 :]
    if len(late) < FEWEST_GAINS:
        return False
    error = statistics.stdev(late) / math.sqrt(len(late))
    return statistics.fmean(late) > max(least, GAIN_IN_ERRORS * error)
