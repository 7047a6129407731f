"""Contracts about the loop: gradients that leak, are missing, zero or reversed; modes; schedulers out of step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.learning.finding import Finding
from holdfast.learning.rules.registry import Facts, Say, checks, each

_IN_A_ROW = 10
"""Steps in a row before a missing or zero gradient is more than a bad batch: numerics.md 4.4, number 15."""


def gradient_first(optimizer: Mapping[str, Any]) -> bool:
    """Return whether a gradient was not finite before any loss was."""
    gradient, loss = optimizer["first_nonfinite_gradient"], optimizer["first_nonfinite_loss"]
    return gradient is not None and (loss is None or gradient < loss)


@checks(rule="H802", tier="contract", severity="error", kind="symptom", confidence=0.95)
def nonfinite_gradient(facts: Facts, say: Say) -> Iterator[Finding]:
    """A step was made with NaN or Inf in a gradient."""
    for name, optimizer in each(facts, "optimizers"):
        if optimizer["nonfinite_gradients"]:
            yield say(
                f"{optimizer['nonfinite_gradients']} observed step(s) used NaN or Inf as a gradient",
                severity="error" if gradient_first(optimizer) else "note",
                fix="skip such steps (holdfast.Guard does), and find the operation that they come from.",
                evidence={"first_in": optimizer["nonfinite_names"]},
                where=name,
            )


@checks(rule="H804", tier="contract", severity="error", kind="symptom", confidence=0.95)
def nonfinite_weights(facts: Facts, say: Say) -> Iterator[Finding]:
    """Weights or running statistics hold NaN or Inf."""
    bad = [name for name, layer in each(facts, "layers") if layer["nonfinite"]]
    bad += [name for _, model in each(facts, "models") for name in model["nonfinite_buffers"]]
    if bad:
        yield say(
            f"NaN or Inf in {', '.join(bad[:5])}",
            fix="go back to the last good checkpoint; what made them is the first of these findings.",
            evidence={"tensors": bad[:5], "count": len(bad)},
        )


@checks(rule="H805", tier="contract", severity="error", kind="symptom", confidence=0.95)
def nonfinite_optimizer_state(facts: Facts, say: Say) -> Iterator[Finding]:
    """The averages that an optimizer keeps hold NaN or Inf."""
    for name, optimizer in each(facts, "optimizers"):
        if optimizer["nonfinite_state"]:
            yield say(
                f"the optimizer's {', '.join(optimizer['nonfinite_state'])} holds NaN or Inf, and keeps it",
                fix="go back to the last good checkpoint, and skip steps whose gradient is not finite.",
                evidence={"entries": optimizer["nonfinite_state"]},
                where=name,
            )


@checks(rule="H811", tier="contract", severity="error", kind="cause", confidence=0.95)
def gradients_leak(facts: Facts, say: Say) -> Iterator[Finding]:
    """Gradients of one step are still there in the next."""
    for name, optimizer in each(facts, "optimizers"):
        # Two in a row could be a deliberate warm-up of gradients; a forgotten zero_grad never stops.
        if optimizer["leaks"] >= 3 and not optimizer["closure"]:
            yield say(
                f"in {optimizer['leaks']} steps in a row gradients were added to those of the step before",
                fix="call optimizer.zero_grad() before each backward pass of a new step.",
                evidence={"in_a_row": optimizer["leaks"], "clean": optimizer["clean_starts"]},
                where=name,
            )


@checks(rule="H812", tier="contract", severity="error", kind="cause", confidence=0.9)
def never_stepped(facts: Facts, say: Say) -> Iterator[Finding]:
    """Backward is called and nothing moves."""
    # 200 as in numerics.md 4.4; at the end of a run a few are enough, since no step is to come.
    enough = facts.get("backwards_since_step", 0) >= (10 if facts.get("ended") else 200)
    models = [model for _, model in each(facts, "models")]
    if not enough or not models:
        return
    if facts["steps"] == 0 and not any(model["changed"] for model in models):
        yield say(
            f"{facts['backwards']} backward passes and no optimizer step; the weights are as they were",
            fix="call optimizer.step() after backward.",
            evidence={"backwards": facts["backwards"]},
        )
    elif facts["steps"] == 0:
        yield say(
            f"{facts['backwards']} backward passes without optimizer.step(); the weights are moved by other means",
            severity="note",
            fix="nothing, if the update is your own.",
            evidence={"backwards": facts["backwards"]},
        )


@checks(rule="H813", tier="contract", severity="error", kind="cause", confidence=0.9)
def step_without_gradients(facts: Facts, say: Say) -> Iterator[Finding]:
    """The optimizer steps although no gradient has come."""
    for name, optimizer in each(facts, "optimizers"):
        idle = optimizer["no_gradient_steps"]
        # One that had gradients before may only be waiting for its phase.
        if idle >= _IN_A_ROW and not (optimizer["closure"] or optimizer["with_gradient_steps"]):
            yield say(
                f"{idle} steps in a row had no gradient in any tensor of the optimizer",
                fix="call backward before step and zero_grad not in between; the loss must depend on these weights "
                "without .detach(), .item() or no_grad.",
                evidence={"in_a_row": idle, "tensors": optimizer["tensors"]},
                where=name,
            )


@checks(rule="H814", tier="contract", severity="note", kind="cause", confidence=0.6)
def parameter_without_gradient(facts: Facts, say: Say) -> Iterator[Finding]:
    """Some parameters of the optimizer never get a gradient."""
    if any(optimizer["no_gradient_steps"] >= _IN_A_ROW for _, optimizer in each(facts, "optimizers")):
        return  # nothing gets one: H813
    for name, model in each(facts, "models"):
        count = model["never_gradient_count"]
        if not count:
            continue
        share = model["never_gradient_weights"] / max(1, model["weights"])
        # An unused expert or head lies beside the path; a path that is cut loses its beginning.
        cut = model["never_gradient_first"] or share > 0.5
        yield say(
            f"{count} parameter(s), {share:.0%} of the weights, got no gradient in 30 steps: "
            f"{', '.join(model['never_gradient'])}",
            severity="advice" if cut else "note",
            confidence=0.8 if cut else 0.4,
            fix="look for .detach(), .item(), argmax, no_grad or a new tensor between them and the loss; or pass "
            "frozen= if they are meant not to learn.",
            evidence={"share": share, "count": count, "first_layer": model["never_gradient_first"]},
            where=name,
        )


@checks(rule="H815", tier="contract", severity="error", kind="cause", confidence=0.9)
def gradients_all_zero(facts: Facts, say: Say) -> Iterator[Finding]:
    """Every gradient is exactly zero."""
    for name, optimizer in each(facts, "optimizers"):
        if optimizer["zero_gradient_steps"] >= _IN_A_ROW and not optimizer["zeroed"]:
            done = any(loss == 0 for _, loss in optimizer["losses"][-1:])  # a hinge that is satisfied
            yield say(
                f"all gradients were exactly 0 in {optimizer['zero_gradient_steps']} observed steps in a row",
                kind="symptom",
                severity="note" if done else "advice",
                fix="look for a saturated or clamped output, dead units, a loss multiplied by 0, or a masked batch.",
                evidence={"in_a_row": optimizer["zero_gradient_steps"]},
                where=name,
            )


@checks(rule="H817", tier="contract", severity="error", kind="cause", confidence=0.95)
def gradient_reversed(facts: Facts, say: Say) -> Iterator[Finding]:
    """Between backward and step the gradient was turned round or set to zero."""
    for name, optimizer in each(facts, "optimizers"):
        for count, done in ((optimizer["reversed"], "reversed"), (optimizer["zeroed"], "set to zero")):
            if count >= _IN_A_ROW and count > optimizer["observed"] / 2:
                yield say(
                    f"between backward and step the gradient was {done} in {count} observed steps",
                    fix="look at the clip limit, which must be above 0, and at zero_grad between backward and step.",
                    evidence={"steps": count, "observed": optimizer["observed"]},
                    where=name,
                )


@checks(rule="H819", tier="contract", severity="advice", kind="cause", confidence=0.85)
def learning_rate_gone(facts: Facts, say: Say) -> Iterator[Finding]:
    """The learning rate is zero, or next to it, with much of the run to come."""
    for name, optimizer in each(facts, "optimizers"):
        steps, whole = optimizer["steps"], facts.get("total_steps")
        zero, low = optimizer["zero_lr_steps"], optimizer["low_lr_steps"]
        # 90 % of the budget is catalogue 19. Without a budget only the end of the run tells what was lost.
        early = whole is not None and steps < 0.9 * whole and zero >= 10
        lost = bool(facts.get("ended")) and steps >= 50 and (zero > 0.15 * steps or low > 0.5 * steps)
        if early or lost:
            yield say(
                f"the learning rate fell to {optimizer['lr']:.2g} of {optimizer['largest_lr']:.2g} and stayed there "
                f"for {max(zero, low)} of {steps} steps",
                fix="let the schedule span the whole run: count it in steps if it is advanced in each step.",
                evidence={key: optimizer[key] for key in ("lr", "largest_lr", "zero_lr_steps", "low_lr_steps")},
                where=name,
            )


@checks(rule="H820", tier="contract", severity="advice", kind="cause", confidence=0.8)
def scheduler_out_of_step(facts: Facts, say: Say) -> Iterator[Finding]:
    """A scheduler is advanced at other times than its numbers mean."""
    for name, scheduler in each(facts, "schedulers"):
        told = None
        faded = any(
            optimizer["low_lr_steps"] > 0.2 * optimizer["steps"] for _, optimizer in each(facts, "optimizers")
        )
        waves = scheduler["kind"] == "CosineAnnealingLR"
        steps, every, period = scheduler["optimizer_steps"], scheduler["every_step"], scheduler["period"]
        if scheduler["before_first"] > 0 and every >= 3:
            told = "it is advanced before the first optimizer step, so the first learning rate is never used"
        elif scheduler["several"] > 0.5 * steps and steps >= 20:
            told = "it is advanced several times for each optimizer step"
        elif (
            steps >= 50 and every > 0.5 * steps and period and (faded or waves) and scheduler["advanced"] > 3 * period
        ):
            told = f"it is advanced in every step, {scheduler['advanced']} times, although its period is {period}"
        if told is not None and scheduler["kind"] != "ReduceLROnPlateau":
            yield say(
                f"the {scheduler['kind']} is out of step: {told}",
                fix="call scheduler.step() after optimizer.step(), once for each unit that its arguments count.",
                evidence=dict(scheduler),
                where=name,
            )


@checks(rule="H821", tier="contract", severity="advice", kind="cause", confidence=0.7)
def scheduler_on_skipped_steps(facts: Facts, say: Say) -> Iterator[Finding]:
    """A scheduler goes on although the optimizer skips."""
    for name, scheduler in each(facts, "schedulers"):
        several, steps = scheduler["several"], scheduler["optimizer_steps"]
        if 3 <= several <= 0.5 * steps and scheduler["every_step"] + several > 0.9 * steps - 2:
            yield say(
                f"the {scheduler['kind']} was advanced {several} times for a step that the optimizer skipped",
                fix="advance it only when the optimizer really stepped; compare the loss scale before and after.",
                evidence=dict(scheduler),
                where=name,
            )


@checks(rule="H854", tier="contract", severity="advice", kind="cause", confidence=0.9)
def plateau_on_batch_losses(facts: Facts, say: Say) -> Iterator[Finding]:
    """ReduceLROnPlateau is fed with the loss of every batch."""
    for name, scheduler in each(facts, "schedulers"):
        fed = scheduler["every_step"] + scheduler["several"]
        if scheduler["kind"] == "ReduceLROnPlateau" and fed >= 20 and fed > 0.5 * scheduler["optimizer_steps"]:
            yield say(
                f"ReduceLROnPlateau (patience {scheduler['patience']}) was given a batch's loss {fed} times; its "
                "noise looks like a plateau",
                fix="give it a validation loss, or the mean over an epoch, once for each epoch.",
                evidence=dict(scheduler),
                where=name,
            )


@checks(rule="H834", tier="contract", severity="advice", kind="cause", confidence=0.8)
def wrong_mode(facts: Facts, say: Say) -> Iterator[Finding]:
    """The model trains in evaluation mode, or is evaluated in training mode."""
    for name, model in each(facts, "models"):
        if model["eval_steps"] >= 5 and model["eval_steps"] > 0.1 * model["observed"]:
            yield say(
                f"{model['eval_steps']} of {model['observed']} observed steps were made in evaluation mode, although "
                f"{', '.join(model['modal'])} behave(s) differently in training",
                fix="call model.train() after each evaluation.",
                evidence={"eval_steps": model["eval_steps"], "observed": model["observed"]},
                where=name,
            )
        if model["train_mode_validations"] >= 2 and model["train_mode_validations"] == model["validations"]:
            yield say(
                f"all {model['validations']} evaluations ran in training mode, with "
                f"{', '.join(model['modal'])} active",
                fix="call model.eval() before an evaluation and model.train() after it.",
                evidence={"validations": model["validations"]},
                where=f"{name} in evaluation",
            )
