"""Contract rules about NaN and Inf in inputs, losses, gradients and weights."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.text import counted
from holdfast.learning.finding import Finding
from holdfast.learning.observations import Observations
from holdfast.learning.rules.registry import LearningRule, rule

# Maximum number of names listed in a finding.
MAX_NAMES = 5


@rule("H801", tier="contract", severity="error", kind="symptom", confidence=0.95)
def nonfinite_loss(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report losses that were NaN or Inf."""
    for name, optimizer in run.optimizers.items():
        if optimizer.nonfinite_losses:
            steps = counted(optimizer.nonfinite_losses, "observed step")
            yield rule.finding(
                f"the loss was NaN or Inf in {steps}",
                "look for log(0), a division by 0, an overflow, or a learning rate that is too"
                " high.",
                name,
                severity="note" if optimizer.gradient_failed_first else "error",
            )


@rule("H802", tier="contract", severity="error", kind="symptom", confidence=0.95)
def nonfinite_gradient(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report an optimizer that stepped with NaN or Inf in a gradient."""
    for name, optimizer in run.optimizers.items():
        if not optimizer.nonfinite_gradients:
            continue
        steps = counted(optimizer.nonfinite_gradients, "observed step")
        message = f"{steps} used a gradient with NaN or Inf"
        if optimizer.nonfinite_names:
            message += f", first in {', '.join(optimizer.nonfinite_names)}"
        yield rule.finding(
            message,
            "skip such steps, as holdfast.Guard does, and find the operation that causes them.",
            name,
            severity="error" if optimizer.gradient_failed_first else "note",
        )


@rule("H804", tier="contract", severity="error", kind="symptom", confidence=0.95)
def nonfinite_weights(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report weights and running statistics that contain NaN or Inf."""
    names = [name for name, layer in run.layers.items() if layer.nonfinite]
    for model in run.models.values():
        names += model.nonfinite_buffers
    if names:
        yield rule.finding(
            f"NaN or Inf in {', '.join(names[:MAX_NAMES])}",
            "resume from the last good checkpoint. The earliest finding about NaN or Inf shows the"
            " cause.",
        )


@rule("H806", tier="contract", severity="error", kind="cause", confidence=0.9)
def nonfinite_input(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report batches that contained NaN or Inf."""
    for name, inputs in run.inputs.items():
        if inputs.nonfinite:
            yield rule.finding(
                f"{counted(inputs.nonfinite, 'observed batch')} passed to the model contained NaN"
                " or Inf",
                "find and drop the affected samples. With Policy(drop_nonfinite_samples=True), a"
                " guard drops them from the batch.",
                name,
                # Without NaN or Inf elsewhere, the model probably handles missing values itself.
                severity="error" if run.had_nonfinite else "note",
            )
