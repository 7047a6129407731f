"""Rules about learning-rate schedules: out of step, fed with batch losses, or over too early."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.learning.finding import Finding
from holdfast.learning.observations import Observations, ObservedOptimizer, ObservedScheduler
from holdfast.learning.rules.registry import Rule, rule

# Steps before the habits of a schedule are known.
FEWEST_STEPS = 20
# Steps of a run whose schedule as a whole is judged.
FEWEST_STEPS_OF_A_RUN = 50
# Share of the planned steps after which a learning rate of 0 is meant.
MEANT_END = 0.9
# Steps in a row with a learning rate of 0 before that.
STEPS_WITHOUT_RATE = 10
# Share of all steps, up to the end of a run, that were lost: with no learning rate, and with less
# than a thousandth of it.
LOST_WITHOUT_RATE = 0.15
LOST_WITH_LOW_RATE = 0.5
# The same share where the scheduler's period explains it.
FADED = 0.2
# Periods that a scheduler passes through in every step of a run before its unit is wrong.
MOST_PERIODS = 3
# Steps of an optimizer before which a scheduler was advanced once.
FEWEST_ADVANCES = 3


@rule("H819", tier="contract", severity="advice", kind="cause", confidence=0.85)
def learning_rate_gone(run: Observations, rule: Rule) -> Iterator[Finding]:
    """The learning rate falls to practically 0 long before the end."""
    for name, optimizer in run.optimizers.items():
        if not (_is_gone_early(run, optimizer) or _was_gone_at_end(run, optimizer)):
            continue
        lost = max(optimizer.zero_lr_steps, optimizer.low_lr_steps)
        yield rule.finding(
            f"the learning rate fell to {optimizer.lr:.2g} of {optimizer.largest_lr:.2g} and stayed"
            f" there for {lost} of {optimizer.steps} steps",
            "set the schedule's length to the full run, in the unit in which the scheduler is"
            " stepped (steps or epochs).",
            name,
        )


def _is_gone_early(run: Observations, optimizer: ObservedOptimizer) -> bool:
    if run.total_steps is None or optimizer.steps >= MEANT_END * run.total_steps:
        return False
    return optimizer.zero_lr_steps >= STEPS_WITHOUT_RATE


def _was_gone_at_end(run: Observations, optimizer: ObservedOptimizer) -> bool:
    """Return whether much of a run was lost, which only its end shows without a planned length."""
    steps = optimizer.steps
    if not run.ended or steps < FEWEST_STEPS_OF_A_RUN:
        return False
    return (
        optimizer.zero_lr_steps > LOST_WITHOUT_RATE * steps
        or optimizer.low_lr_steps > LOST_WITH_LOW_RATE * steps
    )


@rule("H820", tier="contract", severity="advice", kind="cause", confidence=0.8)
def scheduler_out_of_step(run: Observations, rule: Rule) -> Iterator[Finding]:
    """A scheduler is advanced at the wrong times."""
    for name, scheduler in run.schedulers.items():
        if scheduler.kind == "ReduceLROnPlateau":
            continue  # H854
        fault = find_scheduler_fault(run, scheduler)
        if fault is not None:
            yield rule.finding(
                f"the {scheduler.kind} is out of step: {fault}",
                "call scheduler.step() after optimizer.step(), once for each unit that its"
                " arguments count.",
                name,
            )


def find_scheduler_fault(run: Observations, scheduler: ObservedScheduler) -> str | None:
    """Return what is wrong with the times at which a scheduler is advanced."""
    if scheduler.before_first > 0 and scheduler.advanced_once >= FEWEST_ADVANCES:
        return (
            "it is advanced before the first optimizer step, so the first learning rate is never"
            " used"
        )
    steps = scheduler.optimizer_steps
    if steps >= FEWEST_STEPS and scheduler.advanced_several > 0.5 * steps:
        return "it is advanced several times for each optimizer step"
    # The learning rate of a cosine comes back, so it does not show in the rates.
    lost_rate = scheduler.kind == "CosineAnnealingLR" or _has_faded(run)
    if lost_rate and _passes_many_periods(scheduler):
        return (
            f"it is advanced in every step, {scheduler.advanced} times, although its period is"
            f" {scheduler.period}"
        )
    return None


def _passes_many_periods(scheduler: ObservedScheduler) -> bool:
    """Return whether a scheduler is advanced in every step with a period meant for epochs."""
    steps = scheduler.optimizer_steps
    if steps < FEWEST_STEPS_OF_A_RUN or scheduler.advanced_once <= 0.5 * steps:
        return False
    return scheduler.period is not None and scheduler.advanced > MOST_PERIODS * scheduler.period


def _has_faded(run: Observations) -> bool:
    return any(
        optimizer.low_lr_steps > FADED * optimizer.steps for optimizer in run.optimizers.values()
    )


@rule("H854", tier="contract", severity="advice", kind="cause", confidence=0.9)
def plateau_on_batch_losses(run: Observations, rule: Rule) -> Iterator[Finding]:
    """ReduceLROnPlateau is given the loss of each batch."""
    for name, scheduler in run.schedulers.items():
        advanced = scheduler.advanced_once + scheduler.advanced_several
        if scheduler.kind != "ReduceLROnPlateau" or advanced < FEWEST_STEPS:
            continue
        if advanced > 0.5 * scheduler.optimizer_steps:
            yield rule.finding(
                f"ReduceLROnPlateau (patience {scheduler.patience}) was given a batch's loss"
                f" {advanced} times; its noise looks like a plateau",
                "give it a validation loss, or the mean over an epoch, once per epoch.",
                name,
            )
