"""What to do about a step whose loss or gradients hold NaN or Inf: skip, then roll back, then stop."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.events import Decision, RollBack, SkipStep, Stop


def decide_after_nonfinite(
    *, reason: str, in_a_row: int, patience: int | None, rollbacks_in_a_row: int, max_rollbacks: int
) -> Decision:
    """Return the decision about a non-finite step.

    Args:
        reason: What was found.
        in_a_row: Non-finite steps in a row, this one included.
        patience: So many in a row lead to a rollback; None: never.
        rollbacks_in_a_row: Rollbacks without getting beyond the place where they came from.
        max_rollbacks: So many in a row and the run stops.
    """
    if patience is None or in_a_row < patience:
        return SkipStep(reason=reason, promise="changes training")
    if rollbacks_in_a_row < max_rollbacks:
        return RollBack(
            reason=reason if patience == 1 else f"{in_a_row} non-finite steps in a row: {reason}",
            promise="changes training",
            rewind_data=False,
        )
    return Stop(reason=f"after {rollbacks_in_a_row} rollback(s) again: {reason}", promise="changes training")


def describe_nonfinite(loss: float, culprits: Sequence[str], count: int) -> str:
    """Return one line that names the loss and the first parameters with bad gradients.

    Example:
        >>> describe_nonfinite(2.0, ["head.weight"], 3)
        'non-finite gradient (loss 2) in head.weight and 2 more parameter(s)'
    """
    if not culprits:
        return f"non-finite loss ({loss:g})"
    more = f" and {count - len(culprits)} more parameter(s)" if count > len(culprits) else ""
    return f"non-finite gradient (loss {loss:g}) in {', '.join(culprits)}{more}"
