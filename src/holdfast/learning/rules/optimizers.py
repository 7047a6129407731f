"""Contracts about the loop: gradients that leak, are missing, zero or reversed.

Schedulers out of step.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.learning.facts import Facts, OptimizerFacts, SchedulerFacts
from holdfast.learning.finding import Finding
from holdfast.learning.rules.registry import Say, checks

_IN_A_ROW, _IN_ALL = 10, 6
"""Observed steps in a row before a missing or zero gradient is more than a bad batch; checked ones,
at first."""


def gradient_first(optimizer: OptimizerFacts) -> bool:
    """Return whether a gradient was not finite before any loss was."""
    gradient, loss = optimizer.first_nonfinite_gradient, optimizer.first_nonfinite_loss
    return gradient is not None and (loss is None or gradient < loss)


@checks(
    rule="H802",
    tier="contract",
    severity="error",
    kind="symptom",
    confidence=0.95,
    each="optimizers",
)
def _nonfinite_gradient(
    _: Facts, say: Say, name: str, optimizer: OptimizerFacts
) -> Iterator[Finding]:
    if optimizer.nonfinite_gradients:
        what = f"{optimizer.nonfinite_gradients} observed step(s) used NaN or Inf as a gradient"
        what += (
            f", first in {', '.join(optimizer.nonfinite_names)}"
            if optimizer.nonfinite_names
            else ""
        )
        fix = "skip such steps (holdfast.Guard does), and find the operation that they come from."
        first = gradient_first(optimizer)
        yield say(what, fix, name, severity="error" if first else "note")


@checks(rule="H804", tier="contract", severity="error", kind="symptom", confidence=0.95)
def _nonfinite_weights(facts: Facts, say: Say) -> Iterator[Finding]:
    bad = [name for name, layer in facts.layers.items() if layer.nonfinite]
    bad += [name for model in facts.models.values() for name in model.nonfinite_buffers]
    if bad:
        fix = "go back to the last good checkpoint; what made them is the first of these findings."
        yield say(f"NaN or Inf in {', '.join(bad[:5])}", fix)


@checks(
    rule="H805",
    tier="contract",
    severity="error",
    kind="symptom",
    confidence=0.95,
    each="optimizers",
)
def _nonfinite_optimizer_state(
    _: Facts, say: Say, name: str, optimizer: OptimizerFacts
) -> Iterator[Finding]:
    if optimizer.nonfinite_state:
        what = (
            f"the optimizer's {', '.join(optimizer.nonfinite_state)} holds NaN or Inf, and keeps it"
        )
        fix = "go back to the last good checkpoint, and skip steps whose gradient is not finite."
        yield say(what, fix, name)


@checks(
    rule="H811", tier="contract", severity="error", kind="cause", confidence=0.95, each="optimizers"
)
def _gradients_leak(_: Facts, say: Say, name: str, optimizer: OptimizerFacts) -> Iterator[Finding]:
    # Two in a row could be a deliberate warm-up of gradients; a forgotten zero_grad never stops.
    if optimizer.leaks >= 3 and not optimizer.closure:
        what = (
            f"in {optimizer.leaks} steps in a row gradients were added to those of the step before"
        )
        yield say(what, "call optimizer.zero_grad() before each backward pass of a new step.", name)


@checks(rule="H812", tier="contract", severity="error", kind="cause", confidence=0.9)
def _never_stepped(facts: Facts, say: Say) -> Iterator[Finding]:
    # Until 200 a loop may accumulate by hand; at the end of a run a few are enough, since no step
    # is to come.
    if facts.backwards_since_step < (10 if facts.ended else 200) or not facts.models or facts.steps:
        return
    if any(model.changed for model in facts.models.values()):
        what = (
            f"{facts.backwards} backward passes without optimizer.step(); the weights are moved by"
            " other means"
        )
        yield say(what, "nothing, if the update is your own.", severity="note")
    else:
        what = (
            f"{facts.backwards} backward passes and no optimizer step; the weights are as they were"
        )
        yield say(what, "call optimizer.step() after backward.")


@checks(
    rule="H813", tier="contract", severity="error", kind="cause", confidence=0.9, each="optimizers"
)
def _step_without_gradients(
    _: Facts, say: Say, name: str, optimizer: OptimizerFacts
) -> Iterator[Finding]:
    idle = optimizer.no_gradient_steps
    # One that had gradients before may only be waiting for its phase.
    if idle >= _IN_A_ROW and not (optimizer.closure or optimizer.with_gradient_steps):
        fix = (
            "call backward before step and zero_grad not in between; the loss must depend on these"
            " weights without .detach(), .item() or no_grad."
        )
        yield say(
            f"{idle} steps in a row had no gradient in any tensor of the optimizer", fix, name
        )


@checks(rule="H814", tier="contract", severity="note", kind="cause", confidence=0.4)
def _parameter_without_gradient(facts: Facts, say: Say) -> Iterator[Finding]:
    if any(optimizer.no_gradient_steps >= _IN_A_ROW for optimizer in facts.optimizers.values()):
        return  # nothing gets one: H813
    for name, model in facts.models.items():
        count = model.never_gradient_count
        if not count:
            continue
        share = model.never_gradient_weights / max(1, model.weights)
        named = ", ".join(model.never_gradient)
        what = (
            f"{count} parameter(s), {share:.0%} of the weights, got no gradient in all observed"
            f" steps: {named}"
        )
        fix = (
            "look for .detach(), .item(), argmax, no_grad or a new tensor between them and the"
            " loss; or pass frozen= if they are meant not to learn."
        )
        # An unused expert or head lies beside the path; a path that is cut loses its beginning.
        if model.never_gradient_first or share > 0.5:
            yield say(what, fix, name, severity="advice", confidence=0.8)
        else:
            yield say(what, fix, name)


@checks(
    rule="H815",
    tier="contract",
    severity="advice",
    kind="symptom",
    confidence=0.9,
    each="optimizers",
)
def _gradients_all_zero(
    _: Facts, say: Say, name: str, optimizer: OptimizerFacts
) -> Iterator[Finding]:
    if optimizer.zero_gradient_steps >= _IN_A_ROW and not optimizer.zeroed:
        done = any(loss == 0 for _, loss in optimizer.losses[-1:])  # a hinge that is satisfied
        what = (
            f"all gradients were exactly 0 in {optimizer.zero_gradient_steps} observed steps in"
            " a row"
        )
        fix = (
            "look for a saturated or clamped output, dead units, a loss multiplied by 0, or a"
            " masked batch."
        )
        yield say(what, fix, name, severity="note" if done else "advice")


@checks(
    rule="H817", tier="contract", severity="error", kind="cause", confidence=0.95, each="optimizers"
)
def _gradient_reversed(
    _: Facts, say: Say, name: str, optimizer: OptimizerFacts
) -> Iterator[Finding]:
    for count, done in ((optimizer.reversed, "reversed"), (optimizer.zeroed, "set to zero")):
        if count >= _IN_ALL and count > optimizer.checked / 2:
            what = f"between backward and step the gradient was {done} in {count} observed steps"
            fix = (
                "look at the clip limit, which must be above 0, and at zero_grad between backward"
                " and step."
            )
            yield say(what, fix, name)


@checks(rule="H859", tier="contract", severity="advice", kind="cause", confidence=0.9)
def _clipped_too_early(facts: Facts, say: Say) -> Iterator[Finding]:
    # With several optimizers one may clip what another step's backward pass has left.
    if facts.early_clips >= _IN_ALL and len(facts.optimizers) == 1:
        what = (
            f"in {facts.early_clips} observed steps gradients were clipped before backward made"
            " them, and not after"
        )
        yield say(
            what, "clip between backward (with a loss scaler: unscale_) and optimizer.step()."
        )


@checks(
    rule="H819",
    tier="contract",
    severity="advice",
    kind="cause",
    confidence=0.85,
    each="optimizers",
)
def _learning_rate_gone(
    facts: Facts, say: Say, name: str, optimizer: OptimizerFacts
) -> Iterator[Finding]:
    steps, whole = optimizer.steps, facts.total_steps
    zero, low = optimizer.zero_lr_steps, optimizer.low_lr_steps
    # 90 % of the budget is catalogue 19. Without a budget only the end of the run shows what was
    # lost.
    early = whole is not None and steps < 0.9 * whole and zero >= 10
    lost = facts.ended and steps >= 50 and (zero > 0.15 * steps or low > 0.5 * steps)
    if early or lost:
        what = (
            f"the learning rate fell to {optimizer.lr:.2g} of {optimizer.largest_lr:.2g} and stayed"
            f" there for {max(zero, low)} of {steps} steps"
        )
        fix = (
            "let the schedule span the whole run: count it in steps if it is advanced in each step."
        )
        yield say(what, fix, name)


@checks(rule="H820", tier="contract", severity="advice", kind="cause", confidence=0.8)
def _scheduler_out_of_step(facts: Facts, say: Say) -> Iterator[Finding]:
    faded = any(
        optimizer.low_lr_steps > 0.2 * optimizer.steps for optimizer in facts.optimizers.values()
    )
    for name, scheduler in facts.schedulers.items():
        fault = _fault_of(scheduler, faded=faded)
        if fault and scheduler.kind != "ReduceLROnPlateau":
            fix = (
                "call scheduler.step() after optimizer.step(), once for each unit that its"
                " arguments count."
            )
            yield say(f"the {scheduler.kind} is out of step: {fault}", fix, name)


def _fault_of(scheduler: SchedulerFacts, *, faded: bool) -> str:
    steps, every, period = scheduler.optimizer_steps, scheduler.every_step, scheduler.period
    if scheduler.before_first > 0 and every >= 3:
        return (
            "it is advanced before the first optimizer step, so the first learning rate is never"
            " used"
        )
    if scheduler.several > 0.5 * steps and steps >= 20:
        return "it is advanced several times for each optimizer step"
    faded = faded or scheduler.kind == "CosineAnnealingLR"  # which comes back
    if steps >= 50 and every > 0.5 * steps and period and faded and scheduler.advanced > 3 * period:
        return (
            f"it is advanced in every step, {scheduler.advanced} times, although its period is"
            f" {period}"
        )
    return ""


@checks(
    rule="H821", tier="contract", severity="advice", kind="cause", confidence=0.7, each="schedulers"
)
def _scheduler_on_skipped_steps(
    _: Facts, say: Say, name: str, scheduler: SchedulerFacts
) -> Iterator[Finding]:
    several, steps = scheduler.several, scheduler.optimizer_steps
    if 3 <= several <= 0.5 * steps and scheduler.every_step + several > 0.9 * steps - 2:
        what = (
            f"the {scheduler.kind} was advanced {several} times for a step that the optimizer"
            " skipped"
        )
        fix = (
            "advance it only when the optimizer really stepped; compare the loss scale before and"
            " after."
        )
        yield say(what, fix, name)


@checks(
    rule="H854", tier="contract", severity="advice", kind="cause", confidence=0.9, each="schedulers"
)
def _plateau_on_batch_losses(
    _: Facts, say: Say, name: str, scheduler: SchedulerFacts
) -> Iterator[Finding]:
    fed = scheduler.every_step + scheduler.several
    if (
        scheduler.kind == "ReduceLROnPlateau"
        and fed >= 20
        and fed > 0.5 * scheduler.optimizer_steps
    ):
        given = (
            f"ReduceLROnPlateau (patience {scheduler.patience}) was given a batch's loss {fed}"
            " times"
        )
        fix = "give it a validation loss, or the mean over an epoch, once for each epoch."
        yield say(f"{given}; its noise looks like a plateau", fix, name)
