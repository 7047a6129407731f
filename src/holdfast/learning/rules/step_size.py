"""Windows on the size of steps: a learning rate that is too high or too low, and weight decay."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.learning.finding import Finding
from holdfast.learning.measures import median
from holdfast.learning.observations import Observations
from holdfast.learning.progress import Progress, driving_losses, measure_progress
from holdfast.learning.rules.registry import Rule, rule

# Length of a step relative to the weights above which training seldom survives: TheDeepChecker's
# upper limit.
LARGE_STEP = 0.1
# The same where NaN or Inf came of it.
DESTRUCTIVE_STEP = 1.0
# A loss that reaches this multiple of the first one, in the first steps, has blown up.
BLOWN_UP = 10
EARLY_LOSSES = 30
# Share of the best constant's loss below which a run has recovered from that.
RECOVERED = 0.3
# Loss relative to the best constant's, above which it is worse and not just equal up to noise.
WORSE_THAN_CONSTANT = 1.02
# Steps before a learning rate can be called too low.
FEWEST_STEPS = 100
# Share of the weights' length that all steps together have to be able to cover. This is an upper
# bound of what they do cover, since few steps go in one direction.
SHORTEST_PATH = 1e-2
# Share of the weights that decay takes away in one step.
LARGE_DECAY = 0.02
# Share of their first size to which decay has shrunk the weights.
SHRUNKEN = 0.2


@rule("H825", tier="window", severity="advice", kind="cause", confidence=0.8)
def learning_rate_too_high(run: Observations, rule: Rule) -> Iterator[Finding]:
    """Steps were so large that the loss blew up."""
    steps = [
        layer.largest_ratio
        for layer in run.layers.values()
        if layer.dims > 1 and layer.largest_ratio is not None
    ]
    largest = median(steps) if steps else 0.0
    if largest <= LARGE_STEP:
        return
    bad_data = any(inputs.nonfinite for inputs in run.inputs.values())
    destroyed = run.had_nonfinite and largest > DESTRUCTIVE_STEP and not bad_data
    if destroyed or has_blown_up(run, measure_progress(run)):
        yield rule.finding(
            f"in the first steps the weights moved by up to {largest:.2g} of their length at once,"
            " and the loss blew up",
            "lower the learning rate, by a factor of 10 at first; a momentum near 1 multiplies it"
            " too.",
        )


def has_blown_up(run: Observations, progress: Progress) -> bool:
    """Return whether the loss rose far, and has not recovered."""
    if progress.state == "diverged" or is_worse_than_constant(progress):
        return True
    early = driving_losses(run)[:EARLY_LOSSES]
    if len(early) < EARLY_LOSSES or early[0] <= 0 or max(early) <= BLOWN_UP * early[0]:
        return False
    if progress.baseline is None or progress.best is None:
        return True
    return progress.best >= RECOVERED * progress.baseline


def is_worse_than_constant(progress: Progress) -> bool:
    """Return whether the loss is above that of the best constant prediction.

    A model that cannot learn a task predicts the constant; one that is thrown about does worse.
    """
    if progress.baseline is None or progress.best is None:
        return False
    return progress.best > WORSE_THAN_CONSTANT * progress.baseline


@rule("H824", tier="window", severity="advice", kind="cause", confidence=0.8)
def learning_rate_too_low(run: Observations, rule: Rule) -> Iterator[Finding]:
    """All steps together cannot move the weights far enough to learn anything."""
    if run.steps < FEWEST_STEPS or measure_progress(run).state not in ("flat", "constant"):
        return
    if not all_matrices_have_gradients(run):
        return  # a small gradient has another cause than the learning rate
    step = longest_step(run)
    if step is None or all(optimizer.largest_lr == 0 for optimizer in run.optimizers.values()):
        return
    planned = max(run.total_steps or 0, run.steps)
    path = step * planned
    if path < SHORTEST_PATH:
        yield rule.finding(
            f"all {planned} steps together can move the weights by at most {path:.1e} of their"
            " length",
            "raise the learning rate, by a factor of 10 to 100; look for a clipping limit or a"
            " scheduler that makes it tiny.",
        )


def longest_step(run: Observations) -> float | None:
    """Return the longest step of any matrix relative to its length, None if none is known."""
    ratios = [
        ratio
        for layer in run.layers.values()
        if layer.dims > 1
        for ratio in (layer.ratio, layer.largest_ratio)
        if ratio is not None
    ]
    return max(ratios, default=None)


def all_matrices_have_gradients(run: Observations) -> bool:
    """Return whether every matrix mostly has a gradient that is not exactly 0."""
    return all(
        layer.zero_gradient <= 0.5 * layer.with_gradient
        for layer in run.layers.values()
        if layer.dims > 1
    )


@rule("H858", tier="window", severity="advice", kind="cause", confidence=0.85)
def weights_decay_away(run: Observations, rule: Rule) -> Iterator[Finding]:
    """Weight decay takes away the weights faster than they learn."""
    remaining = remaining_share(run)
    for name, optimizer in run.optimizers.items():
        decay = optimizer.weight_decay
        # Share that one step takes away. Adam without W divides it by the gradient's size, so there
        # it says nothing.
        taken = decay * optimizer.largest_lr if optimizer.kind in ("AdamW", "SGD") else 0.0
        shrunken = decay > 0 and remaining < SHRUNKEN
        if taken > LARGE_DECAY or (shrunken and measure_progress(run).is_poor):
            yield rule.finding(
                f"a weight decay of {decay:g} takes {taken:.1%} of the weights in each step; it has"
                f" shrunk them to {remaining:.0%} of their initial size",
                "use a weight decay of 0.0001 to 0.1.",
                name,
            )


def remaining_share(run: Observations) -> float:
    """Return the usual size of a matrix relative to its first one."""
    shares = [
        layer.last_weight_rms / layer.first_weight_rms
        for layer in run.layers.values()
        if layer.dims > 1 and layer.first_weight_rms and layer.last_weight_rms is not None
    ]
    return median(shares) if shares else 1.0
