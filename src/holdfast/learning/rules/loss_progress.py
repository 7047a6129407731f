"""`LossProgress`: determine from a run's losses whether the run makes progress.

The level of a loss is meaningful only if the objective is to minimize one loss. Otherwise, the
progress is ``"unknown"``. Rules that only compare a measurement with a threshold produce false
alarms: in a test on 23 healthy runs, all but one of the published thresholds did. Many rules
therefore report a cause only if the run makes no progress.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.learning.measures import median
from holdfast.learning.observations import Observations, ObservedLoss

ProgressState = Literal["unknown", "learning", "flat", "constant", "diverged"]

# Minimum number of losses for evaluating a run.
MIN_LOSSES = 24
# A run has learned nothing from its inputs if its loss is at least this share of the best constant
# prediction's loss. For regression, 0.9 of the variance has been proposed, but on tasks with little
# to learn, healthy runs reach only 0.95.
NO_BETTER_THAN_CONSTANT = 0.97
# The corresponding threshold for a run whose loss is still falling.
NO_BETTER_ALTHOUGH_FALLING = 0.995
# A run has learned little if its loss is at least this share of the best constant prediction's
# loss.
LITTLE_LEARNT = 0.85
# A run has diverged if its loss at the end is more than this multiple of the loss at the start.
DIVERGED_RATIO = 1.5
# A loss is flat if it changes by less than this share of its initial value.
FLAT_CHANGE = 0.02
# For a normal distribution, the standard deviation divided by the median absolute deviation.
DEVIATION_OF_NORMAL = 1.4826
# Minimum significant gain over the best constant prediction: as a share of the constant's loss, and
# as a multiple of the gain's standard error.
MIN_GAIN = 0.005
GAIN_IN_ERRORS = 3
# Minimum number of gains for estimating their standard error.
MIN_GAINS = 10
# If the loss of the best constant prediction is lower than this, there is nothing to learn.
MIN_BASELINE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class LossProgress:
    """The development of a run's loss, from start to end.

    Args:
        state: ``"constant"`` means that the loss is no better than that of the best constant
            prediction. ``"flat"`` means that the best constant is unknown and the loss is no better
            than at the start.
        start: Median of the first tenth of the losses.
        end: Median of the last quarter of the losses.
        baseline: Loss of the best constant prediction, at the loss site where the model beats it
            most clearly.
        best: The model's loss at that site.
    """

    state: ProgressState
    start: float = 0.0
    end: float = 0.0
    baseline: float | None = None
    best: float | None = None

    @property
    def is_failing(self) -> bool:
        """Whether the run makes no progress."""
        return self.state in ("flat", "constant", "diverged")

    @property
    def is_poor(self) -> bool:
        """Whether the run makes no progress or has learned little."""
        if self.is_failing:
            return True
        if self.best is None or self.baseline is None:
            return False
        return self.best > LITTLE_LEARNT * self.baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainstConstant:
    """The model's loss at a loss site, and the loss of the best constant prediction there."""

    loss: float
    baseline: float


def measure_progress(run: Observations) -> LossProgress:
    """Determine from the losses of a run whether it makes progress."""
    losses = driving_losses(run)
    if len(losses) < MIN_LOSSES:
        return LossProgress(state="unknown")
    tail = newest_quarter(losses)
    start = median(losses[: max(5, len(losses) // 10)])
    end = median(tail)
    # A robust estimate of the losses' standard deviation at the end. Outliers do not affect it.
    noise = DEVIATION_OF_NORMAL * median([abs(loss - end) for loss in tail])
    has_diverged = start > 0 and end > DIVERGED_RATIO * start and end - start > 2 * noise
    is_flat = abs(start - end) < max(FLAT_CHANGE * abs(start), 0.5 * noise)
    against = best_against_constant(run)

    state: ProgressState = "learning"
    if has_diverged:
        state = "diverged"
    elif against is None and is_flat:
        state = "flat"
    elif against is not None and not has_learnt(run, against, losses, noise):
        state = "constant"
    if against is None:
        return LossProgress(state=state, start=start, end=end)
    return LossProgress(
        state=state, start=start, end=end, baseline=against.baseline, best=against.loss
    )


def driving_losses(run: Observations) -> list[float]:
    """Return the losses that all optimizers share; empty if they do not share any."""
    histories = [optimizer.losses for optimizer in run.optimizers.values() if optimizer.losses]
    if run.objective != "minimize" or not histories:
        return []
    # Optimizers that minimize the same loss have equal histories. Adversaries have different ones.
    if any(history != histories[0] for history in histories):
        return []
    return [loss for _, loss in histories[0]]


def newest_quarter(values: Sequence[float]) -> Sequence[float]:
    """Return the last quarter of the values, or the last ten if that is more."""
    return values[-max(10, len(values) // 4) :]


def best_against_constant(run: Observations) -> AgainstConstant | None:
    """Return the losses at the site where the model beats the constant most clearly, or None."""
    sites = [
        AgainstConstant(loss=median(newest_quarter(loss.values)), baseline=loss.baseline)
        for loss in run.losses.values()
        if loss.baseline is not None
        and loss.baseline > MIN_BASELINE
        and len(loss.values) >= MIN_LOSSES
    ]
    return min(sites, key=lambda site: site.loss / site.baseline, default=None)


def has_learnt(
    run: Observations, against: AgainstConstant, losses: list[float], noise: float
) -> bool:
    """Return whether the model beats the best constant prediction by a significant margin."""
    if against.loss < NO_BETTER_THAN_CONSTANT * against.baseline:
        return True
    if against.loss < NO_BETTER_ALTHOUGH_FALLING * against.baseline and still_falls(losses, noise):
        return True
    min_gain = MIN_GAIN * against.baseline
    return any(gains_over_constant(loss, min_gain) for loss in run.losses.values())


def still_falls(losses: list[float], noise: float) -> bool:
    """Return whether the loss fell by more than its standard error in the last half of the run."""
    last_half = losses[len(losses) // 2 :]
    size = len(last_half) // 2
    before = statistics.fmean(last_half[:size])
    after = statistics.fmean(last_half[-size:])
    return before - after > noise / math.sqrt(size)


def gains_over_constant(loss: ObservedLoss, min_gain: float) -> bool:
    """Return whether the model beats the best constant prediction in the last half of the run.

    Both losses are compared on the same batches.

    Args:
        loss: The observations of one loss site.
        min_gain: The smallest mean gain that is significant.
    """
    last_half = loss.gains[len(loss.gains) // 2 :]
    if len(last_half) < MIN_GAINS:
        return False
    standard_error = statistics.stdev(last_half) / math.sqrt(len(last_half))
    return statistics.fmean(last_half) > max(min_gain, GAIN_IN_ERRORS * standard_error)
