"""Rules about learning rate schedules that are stepped at the wrong times or end too early."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.learning.finding import Finding
from holdfast.learning.observations import Observations, ObservedOptimizer, ObservedScheduler
from holdfast.learning.rules.registry import LearningRule, rule

# Minimum number of steps for evaluating how a scheduler is stepped.
MIN_STEPS = 20
# Minimum number of steps in a run for evaluating the schedule as a whole.
MIN_STEPS_OF_A_RUN = 50
# After this share of the planned steps, a learning rate of 0 is considered intended.
INTENDED_END = 0.9
# Before that point, this many consecutive steps with a learning rate of 0 are too many.
STEPS_WITHOUT_RATE = 10
# Maximum share of a run's steps, at its end, that may have a learning rate of 0. The second limit
# is for a low rate (below a thousandth of the largest rate).
LOST_WITHOUT_RATE = 0.15
LOST_WITH_LOW_RATE = 0.5
# The corresponding limit for a low rate that is explained by the scheduler's period.
LOST_BY_PERIOD = 0.2
# A scheduler that completes more than this many periods in a run is stepped in the wrong unit.
MAX_PERIODS = 3
# After this many optimizer steps with exactly one scheduler step each, the scheduler is known to be
# stepped once per optimizer step.
MIN_ADVANCES = 3


@rule("H819", tier="contract", severity="advice", kind="cause", confidence=0.85)
def learning_rate_gone(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a learning rate that falls to practically 0 long before the end of the run."""
    for name, optimizer in run.optimizers.items():
        if not (_is_gone_early(run, optimizer) or _was_gone_at_end(run, optimizer)):
            continue
        lost = max(optimizer.zero_lr_steps, optimizer.low_lr_steps)
        yield rule.finding(
            f"the learning rate fell from {optimizer.largest_lr:.2g} to {optimizer.lr:.2g} and"
            f" stayed low for {lost} of {optimizer.steps} steps",
            "set the schedule's length to the full run, in the unit in which the scheduler is"
            " stepped (steps or epochs).",
            name,
        )


def _is_gone_early(run: Observations, optimizer: ObservedOptimizer) -> bool:
    """Return whether the learning rate is 0 long before the planned end of the run."""
    if run.total_steps is None or optimizer.steps >= INTENDED_END * run.total_steps:
        return False
    return optimizer.zero_lr_steps >= STEPS_WITHOUT_RATE


def _was_gone_at_end(run: Observations, optimizer: ObservedOptimizer) -> bool:
    """Return whether a run that has ended spent a large share of its steps at a rate near 0."""
    steps = optimizer.steps
    if not run.ended or steps < MIN_STEPS_OF_A_RUN:
        return False
    return (
        optimizer.zero_lr_steps > LOST_WITHOUT_RATE * steps
        or optimizer.low_lr_steps > LOST_WITH_LOW_RATE * steps
    )


@rule("H820", tier="contract", severity="advice", kind="cause", confidence=0.8)
def scheduler_out_of_step(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a scheduler that is stepped at the wrong times."""
    for name, scheduler in run.schedulers.items():
        if scheduler.kind == "ReduceLROnPlateau":
            # H854 covers ReduceLROnPlateau.
            continue
        fault = find_scheduler_fault(run, scheduler)
        if fault is not None:
            yield rule.finding(
                f"the {scheduler.kind} is stepped at the wrong times: {fault}",
                "call scheduler.step() after optimizer.step(), once per step or once per epoch,"
                " depending on the unit of the scheduler's arguments.",
                name,
            )


def find_scheduler_fault(run: Observations, scheduler: ObservedScheduler) -> str | None:
    """Return how a scheduler is stepped at the wrong times; None if its times seem right."""
    if scheduler.before_first > 0 and scheduler.advanced_once >= MIN_ADVANCES:
        return (
            "it is stepped before the first optimizer step, so the first learning rate is never"
            " used"
        )
    steps = scheduler.optimizer_steps
    if steps >= MIN_STEPS and scheduler.advanced_several > 0.5 * steps:
        return "it is stepped several times per optimizer step"
    # After its period, a cosine schedule rises again. A period that is too short is therefore not
    # visible as a low learning rate.
    lost_rate = scheduler.kind == "CosineAnnealingLR" or _has_faded(run)
    if lost_rate and _passes_many_periods(scheduler):
        return (
            f"it is stepped once per optimizer step, {scheduler.advanced} times, although its"
            f" period is {scheduler.period}"
        )
    return None


def _passes_many_periods(scheduler: ObservedScheduler) -> bool:
    """Return whether a scheduler is stepped once per step, but its period is meant for epochs."""
    steps = scheduler.optimizer_steps
    if steps < MIN_STEPS_OF_A_RUN or scheduler.advanced_once <= 0.5 * steps:
        return False
    return scheduler.period is not None and scheduler.advanced > MAX_PERIODS * scheduler.period


def _has_faded(run: Observations) -> bool:
    """Return whether an optimizer spent a large share of its steps at a low learning rate."""
    return any(
        optimizer.low_lr_steps > LOST_BY_PERIOD * optimizer.steps
        for optimizer in run.optimizers.values()
    )


@rule("H854", tier="contract", severity="advice", kind="cause", confidence=0.9)
def plateau_on_batch_losses(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a ReduceLROnPlateau scheduler that receives the loss of each batch."""
    for name, scheduler in run.schedulers.items():
        advanced = scheduler.advanced_once + scheduler.advanced_several
        if scheduler.kind != "ReduceLROnPlateau" or advanced < MIN_STEPS:
            continue
        if advanced > 0.5 * scheduler.optimizer_steps:
            yield rule.finding(
                f"ReduceLROnPlateau (patience {scheduler.patience}) was stepped {advanced} times"
                " with the loss of a single batch, whose noise looks like a plateau",
                "step it once per epoch, with a validation loss or the mean loss of the epoch.",
                name,
            )
