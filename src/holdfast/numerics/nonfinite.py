"""What to do about a step whose loss or gradients hold NaN or Inf: skip, then roll back, then stop."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.events.event import Decision, RollBack, SkipStep, Stop


def decide_after_nonfinite(
    *, reason: str, in_a_row: int, patience: int | None, rollbacks_in_a_row: int, max_rollbacks: int
) -> Decision:
    """Return the decision about a non-finite step.

    So many as `patience` in a row, this one included, lead to a rollback (None: never), and the run stops after
    `max_rollbacks` in a row that did not get beyond the place where they came from.
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
    """Return one line that names the loss and the first parameters with bad gradients."""
    if not culprits:
        return f"non-finite loss ({loss:g})"
    more = f" and {count - len(culprits)} more parameter(s)" if count > len(culprits) else ""
    return f"non-finite gradient (loss {loss:g}) in {', '.join(culprits)}{more}"
