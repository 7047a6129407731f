"""Recover from failed steps.

`Recovery` decides how to continue after a step that was refused (NaN or Inf, a loss spike) or whose
optimizer failed: skip the batch, return to an earlier state, or stop.
"""

from __future__ import annotations

import math
from dataclasses import replace
from enum import Enum
from typing import Any

from holdfast.core.errors import (
    BatchError,
    DivergenceError,
    HoldfastError,
    NonFiniteError,
    OutOfMemoryError,
)
from holdfast.core.events import run_events
from holdfast.core.events.data import Promise
from holdfast.core.events.decisions import Decision, RollBack, SkipStep, Stop
from holdfast.guard.optimizers import OptimizerMemory
from holdfast.guard.result import Outcome, PartialOptimizerStep, Provenance, StepAttempt
from holdfast.guard.run.sample_reports import SampleReports
from holdfast.guard.run.session import Session
from holdfast.memory.oom import clear_exception_frames, find_out_of_memory
from holdfast.numerics.decisions import (
    decide_after_nonfinite,
    decide_after_spike,
    describe_nonfinite,
)
from holdfast.numerics.spikes import GOOD_AFTER, Level

# A divergence counts as overcome once the run is this many steps past it. For comparison, the
# training of PaLM (2022) was restarted about 100 steps before a spike and skipped 200 to 500
# batches.
_STEPS_TO_OVERCOME_DIVERGENCE = 100


class Trouble(Enum):
    """Why a step is refused."""

    NONFINITE = "NaN or Inf"
    DIVERGED = "divergence"


class Recovery:
    """Decides how to recover from a failed step, and carries out the decision."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._record = session.record
        self._policy = session.policy
        self.samples = SampleReports(session.record, session.cursor)
        # The global step at which an optimizer last failed partway through its step.
        self._failed_half_way_at: int | None = None
        self._optimizer_memory = OptimizerMemory(session.parts.optimizers.values())

    # --- refused steps

    def judge(self, series: str, attempt: StepAttempt) -> Decision | None:
        """Decide whether an attempt with finite values may be committed.

        Args:
            series: The name of the series of losses to which the attempt belongs; see `Steps.step`.
            attempt: The attempt.

        Returns:
            The decision to refuse the attempt, or None to commit it.
        """
        policy = self._policy
        counters = self._session.counters
        spikes = self._session.spikes
        if policy.spike_action == "off":
            return None
        facts = attempt.facts
        level = spikes.judge(series, facts.loss, facts.total)
        if level is Level.CALM:
            return None
        reason = f"loss {facts.loss:g} and gradient norm {facts.total:g} are unusually high"
        if level is Level.DIVERGED:
            reason = f"the loss has diverged ({facts.loss:g}; gradient norm {facts.total:g})"
        decision = decide_after_spike(
            level,
            action=policy.spike_action,
            # Include this step, which is counted only after it has been refused.
            hard_in_a_row=counters.spikes_in_a_row + 1,
            patience=policy.nonfinite_patience,
            rollbacks_in_a_row=counters.rollbacks_in_a_row,
            max_rollbacks=policy.max_rollbacks,
            reason=reason,
        )
        if decision is None:
            usual = spikes.usual_norm(series)
            spike = run_events.Spike(
                loss=facts.loss, grad_norm=facts.total, usual_norm=usual, level=level.name
            )
            self._record.emit(spike)
        return decision

    def after_refused_step(self, outcome: Outcome, batch: Any) -> str:
        """Skip the batch, roll back or stop, after a step was refused.

        Returns:
            Why the step was refused and what was done, for `StepResult.reason`.
        """
        self._session.counters.note_skipped_step()
        if outcome.decision is None:
            return self._after_nonfinite_step(outcome, batch)
        self._session.counters.note_spike()
        return self._carry_out(outcome.decision, outcome.decision.reason, Trouble.DIVERGED)

    def _after_nonfinite_step(self, outcome: Outcome, batch: Any) -> str:
        counters = self._session.counters
        loss = outcome.attempt.facts.loss
        reason = describe_nonfinite(loss, outcome.culprits, outcome.culprit_count)
        if outcome.provenance is not None:
            if not math.isfinite(loss):
                # NaN in the loss makes all gradients NaN, so naming parameters would not help.
                reason = describe_nonfinite(loss, [], 0)
            indices = self.samples.dataset_indices(outcome, batch)
            reason += f"; {self.samples.report_origin(outcome.provenance, indices)}"
        if outcome.loss_scale is not None:
            collapsed = outcome.loss_scale < 1.0
            kind = run_events.LossScaleCollapsed if collapsed else run_events.LossScaleLowered
            self._record.emit(kind(loss_scale=outcome.loss_scale, reason=reason))
            # fp16 training finds its loss scale by trial and error, so this is not a failure unless
            # the scale has collapsed.
            if not collapsed:
                return f"{reason}; fp16 loss scale lowered to {outcome.loss_scale:g}"
        counters.note_nonfinite()
        decision = decide_after_nonfinite(
            reason=reason,
            in_a_row=counters.nonfinite_in_a_row,
            patience=self._policy.nonfinite_patience,
            rollbacks_in_a_row=counters.rollbacks_in_a_row,
            max_rollbacks=self._policy.max_rollbacks,
        )
        return self._carry_out(
            decision, reason, Trouble.NONFINITE, is_in_batch=_is_in_batch(outcome.provenance)
        )

    def _carry_out(
        self, decision: Decision, reason: str, trouble: Trouble, *, is_in_batch: bool = False
    ) -> str:
        """Roll back, skip the batch, or raise an error, as decided.

        Args:
            decision: The decision.
            reason: Why the step was refused, as text.
            trouble: Why the step was refused, as a category.
            is_in_batch: Whether the batch itself contains NaN or Inf.

        Returns:
            Why the step was refused and what was done, as text.

        Raises:
            NonFiniteError: H501 if the run must stop because of NaN or Inf.
            DivergenceError: H503 if the run must stop because the loss has diverged.
        """
        self._record.emit(self._with_position(decision, trouble))
        if isinstance(decision, RollBack):
            if self._roll_back(trouble):
                return f"{reason}; rolled back to step {self._record.global_step}"
            decision = self._decide_without_earlier_state(decision, reason, trouble)
            self._record.emit(self._with_position(decision, trouble))
        if isinstance(decision, Stop):
            # If the script catches the error and continues, assume that it has fixed the cause, and
            # start counting failures from 0.
            self._session.counters.end_rows()
            if trouble is Trouble.DIVERGED:
                # Diverged weights are never saved.
                self._session.state.spoil()
            raise self._error_of_lasting_trouble(decision.reason, trouble, is_in_batch=is_in_batch)
        return reason

    def _decide_without_earlier_state(
        self, decision: RollBack, reason: str, trouble: Trouble
    ) -> Decision:
        """Return the decision that replaces a rollback if there is no earlier state."""
        if trouble is Trouble.DIVERGED:
            return SkipStep(
                reason=f"{reason}; there is no earlier state to return to",
                promise="changes training",
            )
        return Stop(
            reason=f"{decision.reason}; there is no checkpoint to return to",
            promise=decision.promise,
        )

    def _roll_back(self, trouble: Trouble) -> bool:
        """Roll back to the last state before the first sign of trouble.

        The loader does not return to the position of that state, so the batches since then are
        skipped.

        Args:
            trouble: Why the last step was refused.

        Returns:
            Whether there was a state to roll back to.
        """
        session = self._session
        failed_at = self._record.global_step
        training = self._restore_state_before(trouble)
        if training is None:
            return False
        steps_to_overcome = self._policy.nonfinite_patience or 1
        if trouble is Trouble.DIVERGED:
            steps_to_overcome = _STEPS_TO_OVERCOME_DIVERGENCE
        session.counters.note_rollback(failed_at, steps_to_overcome)
        session.spikes.return_to(training["spikes"])
        self._record.emit(
            run_events.RolledBack(from_step=failed_at, to_step=self._record.global_step)
        )
        return True

    def _restore_state_before(self, trouble: Trouble) -> dict[str, Any] | None:
        """Restore the newest state that predates the trouble, or the newest of all if none does.

        The cause of a divergence may precede its first sign by some steps. Therefore, only a state
        from at least `GOOD_AFTER` steps before the first sign is certain to be good. If there is no
        such state, the newest state before the first sign is used. If the run then fails again, a
        second rollback goes further back.

        Args:
            trouble: Why the last step was refused.

        Returns:
            The guard's own part of the restored state, or None if there was no state to restore.
        """
        first_sign = self._record.global_step - (self._session.spikes.suspicious_since() or 0)
        certainly_good = first_sign - GOOD_AFTER
        candidates: list[int | None] = [first_sign, None]
        if trouble is Trouble.DIVERGED:
            candidates.insert(0, certainly_good)
        for before_step in candidates:
            training = self._session.restoration.roll_back(
                rewind_data=False, before_step=before_step, trusted=before_step == certainly_good
            )
            if training is not None:
                return training
        return None

    def after_refused_save(self, why: str) -> None:
        """Roll back or stop after a save was refused because the state contains NaN or Inf.

        This can happen even if every step looked good. For example, a finite gradient of 1e22 makes
        Adam's second moment infinite, since the moment is computed from the gradient's square.

        Args:
            why: A message that names the tensors with NaN or Inf.

        Raises:
            NonFiniteError: H501 if the limit on rollbacks is reached or there is no earlier state.
        """
        decision = decide_after_nonfinite(
            reason=why,
            in_a_row=1,
            patience=1,
            rollbacks_in_a_row=self._session.counters.rollbacks_in_a_row,
            max_rollbacks=self._policy.max_rollbacks,
        )
        self._record.emit(self._with_position(decision, Trouble.NONFINITE))
        if isinstance(decision, RollBack) and self._roll_back(Trouble.NONFINITE):
            return
        self._session.state.spoil()
        raise self._error_of_lasting_trouble(why, Trouble.NONFINITE)

    def _error_of_lasting_trouble(
        self, reason: str, trouble: Trouble, *, is_in_batch: bool = False
    ) -> HoldfastError:
        """Return the error that stops a run whose trouble has persisted after all rollbacks.

        Args:
            reason: Why the last step was refused, and why the run stops.
            trouble: Why the last step was refused, as a category.
            is_in_batch: Whether the batch itself contains NaN or Inf.
        """
        max_rollbacks = self._policy.max_rollbacks
        if trouble is Trouble.DIVERGED:
            limit = f"all rollbacks are used up (max_rollbacks={max_rollbacks})"
            if max_rollbacks == 0:
                limit = "the policy allows no rollback (max_rollbacks=0)"
            return DivergenceError(
                reason,
                limit=limit,
                fix=(
                    "lower the learning rate, set max_grad_norm, or lengthen the warm-up; if the"
                    ' loss is meant to jump, leave spike_action at "warn". The newest checkpoint'
                    " predates the divergence."
                ),
                rule="H503",
            )
        fix = (
            "lower the learning rate, set max_grad_norm, or check the data of the batches that the"
            " events name. The newest checkpoint is finite."
        )
        if is_in_batch:
            fix = (
                "repair the data: the batch itself contains NaN or Inf, which no setting"
                " can change. `holdfast events RUN_DIR --kind nonfinite_origin` names the"
                " samples; Policy(drop_nonfinite_samples=True) drops them. The newest"
                " checkpoint is finite."
            )
        return NonFiniteError(
            reason,
            limit=(
                f"nonfinite_patience={self._policy.nonfinite_patience} and"
                f" max_rollbacks={max_rollbacks} are used up"
            ),
            fix=fix,
            rule="H501",
        )

    def _with_position(self, decision: Decision, trouble: Trouble) -> Decision:
        """Return a decision with the position in the data, the trouble, and the error's rule.

        Only a `Stop` has a rule.
        """
        facts = {**self.samples.position(), "nonfinite": trouble is Trouble.NONFINITE}
        if isinstance(decision, Stop):
            facts["rule"] = "H503" if trouble is Trouble.DIVERGED else "H501"
        return replace(decision, **facts)

    # --- optimizers that failed partway

    def after_partial_step(self, partial: PartialOptimizerStep, *, rewind_data: bool) -> str:
        """Roll back to the last good state after an optimizer ran out of memory in its step.

        Args:
            partial: The error that the step engine raised.
            rewind_data: Whether the loop can also return to the data position of that state.

        Returns:
            Why the step was undone, for `StepResult.reason`.

        Raises:
            OutOfMemoryError: H402 if an optimizer has failed twice at the same step, or if the run
                cannot roll back.
        """
        at_step = self._record.global_step
        twice = self._failed_half_way_at == at_step
        self._session.counters.note_out_of_memory()
        obstacle: str | None = "it happened twice at this step"
        if not twice:
            obstacle = self._return(rewind_data=rewind_data)
        if obstacle is not None:
            # `at_step` is the number of committed steps, so the failed step is the next one.
            raise self._out_of_memory_error(
                f"in the middle of step {at_step + 1} ({partial})", obstacle
            )
        self._failed_half_way_at = at_step
        cursor = self._session.cursor
        promise: Promise = "changes training"
        rewind_data = rewind_data and cursor is not None and cursor.goes_back
        if rewind_data:
            # The steps since the restored state are repeated with optimizers that update one tensor
            # at a time, which may round differently from the foreach implementation.
            promise = "equal up to rounding" if self._updates_many_at_once() else "bit-exact"
        self._record.emit(RollBack(reason=str(partial), promise=promise, rewind_data=rewind_data))
        self._session.counters.note_rollback(at_step, self._policy.nonfinite_patience or 1)
        self._optimizer_memory.release()
        return f"{partial}; returned to step {self._record.global_step}"

    def after_failed_step(self, optimizer: str) -> None:
        """Return to the newest checkpoint after ``step()`` of an optimizer has raised an error.

        The loop called ``step()`` itself, and has caught the error. Part of the weights may have
        been updated, so the current state must not be saved.

        Args:
            optimizer: The name of the optimizer.

        Raises:
            BatchError: H213 if an optimizer has failed twice at the same step, or if there is no
                checkpoint.
        """
        at_step = self._record.global_step
        reason = f"optimizer {optimizer!r} raised an error in step {at_step + 1}"
        obstacle: str | None = "it happened twice at this step"
        if self._failed_half_way_at != at_step:
            obstacle = self._return(rewind_data=True)
        if obstacle is not None:
            self._session.state.spoil()
            raise BatchError(
                reason,
                limit=f"its weights may be only partly updated, and {obstacle}",
                fix=(
                    "fix the cause of the error, which the script has caught, and start again"
                    " from the newest checkpoint."
                ),
                rule="H213",
            )
        self._failed_half_way_at = at_step
        self._session.state.rewound()
        cursor = self._session.cursor
        goes_back = cursor is not None and cursor.goes_back
        self._record.emit(
            RollBack(
                reason=reason,
                promise="bit-exact" if goes_back else "changes training",
                rewind_data=goes_back,
            )
        )
        self._session.counters.note_rollback(at_step, self._policy.nonfinite_patience or 1)

    def roll_back_again(self) -> None:
        """Roll back to the last good state again, at the end of the loop body.

        After the first rollback, the rest of the loop body has run and may have changed the
        restored state.

        Raises:
            OutOfMemoryError: H402 if the run cannot roll back.
        """
        obstacle = self._return(rewind_data=True)
        if obstacle is not None:
            self._session.state.spoil()
            raise self._out_of_memory_error(
                f"in step {self._record.global_step + 1}, which was undone", obstacle
            )
        self._optimizer_memory.release()

    def _return(self, *, rewind_data: bool) -> str | None:
        """Roll back to the last good state.

        Returns:
            None if the run has rolled back, otherwise the reason why it could not.
        """
        try:
            returned = self._session.restoration.roll_back(rewind_data=rewind_data)
        except Exception as error:
            message = find_out_of_memory(error)
            if message is None:
                raise
            failure = error
        else:
            return "there is no checkpoint to return to" if returned is None else None
        clear_exception_frames(failure)
        return f"there is not enough memory to read the checkpoint ({message})"

    def _updates_many_at_once(self) -> bool:
        """Return whether any optimizer uses torch's foreach implementation.

        On accelerators, torch uses that implementation by default, with ``foreach=None``.
        """
        is_default = self._session.parts.device_type() != "cpu"
        groups = [
            group
            for optimizer in self._session.parts.optimizers.values()
            for group in optimizer.param_groups
        ]
        settings = [group.get("foreach", False) for group in groups if not group.get("fused")]
        return any(foreach or (foreach is None and is_default) for foreach in settings)

    def _out_of_memory_error(self, when: str, obstacle: str) -> OutOfMemoryError:
        """Record that the run stops, and return an H402 error for an optimizer out of memory.

        Args:
            when: When the optimizer ran out of memory, such as ``"in the middle of step 7"``.
            obstacle: Why the run cannot return to an earlier state, as a clause.
        """
        reason = f"an optimizer ran out of memory {when}; {obstacle}"
        self._record.emit(Stop(reason=reason, promise="bit-exact", rule="H402"))
        return OutOfMemoryError(
            f"the optimizer ran out of memory {when}",
            limit=f"weights and moments are only partly updated, and {obstacle}",
            fix=(
                "leave more memory for the optimizer (fused=True, a smaller model or optimizer) and"
                " start again from the newest checkpoint, if there is one."
            ),
            rule="H402",
        )


def _is_in_batch(provenance: Provenance | None) -> bool:
    """Return whether the NaN or Inf of a step was in its batch already."""
    if provenance is None or provenance.origin is None:
        return False
    return provenance.origin.kind == "input"
