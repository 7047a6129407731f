"""Decide what to do about a step with NaN or Inf, or a spike."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.core.events.decisions import Decision, RollBack, SkipStep, Stop
from holdfast.core.policy.kinds import SpikeAction
from holdfast.core.text import counted
from holdfast.numerics.spikes import Level


def decide_after_nonfinite(
    *, reason: str, in_a_row: int, patience: int | None, rollbacks_in_a_row: int, max_rollbacks: int
) -> Decision:
    """Decide what to do about a non-finite step: skip it, roll back, or stop.

    Args:
        reason: Why the step is non-finite. The decision states this reason.
        in_a_row: Number of consecutive non-finite steps, including this one.
        patience: Roll back after this many consecutive non-finite steps. None to always skip.
        rollbacks_in_a_row: Number of rollbacks since the run last got past the step that caused
            them.
        max_rollbacks: After this many such rollbacks, stop the run instead of rolling back again.
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
    """Decide what to do about a spike or a divergence.

    Args:
        level: The judgment of the spike detector.
        action: The strongest action that the policy allows.
        hard_in_a_row: Number of consecutive hard steps, including this one.
        patience: Once this many consecutive steps are hard, they are no longer skipped, because
            their batches are unlikely to be the cause. Instead, the run is rolled back if `action`
            is ``"roll_back"``, and the step is committed if it is ``"skip"``. None to skip hard
            steps until they turn out to be a divergence.
        rollbacks_in_a_row: Number of rollbacks since the run last got past a divergence.
        max_rollbacks: Stop the run if it diverges again after this many rollbacks.
        reason: Why the step is suspicious. The decision states this reason.

    Returns:
        The decision, or None to commit the step normally.
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
    """Return the decision to stop a run that may not roll back, or not once more."""
    history = f"happened again after {counted(rollbacks_in_a_row, 'rollback')}"
    if rollbacks_in_a_row == 0:
        history = "the policy allows no rollback (max_rollbacks=0)"
    return Stop(reason=f"{history}: {reason}", promise="changes training")


def describe_nonfinite(loss: float, culprits: Sequence[str], count: int) -> str:
    """Return a one-line description of a non-finite step: its loss, and its bad gradients.

    Args:
        loss: The loss of the step.
        culprits: Names of the first few parameters with a non-finite gradient. Empty if they are
            unknown.
        count: The total number of such parameters.
    """
    if not culprits and math.isfinite(loss):
        return f"non-finite gradient (loss {loss:g})"
    if not culprits:
        return f"non-finite loss ({loss:g})"
    line = f"non-finite gradient (loss {loss:g}) in {', '.join(culprits)}"
    if count > len(culprits):
        line += f" and {counted(count - len(culprits), 'more parameter')}"
    return line
