"""Decide what to do about a step with NaN or Inf, or a spike."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.events.decisions import Decision, RollBack, SkipStep, Stop
from holdfast.core.policy.kinds import SpikeAction
from holdfast.core.text import counted
from holdfast.numerics.spikes import Level


def decide_after_nonfinite(
    *, reason: str, in_a_row: int, patience: int | None, rollbacks_in_a_row: int, max_rollbacks: int
) -> Decision:
    """Return the decision about a non-finite step: skip it, roll back, or stop.

    Args:
        reason: Why the step is non-finite; becomes the decision's reason.
        in_a_row: Consecutive non-finite steps, this one included.
        patience: Consecutive non-finite steps that lead to a rollback, or None to always skip.
        rollbacks_in_a_row: Rollbacks since the run last got past the step that caused them.
        max_rollbacks: The run stops after this many such rollbacks.
    """
    if patience is None or in_a_row < patience:
        return SkipStep(reason=reason, promise="changes training")
    if rollbacks_in_a_row >= max_rollbacks:
        return _stop_after(rollbacks_in_a_row, reason)
    if patience > 1:
        reason = f"{in_a_row} non-finite steps in a row: {reason}"
    return RollBack(reason=reason, promise="changes training", rewind_data=False)


def decide_after_spike(  # noqa: PLR0913
    level: Level,
    *,
    action: SpikeAction,
    hard_in_a_row: int,
    patience: int | None,
    rollbacks_in_a_row: int,
    max_rollbacks: int,
    reason: str,
) -> Decision | None:
    """Return the decision about a spike or a divergence, or None to commit the step normally.

    Args:
        level: How far it stands out.
        action: The strongest reaction that is allowed.
        hard_in_a_row: Consecutive hard steps, this one included.
        patience: Consecutive hard steps after which single batches are no longer blamed: then
            ``"roll_back"`` rolls back, and ``"skip"`` commits the step. With None, hard steps are
            skipped until they turn out to be a divergence.
        rollbacks_in_a_row: Rollbacks since the run last got past a divergence.
        max_rollbacks: If the run diverges again after this many such rollbacks, it stops.
        reason: What makes the step stand out; becomes the decision's reason.
    """
    if action in ("off", "warn") or level is Level.CALM:
        return None
    if level is Level.HARD and (patience is None or hard_in_a_row < patience):
        return SkipStep(reason=reason, promise="changes training")
    if action == "skip":
        return None
    if rollbacks_in_a_row < max_rollbacks:
        return RollBack(reason=reason, promise="changes training", rewind_data=False)
    if level is Level.DIVERGED:
        return _stop_after(rollbacks_in_a_row, reason)
    return None


def _stop_after(rollbacks_in_a_row: int, reason: str) -> Stop:
    return Stop(
        reason=f"again after {counted(rollbacks_in_a_row, 'rollback')}: {reason}",
        promise="changes training",
    )


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
