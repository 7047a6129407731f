"""Rules about gradients: leaked, missing, zero, reversed, clipped early, vanishing, exploding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.learning.finding import Finding
from holdfast.learning.measures import median
from holdfast.learning.observations import Observations, ObservedLoss
from holdfast.learning.rules.data import is_far_from_unit_scale
from holdfast.learning.rules.loss_progress import measure_progress
from holdfast.learning.rules.registry import LearningRule, rule

# Rule H811 reports after this many consecutive steps with leaked gradients. Two steps could be
# intentional accumulation; a forgotten zero_grad affects every step.
LEAKED_STEPS = 3
# A missing or zero gradient is reported after this many consecutive observed steps; a shorter
# streak could be due to a bad batch.
STEPS_IN_A_ROW = 10
# A gradient that is reversed, set to zero or clipped too early is reported after this many steps.
HABIT_STEPS = 6
# A missing optimizer step is reported after this many backward passes; with fewer, the loop may be
# accumulating gradients by hand. At the end of a run fewer are enough, since no step can follow.
BACKWARDS_WITHOUT_STEP = 200
BACKWARDS_WITHOUT_STEP_AT_END = 10
# Gradients vanish or explode if those of the first layer, relative to those of the last one, are
# below or above these ratios. AutoTrainer uses 1e-3 for vanishing gradients.
VANISHING_RATIO = 1e-3
EXPLODING_RATIO = 1e4
# A signal explodes if the first loss, or the largest gradient norm, exceeds the usual one by this
# factor.
EXPLODING_LOSS = 10
EXPLODING_NORM = 1e3
# The minimum number of layers in a chain, and of gradient norms, to judge them.
MIN_LAYERS = 3
MIN_NORMS = 5
FIRST_NORMS = 10


@rule("H811", tier="contract", severity="error", kind="cause", confidence=0.95)
def gradients_never_reset(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Gradients are added to those of the previous step."""
    for name, optimizer in run.optimizers.items():
        if optimizer.leaks >= LEAKED_STEPS and not optimizer.uses_closure:
            yield rule.finding(
                f"in {optimizer.leaks} consecutive steps, gradients were added to those of the step"
                " before",
                "call optimizer.zero_grad() before the first backward pass of each step.",
                name,
            )


@rule("H812", tier="contract", severity="error", kind="cause", confidence=0.9)
def backward_without_step(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """The optimizer never steps."""
    needed = BACKWARDS_WITHOUT_STEP_AT_END if run.ended else BACKWARDS_WITHOUT_STEP
    if run.steps or not run.models or run.backwards_since_step < needed:
        return
    if any(model.changed for model in run.models.values()):
        yield rule.finding(
            f"{run.backwards} backward passes without optimizer.step(); something else changes the"
            " weights",
            "none needed if you update the weights yourself.",
            severity="note",
        )
    else:
        yield rule.finding(
            f"{run.backwards} backward passes and no optimizer step; the weights have not changed",
            "call optimizer.step() after backward.",
        )


@rule("H813", tier="contract", severity="error", kind="cause", confidence=0.9)
def step_without_gradients(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """An optimizer steps although none of its parameters has a gradient."""
    for name, optimizer in run.optimizers.items():
        # An optimizer that has had gradients may just be idle in this phase of training.
        if optimizer.uses_closure or optimizer.with_gradient_steps:
            continue
        if optimizer.no_gradient_steps >= STEPS_IN_A_ROW:
            yield rule.finding(
                f"in {optimizer.no_gradient_steps} consecutive steps no tensor of the optimizer"
                " had a gradient",
                "call backward before step, without zero_grad in between; the loss must depend on"
                " these weights without .detach(), .item() or no_grad.",
                name,
            )


@rule("H815", tier="contract", severity="advice", kind="symptom", confidence=0.9)
def all_gradients_zero(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """All gradients of an optimizer are exactly 0, so its steps change nothing."""
    for name, optimizer in run.optimizers.items():
        if optimizer.zero_gradient_steps < STEPS_IN_A_ROW or optimizer.zeroed:
            continue
        # A satisfied hinge loss is 0, and so is its gradient.
        satisfied = bool(optimizer.losses) and optimizer.losses[-1][1] == 0
        yield rule.finding(
            f"all gradients were exactly 0 in {optimizer.zero_gradient_steps} consecutive observed"
            " steps",
            "look for a saturated or clamped output, dead units, a loss multiplied by 0, or a"
            " masked batch.",
            name,
            severity="note" if satisfied else "advice",
        )


@rule("H817", tier="contract", severity="error", kind="cause", confidence=0.95)
def gradient_reversed(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """The gradient is reversed or set to zero between backward and step."""
    for name, optimizer in run.optimizers.items():
        changes = {"reversed": optimizer.reversed, "set to zero": optimizer.zeroed}
        for change, count in changes.items():
            if count >= HABIT_STEPS and count > optimizer.checked / 2:
                yield rule.finding(
                    f"between backward and step the gradient was {change} in {count} observed"
                    " steps",
                    "check that the clipping limit is above 0, and that nothing calls zero_grad"
                    " between backward and step.",
                    name,
                )


@rule("H859", tier="contract", severity="advice", kind="cause", confidence=0.9)
def clipped_before_backward(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Gradients are clipped before backward computes them."""
    # With several optimizers, one may clip gradients left by another's backward pass.
    if run.early_clips >= HABIT_STEPS and len(run.optimizers) == 1:
        yield rule.finding(
            f"in {run.early_clips} observed steps gradients were clipped before backward computed"
            " them, and not afterwards",
            "clip after backward (with a gradient scaler, after unscale_) and before"
            " optimizer.step().",
        )


# --- vanishing and exploding ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSignal:
    """Where a signal vanishes or explodes, and what was measured."""

    description: str
    where: str


@rule("H848", tier="window", severity="note", kind="cause", confidence=0.7)
def signal_vanishes_or_explodes(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Signals vanish or explode in a run that makes no progress."""
    failing = measure_progress(run).is_failing
    fix = (
        "use ReLU-like activations or gates with a matching initialisation, normalisation, or"
        " residual paths; clip the gradient of recurrent networks."
    )
    # Explosion is the more certain cause: gradients may also vanish because the learning rate is
    # too high.
    exploding = find_exploding(run) if failing or run.had_nonfinite else None
    if exploding is not None:
        yield rule.finding(
            exploding.description, fix, exploding.where, severity="advice", confidence=0.85
        )
        return
    vanishing = find_uneven_gradients(run)
    if vanishing is not None:
        yield rule.finding(
            vanishing.description, fix, vanishing.where, severity="advice" if failing else "note"
        )


def find_exploding(run: Observations) -> LostSignal | None:
    """Return where a signal explodes, judged by the first loss and the gradient norms."""
    if any(is_far_from_unit_scale(inputs) for inputs in run.inputs.values()):
        # The scale of the inputs already explains large losses and gradients.
        return None
    for name, loss in run.losses.items():
        usual = usual_first_loss(loss)
        if loss.first is not None and usual and loss.first > EXPLODING_LOSS * usual:
            return LostSignal(
                description=(
                    "signals explode on the way forward: the first loss,"
                    f" {loss.first:.3g}, is far above {usual:.3g}"
                ),
                where=name,
            )
    for name, optimizer in run.optimizers.items():
        norms = [norm for norm in optimizer.gradient_norms if math.isfinite(norm)]
        if len(norms) < MIN_NORMS:
            continue
        if max(norms) > EXPLODING_NORM * max(1.0, median(norms[:FIRST_NORMS])):
            return LostSignal(
                description=(
                    f"the gradient norm reached {max(norms):.2g}, a thousand times the usual"
                ),
                where=name,
            )
    return None


def usual_first_loss(loss: ObservedLoss) -> float | None:
    """Return the loss of predicting 0 or the best constant; a first loss should be close to it."""
    if loss.target_scale:
        return loss.target_scale
    if loss.function == "mse_loss":
        return None
    return loss.baseline


def find_uneven_gradients(run: Observations) -> LostSignal | None:
    """Return where gradients vanish or explode between the last layer and the first one."""
    for model in run.models:
        # Compare layers only within a model: those of several models do not form a chain.
        prefix = f"{model}." if len(run.models) > 1 else ""
        signal = _find_uneven_gradients_within(run, prefix)
        if signal is not None:
            return signal
    return None


def _find_uneven_gradients_within(run: Observations, prefix: str) -> LostSignal | None:
    """Return where gradients vanish or explode in one model, named by its prefix.

    Compares the gradient size of the first matrix with that of the last one.
    """
    sizes = {
        name: layer.gradient_rms
        for name, layer in run.layers.items()
        if name.startswith(prefix) and layer.dims > 1 and layer.gradient_rms is not None
    }
    if len(sizes) < MIN_LAYERS:
        return None
    first, *_, last = sizes
    if not sizes[last] > 0:
        return None
    ratio = sizes[first] / sizes[last]
    if VANISHING_RATIO <= ratio <= EXPLODING_RATIO:
        return None
    verb = "vanish" if ratio < 1 else "explode"
    return LostSignal(
        description=(
            f"gradients {verb} towards the input: {sizes[first]:.1e} in {first},"
            f" {sizes[last]:.1e} in {last}"
        ),
        where=first,
    )
