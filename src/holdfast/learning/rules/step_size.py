"""Window rules about learning rates that are too high or too low, and about weight decay."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.learning.finding import Finding
from holdfast.learning.measures import median
from holdfast.learning.observations import Observations
from holdfast.learning.rules.loss_progress import LossProgress, driving_losses, measure_progress
from holdfast.learning.rules.registry import LearningRule, rule

# A run rarely recovers from an update larger than this, relative to the weights. This is the upper
# limit used by TheDeepChecker.
LARGE_STEP = 0.1
# An update larger than this, relative to the weights, explains NaN or Inf.
DESTRUCTIVE_STEP = 1.0
# A loss has blown up if it exceeds this multiple of its first value within the first losses.
BLOWN_UP = 10
EARLY_LOSSES = 30
# A run whose loss has blown up has recovered if its loss is below this share of the best constant
# prediction's loss.
RECOVERED = 0.3
# A loss is worse than the best constant prediction if it exceeds this multiple of the constant's
# loss. Smaller differences may be noise.
WORSE_THAN_CONSTANT = 1.02
# Minimum number of steps before reporting that a learning rate is too low.
MIN_STEPS = 100
# A learning rate is too low if all steps together cannot change the weights by this share of their
# norm. The sum of all steps is an upper bound, because steps rarely point in the same direction.
MIN_PATH = 1e-2
# Weight decay is suspicious if it removes more than this share of the weights per step.
LARGE_DECAY = 0.02
# Weight decay has destroyed the weights if they have shrunk below this share of their initial size.
SHRUNKEN = 0.2


@rule("H825", tier="window", severity="advice", kind="cause", confidence=0.8)
def learning_rate_too_high(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report updates that were so large that the loss blew up."""
    # The largest early update of each matrix, relative to the norm of the matrix.
    update_ratios = [
        layer.largest_ratio
        for layer in run.layers.values()
        if layer.dims > 1 and layer.largest_ratio is not None
    ]
    largest = median(update_ratios) if update_ratios else 0.0
    if largest <= LARGE_STEP:
        return
    has_bad_data = any(inputs.nonfinite for inputs in run.inputs.values())
    destroyed = run.had_nonfinite and largest > DESTRUCTIVE_STEP and not has_bad_data
    if destroyed or has_blown_up(run, measure_progress(run)):
        yield rule.finding(
            f"in the first steps, single updates changed the weights by up to {largest:.2g} of"
            " their norm, and the loss blew up",
            "lower the learning rate, first by a factor of 10. A momentum close to 1 also increases"
            " the updates.",
        )


def has_blown_up(run: Observations, progress: LossProgress) -> bool:
    """Return whether the loss rose by a large factor and has not recovered."""
    if progress.state == "diverged" or is_worse_than_constant(progress):
        return True
    early = driving_losses(run)[:EARLY_LOSSES]
    if len(early) < EARLY_LOSSES or early[0] <= 0 or max(early) <= BLOWN_UP * early[0]:
        return False
    if progress.baseline is None or progress.best is None:
        return True
    return progress.best >= RECOVERED * progress.baseline


def is_worse_than_constant(progress: LossProgress) -> bool:
    """Return whether the loss is clearly higher than that of the best constant prediction.

    A model that cannot learn a task ends up predicting the best constant. A model does even worse
    only if its updates are too large.
    """
    if progress.baseline is None or progress.best is None:
        return False
    return progress.best > WORSE_THAN_CONSTANT * progress.baseline


@rule("H824", tier="window", severity="advice", kind="cause", confidence=0.8)
def learning_rate_too_low(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report steps so small that even all of them together cannot change the weights enough."""
    if run.steps < MIN_STEPS or measure_progress(run).state not in ("flat", "constant"):
        return
    if not all_matrices_have_gradients(run):
        # If gradients are missing, they are the cause, and not the learning rate.
        return
    step = longest_step(run)
    if step is None or all(optimizer.largest_lr == 0 for optimizer in run.optimizers.values()):
        return
    planned = max(run.total_steps or 0, run.steps)
    path = step * planned
    if path < MIN_PATH:
        yield rule.finding(
            f"all {planned} steps together can change the weights by at most {path:.1e} of their"
            " norm",
            "raise the learning rate by a factor of 10 to 100, and look for a clipping limit or a"
            " scheduler that makes updates tiny.",
        )


def longest_step(run: Observations) -> float | None:
    """Return the largest update of any matrix relative to the matrix's norm, or None if unknown."""
    ratios = [
        ratio
        for layer in run.layers.values()
        if layer.dims > 1
        for ratio in (layer.ratio, layer.largest_ratio)
        if ratio is not None
    ]
    return max(ratios, default=None)


def all_matrices_have_gradients(run: Observations) -> bool:
    """Return whether at least half of each matrix's gradients are not exactly 0."""
    return all(
        layer.zero_gradient <= 0.5 * layer.with_gradient
        for layer in run.layers.values()
        if layer.dims > 1
    )


@rule("H858", tier="window", severity="advice", kind="cause", confidence=0.85)
def weights_decay_away(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a weight decay that shrinks the weights faster than they learn."""
    remaining = remaining_share(run)
    for name, optimizer in run.optimizers.items():
        decay = optimizer.weight_decay
        # The share of the weights that the decay removes per step. It is unknown for Adam, which
        # divides the decay term by the size of the gradient as well.
        taken = 0.0
        if optimizer.kind in ("AdamW", "SGD"):
            taken = decay * optimizer.largest_lr
        shrunken = decay > 0 and remaining < SHRUNKEN
        if taken > LARGE_DECAY or (shrunken and measure_progress(run).is_poor):
            yield rule.finding(
                f"a weight decay of {decay:g} removes {taken:.1%} of the weights per step and has"
                f" shrunk them to {remaining:.0%} of their initial size",
                "use a weight decay of 0.0001 to 0.1.",
                name,
            )


def remaining_share(run: Observations) -> float:
    """Return the median, over all matrices, of a matrix's size relative to its initial size."""
    shares = [
        layer.last_weight_rms / layer.first_weight_rms
        for layer in run.layers.values()
        if layer.dims > 1 and layer.first_weight_rms and layer.last_weight_rms is not None
    ]
    return median(shares) if shares else 1.0
