"""What to do about a step whose loss or gradients hold NaN or Inf."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.events.decisions import Decision, RollBack, SkipStep, Stop
from holdfast.core.text import counted


def decide_after_nonfinite(
    *, reason: str, in_a_row: int, patience: int | None, rollbacks_in_a_row: int, max_rollbacks: int
) -> Decision:
    """Return the decision about a non-finite step: skip it, roll back, or stop.

    Args:
        reason: Why the step is non-finite; becomes the decision's reason.
        in_a_row: Consecutive non-finite steps, this one included.
        patience: Consecutive non-finite steps that lead to a rollback, or None to always skip.
        rollbacks_in_a_row: Consecutive rollbacks since the run last got past the step that caused
            them.
        max_rollbacks: The run stops after this many such rollbacks.
    """
    if patience is None or in_a_row < patience:
        return SkipStep(reason=reason, promise="changes training")
    if rollbacks_in_a_row >= max_rollbacks:
        return Stop(
            reason=f"again after {counted(rollbacks_in_a_row, 'rollback')}: {reason}",
            promise="changes training",
        )
    if patience > 1:
        reason = f"{in_a_row} non-finite steps in a row: {reason}"
    return RollBack(reason=reason, promise="changes training", rewind_data=False)


def describe_nonfinite(loss: float, culprits: Sequence[str], count: int) -> str:
    """Return one line that names the loss and the first parameters with non-finite gradients.

    Args:
        loss: The loss of the step.
        culprits: The first of these parameters.
        count: How many there are in all.
    """
    if not culprits:
        return f"non-finite loss ({loss:g})"
    line = f"non-finite gradient (loss {loss:g}) in {', '.join(culprits)}"
    if count > len(culprits):
        line += f" and {counted(count - len(culprits), 'more parameter')}"
    return line
