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

# H811 reports after this many consecutive steps with leaked gradients. Two steps could be
# intentional accumulation, but a forgotten zero_grad affects every step.
LEAKED_STEPS = 3
# Missing or zero gradients are reported after this many consecutive observed steps. A shorter
# streak could be caused by bad batches.
STEPS_IN_A_ROW = 10
# Gradients that are reversed, set to zero or clipped too early are reported after this many steps.
HABIT_STEPS = 6
# A missing optimizer step is reported after this many backward passes. With fewer, the loop may be
# accumulating gradients by hand. At the end of a run, fewer are enough, because no step can follow.
BACKWARDS_WITHOUT_STEP = 200
BACKWARDS_WITHOUT_STEP_AT_END = 10
# Gradients vanish if the first layer's gradients, relative to the last layer's, are below the first
# limit. They explode above the second limit. AutoTrainer uses 1e-3 for vanishing gradients.
VANISHING_RATIO = 1e-3
EXPLODING_RATIO = 1e4
# A signal explodes if the first loss or the largest gradient norm exceeds the usual value by this
# factor.
EXPLODING_LOSS = 10
EXPLODING_NORM = 1e3
# Minimum number of layers and of gradient norms for an evaluation, and the number of first norms
# whose median counts as usual.
MIN_LAYERS = 3
MIN_NORMS = 5
FIRST_NORMS = 10


@rule("H811", tier="contract", severity="error", kind="cause", confidence=0.95)
def gradients_never_reset(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report gradients that are added to those of the previous step."""
    for name, optimizer in run.optimizers.items():
        if optimizer.leaks >= LEAKED_STEPS and not optimizer.uses_closure:
            yield rule.finding(
                f"in {optimizer.leaks} consecutive steps, gradients were added to the gradients of"
                " the previous step",
                "call optimizer.zero_grad() before the first backward pass of each step.",
                name,
            )


@rule("H812", tier="contract", severity="error", kind="cause", confidence=0.9)
def backward_without_step(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a run whose optimizer never steps although backward is called."""
    needed = BACKWARDS_WITHOUT_STEP_AT_END if run.ended else BACKWARDS_WITHOUT_STEP
    if run.steps or not run.models or run.backwards_since_step < needed:
        return
    if any(model.changed for model in run.models.values()):
        yield rule.finding(
            f"{run.backwards} backward passes without optimizer.step(), but the weights change",
            "do nothing if you update the weights yourself.",
            severity="note",
        )
    else:
        yield rule.finding(
            f"{run.backwards} backward passes without an optimizer step, and the weights have not"
            " changed",
            "call optimizer.step() after backward.",
        )


@rule("H813", tier="contract", severity="error", kind="cause", confidence=0.9)
def step_without_gradients(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report an optimizer that steps although none of its parameters has a gradient."""
    for name, optimizer in run.optimizers.items():
        # An optimizer that had gradients before may just be idle in this phase of training.
        if optimizer.uses_closure or optimizer.with_gradient_steps:
            continue
        if optimizer.no_gradient_steps >= STEPS_IN_A_ROW:
            yield rule.finding(
                f"in {optimizer.no_gradient_steps} consecutive steps, none of the optimizer's"
                " parameters had a gradient",
                "call backward before step, without zero_grad in between. The loss must depend on"
                " these weights without .detach(), .item() or no_grad.",
                name,
            )


@rule("H815", tier="contract", severity="advice", kind="symptom", confidence=0.9)
def all_gradients_zero(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report an optimizer whose gradients are all exactly 0, so that it learns nothing."""
    for name, optimizer in run.optimizers.items():
        if optimizer.zero_gradient_steps < STEPS_IN_A_ROW or optimizer.zeroed:
            continue
        # When all margins of a hinge loss are satisfied, both the loss and its gradient are 0.
        satisfied = bool(optimizer.losses) and optimizer.losses[-1][1] == 0
        yield rule.finding(
            f"all gradients were exactly 0 in {optimizer.zero_gradient_steps} consecutive observed"
            " steps",
            "look for saturated or clamped outputs, dead units, a loss multiplied by 0, or a"
            " masked batch.",
            name,
            severity="note" if satisfied else "advice",
        )


@rule("H817", tier="contract", severity="error", kind="cause", confidence=0.95)
def gradient_reversed(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a gradient that is reversed or set to zero between backward and step."""
    for name, optimizer in run.optimizers.items():
        changes = {"reversed": optimizer.reversed, "set to zero": optimizer.zeroed}
        for change, count in changes.items():
            if count >= HABIT_STEPS and count > optimizer.checked / 2:
                yield rule.finding(
                    f"in {count} observed steps, the gradient was {change} between backward and"
                    " step",
                    "check that the clipping limit is above 0, and that nothing calls zero_grad"
                    " between backward and step.",
                    name,
                )


@rule("H859", tier="contract", severity="advice", kind="cause", confidence=0.9)
def clipped_before_backward(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report gradients that are clipped before backward computes them."""
    # With several optimizers, a clipping call and the backward pass after it may concern the
    # gradients of different optimizers.
    if run.early_clips >= HABIT_STEPS and len(run.optimizers) == 1:
        yield rule.finding(
            f"in {run.early_clips} observed steps, gradients were clipped before backward computed"
            " them, but not afterwards",
            "clip after backward (with a gradient scaler, after unscale_) and before"
            " optimizer.step().",
        )


# --- vanishing and exploding ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LostSignal:
    """A place at which a signal vanishes or explodes, and a description with measured values."""

    description: str
    where: str


@rule("H848", tier="window", severity="note", kind="cause", confidence=0.7)
def signal_vanishes_or_explodes(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report activations or gradients that explode, or gradients that vanish toward the input."""
    failing = measure_progress(run).is_failing
    fix = (
        "use ReLU-like activations or gates with a matching initialization, normalization layers,"
        " or residual connections. Clip the gradients of recurrent networks."
    )
    # Check for exploding signals first, because they are the more certain cause. Vanishing
    # gradients can also result from a learning rate that is too high.
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
    """Return where a signal explodes, based on the first loss and the gradient norms, or None."""
    if any(is_far_from_unit_scale(inputs) for inputs in run.inputs.values()):
        # Inputs on an unusual scale are a sufficient explanation of large losses and gradients.
        return None
    for name, loss in run.losses.items():
        usual = usual_first_loss(loss)
        if loss.first is not None and usual and loss.first > EXPLODING_LOSS * usual:
            return LostSignal(
                description=(
                    f"signals explode in the forward pass: the first loss is {loss.first:.3g}, far"
                    f" above the expected {usual:.3g}"
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
                    f"the gradient norm reached {max(norms):.2g}, more than a thousand times the"
                    " usual norm"
                ),
                where=name,
            )
    return None


def usual_first_loss(loss: ObservedLoss) -> float | None:
    """Return an estimate of the first loss: the loss of predicting 0 or the best constant."""
    if loss.target_scale:
        return loss.target_scale
    if loss.function == "mse_loss":
        return None
    return loss.baseline


def find_uneven_gradients(run: Observations) -> LostSignal | None:
    """Return where gradients vanish or explode from the last layer to the first one, or None."""
    for model in run.models:
        # Compare layers only within a model, because layers of different models do not form a
        # chain.
        prefix = f"{model}." if len(run.models) > 1 else ""
        signal = _find_uneven_gradients_within(run, prefix)
        if signal is not None:
            return signal
    return None


def _find_uneven_gradients_within(run: Observations, prefix: str) -> LostSignal | None:
    """Return where gradients vanish or explode in the model with this name prefix, or None.

    Compares the size of the gradients in the model's first and last matrix.
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
            f"gradients {verb} toward the input: {sizes[first]:.1e} in {first},"
            f" {sizes[last]:.1e} in {last}"
        ),
        where=first,
    )
