"""What is done after a step that left no trace because it could not be trusted: skip, roll back, or stop."""

from __future__ import annotations

from holdfast.core.errors import NonFiniteError, OutOfMemoryError
from holdfast.core.events import Promise, RollBack, Stop
from holdfast.numerics.nonfinite import decide_after_nonfinite, describe_nonfinite
from holdfast.run.outcome import Outcome, TornStep
from holdfast.run.session import Session


class Recovery:
    """Carries out the decisions about steps that went wrong.

    Args:
        session: The run, with the way back to a checkpoint.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._record = session.record
        self._policy = session.policy
        self._torn_at: int | None = None

    def after_nonfinite_step(self, outcome: Outcome) -> str:
        """Skip the step, return to a checkpoint, or stop.

        Returns:
            Why the step was skipped, and what was done.

        Raises:
            NonFiniteError: H501, if patience and rollbacks are spent.
        """
        counters = self._session.counters
        counters.skipped_steps += 1
        reason = describe_nonfinite(outcome.attempt.facts.loss, outcome.culprits, outcome.culprit_count)
        if outcome.loss_scale is not None:
            collapsed = outcome.loss_scale < 1.0
            kind = "loss_scale_collapsed" if collapsed else "loss_scale_lowered"
            self._record.happened(kind, loss_scale=outcome.loss_scale, reason=reason)
            if not collapsed:  # fp16 finds its scale by trying: no sign of trouble
                return f"{reason}; fp16 loss scale lowered to {outcome.loss_scale:g}"
        counters.nonfinite_in_a_row += 1
        decision = decide_after_nonfinite(
            reason=reason,
            in_a_row=counters.nonfinite_in_a_row,
            patience=self._policy.nonfinite_patience,
            rollbacks_in_a_row=counters.rollbacks_in_a_row,
            max_rollbacks=self._policy.max_rollbacks,
        )
        place = (
            {}
            if self._session.cursor is None
            else {"epoch": self._session.cursor.epoch, "batch": self._session.cursor.batches}
        )
        self._record.decided(decision, **place)
        if isinstance(decision, RollBack):
            failed_at = self._record.global_step
            if self._session.roll_back(rewind_data=False):
                counters.note_rollback(failed_at)
                return f"{reason}; rolled back to step {self._record.global_step}"
            decision = Stop(reason=f"{decision.reason}; no checkpoint to return to", promise=decision.promise)
            self._record.decided(decision)
        if isinstance(decision, Stop):
            counters.nonfinite_in_a_row = counters.rollbacks_in_a_row = (
                0  # whoever starts again has changed something
            )
            raise self._persistent(decision.reason)
        return reason

    def after_refused_save(self, why: str) -> None:
        """Return to a checkpoint, or stop: weights or moments hold NaN or Inf, although every step looked sound.

        An example is a finite gradient of 1e22: its square, Adam's second moment, is Inf.

        Raises:
            NonFiniteError: H501, if rollbacks are spent.
        """
        counters = self._session.counters
        decision = decide_after_nonfinite(
            reason=why,
            in_a_row=1,
            patience=1,
            rollbacks_in_a_row=counters.rollbacks_in_a_row,
            max_rollbacks=self._policy.max_rollbacks,
        )
        self._record.decided(decision)
        failed_at = self._record.global_step
        if isinstance(decision, RollBack) and self._session.roll_back(rewind_data=False):
            counters.note_rollback(failed_at)
            return
        self._session.whole = False
        raise self._persistent(why)

    def _persistent(self, reason: str) -> NonFiniteError:
        spent = f"nonfinite_patience={self._policy.nonfinite_patience} and max_rollbacks={self._policy.max_rollbacks}"
        return NonFiniteError(
            reason,
            limit=f"{spent} are spent",
            fix="lower the learning rate, set max_grad_norm, check the data of the batches that the events name; the "
            "newest checkpoint is finite.",
            rule="H501",
        )

    def after_torn_step(self, torn: TornStep, *, rewind_data: bool) -> str:
        """Return to the last good state after an optimizer ran out of memory half-way.

        Args:
            torn: What happened.
            rewind_data: Whether the loop can go back in the data too, which makes the return bit-exact.

        Returns:
            Why the step was undone.

        Raises:
            OutOfMemoryError: H402, if there is no checkpoint, or it happened at this step before.
        """
        at_step, twice = self._record.global_step, self._torn_at == self._record.global_step
        self._session.counters.out_of_memory += 1
        self._session.whole = False
        if twice or not self._session.roll_back(rewind_data=rewind_data):
            self._record.decided(Stop(reason=str(torn), promise="bit-exact"))
            raise _torn_for_good(torn, at_step, twice=twice)
        self._torn_at = at_step
        promise: Promise = "changes training"
        if rewind_data:  # the steps are made again, one tensor at a time if they were not before
            promise = "equal up to rounding" if self._updates_many_at_once() else "bit-exact"
        self._record.decided(RollBack(reason=str(torn), promise=promise, rewind_data=rewind_data))
        self._session.counters.note_rollback(at_step)
        self.spare_optimizer_memory()
        return f"{torn}; returned to step {self._record.global_step}"

    def _updates_many_at_once(self) -> bool:
        groups = [group for optimizer in self._session.parts.optimizers.values() for group in optimizer.param_groups]
        many = any(group.get("foreach") for group in groups)
        return many or self._session.parts.device_type() != "cpu"  # where torch chooses foreach by itself

    def spare_optimizer_memory(self) -> None:
        """Let optimizers update one tensor at a time, which needs the smallest temporaries."""
        for optimizer in self._session.parts.optimizers.values():
            for group in optimizer.param_groups:
                if not group.get("fused") and "foreach" in group:
                    group["foreach"] = False


def _torn_for_good(torn: TornStep, at_step: int, *, twice: bool) -> OutOfMemoryError:
    return OutOfMemoryError(
        f"the optimizer ran out of memory in the middle of step {at_step + 1} ({torn})",
        limit="its weights and moments are half changed, and "
        + ("it happened twice at this step" if twice else "there is no checkpoint to return to"),
        fix="leave the optimizer more memory (fused=True, a smaller model or optimizer) and start again: a "
        "checkpoint, if there is one, is from before.",
        rule="H402",
    )
