"""`Guard.step`: the engine makes a step, and what belongs to the run around it happens here.

`Steps` counts and records a step. `Recovery` decides what follows a step that was refused or failed
half-way: skip its batch, return to an earlier state, or stop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from holdfast.core.errors import (
    BatchError,
    DivergenceError,
    HoldfastError,
    LoaderError,
    NonFiniteError,
    OutOfMemoryError,
)
from holdfast.core.events import run_events
from holdfast.core.events.data import Promise
from holdfast.core.events.decisions import Decision, RollBack, SkipStep, Stop
from holdfast.guard.result import Outcome, PartialOptimizerStep, Provenance, StepAttempt, StepResult
from holdfast.guard.run.session import Session
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.guard.step.engine import StepEngine
from holdfast.loader.splitting import Split
from holdfast.memory.oom import clear_exception_frames, find_out_of_memory, naming_lack_of_memory
from holdfast.numerics.decisions import (
    decide_after_nonfinite,
    decide_after_spike,
    describe_nonfinite,
)
from holdfast.numerics.spikes import GOOD_AFTER, Level
from holdfast.recorder.black_box import StepMark

# A divergence is over after this many further steps. PaLM (2022) restarted about 100 steps before a
# spike and skipped 200 to 500 batches.
_BEYOND_SPIKES = 100


class Recovery:
    """Decides what follows a step that went wrong, and carries it out."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._record = session.record
        self._policy = session.policy
        self._failed_half_way_at: int | None = None
        session.ranks.spare_memory = self._spare_optimizer_memory

    # --- steps that left no trace

    def judge(self, series: str, attempt: StepAttempt) -> Decision | None:
        """Decide whether an attempt with finite values may be committed.

        Args:
            series: The name of the series of losses that the attempt belongs to.
            attempt: The attempt.

        Returns:
            Why it must not be committed, or None if it may.
        """
        policy, counters, spikes = self._policy, self._session.counters, self._session.spikes
        if policy.spike_action == "off":
            return None
        facts = attempt.facts
        level = spikes.judge(series, facts.loss, facts.total)
        if level is Level.CALM:
            return None
        reason = f"loss {facts.loss:g} and gradient norm {facts.total:g} stand out"
        if level is Level.DIVERGED:
            reason = (
                f"the loss has run away and stays there ({facts.loss:g}; gradient norm"
                f" {facts.total:g})"
            )
        decision = decide_after_spike(
            level,
            action=policy.spike_action,
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
        """Carry out the decision about a step that was refused.

        Returns:
            Why the step was refused and what was done, as `StepResult.reason`.
        """
        self._session.counters.skipped_steps += 1
        if outcome.decision is None:
            return self._after_nonfinite_step(outcome, batch)
        self._session.counters.spikes_in_a_row += 1
        return self._carry_out(outcome.decision, outcome.decision.reason, DivergenceError)

    def _after_nonfinite_step(self, outcome: Outcome, batch: Any) -> str:
        counters = self._session.counters
        loss = outcome.attempt.facts.loss
        reason = describe_nonfinite(loss, outcome.culprits, outcome.culprit_count)
        if outcome.provenance is not None:
            if not math.isfinite(loss):
                # A NaN in the loss makes all gradients NaN, so naming parameters says nothing.
                reason = describe_nonfinite(loss, [], 0)
            reason = (
                f"{reason};"
                f" {self.report_origin(outcome.provenance, self._dataset_indices(outcome, batch))}"
            )
        if outcome.loss_scale is not None:
            collapsed = outcome.loss_scale < 1.0
            kind = run_events.LossScaleCollapsed if collapsed else run_events.LossScaleLowered
            self._record.emit(kind(loss_scale=outcome.loss_scale, reason=reason))
            # fp16 training finds its loss scale by trial, so this is not a sign of trouble.
            if not collapsed:
                return f"{reason}; fp16 loss scale lowered to {outcome.loss_scale:g}"
        counters.nonfinite_in_a_row += 1
        decision = decide_after_nonfinite(
            reason=reason,
            in_a_row=counters.nonfinite_in_a_row,
            patience=self._policy.nonfinite_patience,
            rollbacks_in_a_row=counters.rollbacks_in_a_row,
            max_rollbacks=self._policy.max_rollbacks,
        )
        return self._carry_out(decision, reason, NonFiniteError)

    def _carry_out(self, decision: Decision, reason: str, error: type[HoldfastError]) -> str:
        counters = self._session.counters
        self._record.emit(self._placed(decision, error))
        if isinstance(decision, RollBack):
            if self._roll_back(spiked=error is DivergenceError):
                return f"{reason}; rolled back to step {self._record.global_step}"
            if error is DivergenceError:
                decision = SkipStep(
                    reason=f"{reason}; nothing to return to", promise="changes training"
                )
            else:
                decision = Stop(
                    reason=f"{decision.reason}; no checkpoint to return to",
                    promise=decision.promise,
                )
            self._record.emit(self._placed(decision, error))
        if isinstance(decision, Stop):
            # If the script catches the error and continues, it has changed something.
            counters.nonfinite_in_a_row = 0
            counters.spikes_in_a_row = 0
            counters.rollbacks_in_a_row = 0
            if error is DivergenceError:
                # Diverged weights are never saved.
                self._session.state.spoil()
            raise self._persistent(decision.reason, error)
        return reason

    def _roll_back(self, *, spiked: bool = False) -> bool:
        """Return to the last state before the first sign of trouble, and skip the batches since.

        Args:
            spiked: Whether the trouble is a divergence, and not NaN or Inf.

        Returns:
            Whether there was a state to return to.
        """
        session, failed_at = self._session, self._record.global_step
        since = session.spikes.suspicious_since() or 0
        # The cause of a divergence may lie some steps before its first sign, so a state counts as
        # surely good only `GOOD_AFTER` steps later. If there is none, the newest state before the
        # first sign will do; a second rollback goes further back.
        surely_good = failed_at - since - GOOD_AFTER
        for before in ([surely_good] if spiked else []) + [failed_at - since, None]:
            training = session.roll_back(
                rewind_data=False, before_step=before, trusted=before == surely_good
            )
            if training is not None:
                break
        else:
            return False
        session.counters.note_rollback(
            failed_at, _BEYOND_SPIKES if spiked else self._policy.nonfinite_patience or 1
        )
        session.spikes.return_to(training["spikes"])
        self._record.emit(
            run_events.RolledBack(from_step=failed_at, to_step=self._record.global_step)
        )
        return True

    def after_refused_save(self, why: str) -> None:
        """Return to a checkpoint, or stop, because the state to save holds NaN or Inf.

        Every step had looked sound. A finite gradient of 1e22, for example, has an infinite square,
        which is Adam's second moment.

        Args:
            why: Which tensors hold NaN or Inf.
        """
        decision = decide_after_nonfinite(
            reason=why,
            in_a_row=1,
            patience=1,
            rollbacks_in_a_row=self._session.counters.rollbacks_in_a_row,
            max_rollbacks=self._policy.max_rollbacks,
        )
        self._record.emit(self._placed(decision, NonFiniteError))
        if isinstance(decision, RollBack) and self._roll_back():
            return
        self._session.state.spoil()
        raise self._persistent(why, NonFiniteError)

    def _persistent(self, reason: str, error: type[HoldfastError]) -> HoldfastError:
        if error is DivergenceError:
            return DivergenceError(
                reason,
                limit=f"max_rollbacks={self._policy.max_rollbacks} are used up",
                fix=(
                    "lower the learning rate, set max_grad_norm, lengthen the warm-up; leave"
                    ' spike_action at "warn" if the loss is meant to jump; the newest checkpoint is'
                    " from before."
                ),
                rule="H503",
            )
        spent = (
            f"nonfinite_patience={self._policy.nonfinite_patience} and"
            f" max_rollbacks={self._policy.max_rollbacks}"
        )
        return NonFiniteError(
            reason,
            limit=f"{spent} are used up",
            fix=(
                "lower the learning rate, set max_grad_norm, check the data of the batches that the"
                " events name; the newest checkpoint is finite."
            ),
            rule="H501",
        )

    # --- samples

    def report_origin(self, provenance: Provenance, indices: Sequence[int] | None) -> str:
        """Record where NaN or Inf came from, and return it as a message.

        Args:
            provenance: What a replay of the step has shown.
            indices: The dataset index of each sample in the batch, or None if they are not known.
        """
        where = f"{provenance.where}: " if provenance.where else ""
        if provenance.origin is None:
            self._record.emit(run_events.NonfiniteNotTraced(why=where + provenance.problem))
            return where + (
                provenance.problem if where else f"its origin is not known: {provenance.problem}"
            )
        samples = provenance.samples
        at = _at_places(indices, samples)
        self._record.emit(
            run_events.NonfiniteOrigin(
                origin=asdict(provenance.origin), bad_samples=samples, dataset_indices=at
            )
        )
        if not samples:
            return f"{where}{provenance.origin}"
        known = "" if at is None else f" (dataset index {_listed(at)})"
        return (
            f"{where}{provenance.origin}; without sample {_listed(samples)} of the batch{known} it"
            " is finite"
        )

    def dropped(self, outcome: Outcome, batch: Any) -> None:
        """Record that a step was made without some samples of its batch, and quarantine them."""
        provenance = outcome.provenance
        assert provenance is not None
        indices = self._dataset_indices(outcome, batch)
        reason = self.report_origin(provenance, indices)
        self._record.emit(run_events.SamplesDropped(reason=reason, **self._place()))
        cursor = self._session.cursor
        at = _at_places(indices, provenance.samples)
        if cursor is not None and at is not None:
            try:
                cursor.quarantine(at, reason)
            except LoaderError as error:
                # The step is committed; samples that are not quarantined are dropped each time.
                self._record.emit(run_events.QuarantineFull(error=error.what))

    def micro_batches_dropped(self, outcome: Outcome, batch: Any) -> None:
        """Record that a step was made without micro-batches whose loss was NaN or Inf."""
        ranges = outcome.attempt.dropped
        indices = self._dataset_indices(outcome, batch)
        if indices is not None:
            # The attempt was made without these, so its ranges count only the samples that were
            # left.
            indices = [index for place, index in enumerate(indices) if place not in outcome.dropped]
        at = _at_places(indices, [place for start, end in ranges for place in range(start, end)])
        self._record.emit(
            run_events.MicroBatchDropped(samples=tuple(ranges), dataset_indices=at, **self._place())
        )

    def _dataset_indices(self, outcome: Outcome, batch: Any) -> list[int] | None:
        """Return the dataset index of each sample of the step's batch, or None if not known."""
        cursor = self._session.cursor
        if cursor is None:
            return None
        # The outcome counts the samples of its last attempt, which may have been made without some
        # of them.
        size = None if outcome.size is None else outcome.size + len(outcome.dropped)
        return cursor.sample_indices(batch, size)

    def _placed(self, decision: Decision, error: type[HoldfastError]) -> Decision:
        """Return a decision with its position in the data, and a `Stop` with its error's rule."""
        rule: dict[str, Any] = {"rule": "H503" if error is DivergenceError else "H501"}
        return replace(decision, **self._place(), **(rule if isinstance(decision, Stop) else {}))

    def _place(self) -> dict[str, Any]:
        cursor = self._session.cursor
        return {} if cursor is None else {"epoch": cursor.epoch, "batch": cursor.batches}

    # --- an optimizer that failed half-way

    def after_partial_step(self, partial: PartialOptimizerStep, *, rewind_data: bool) -> str:
        """Return to the last good state after an optimizer ran out of memory half-way.

        Args:
            partial: The failure.
            rewind_data: Whether the loop can also return to the batches of that state.

        Returns:
            Why the step was undone, as `StepResult.reason`.
        """
        at_step = self._record.global_step
        twice = self._failed_half_way_at == at_step
        self._session.counters.out_of_memory += 1
        hindered = (
            "it happened twice at this step" if twice else self._return(rewind_data=rewind_data)
        )
        if hindered is not None:
            raise self._no_way_back(f"in the middle of step {at_step + 1} ({partial})", hindered)
        self._failed_half_way_at = at_step
        cursor = self._session.cursor
        promise: Promise = "changes training"
        rewind_data = rewind_data and cursor is not None and cursor.goes_back
        if rewind_data:
            # The steps are made again, and optimizers then update one tensor at a time.
            promise = "equal up to rounding" if self._updates_many_at_once() else "bit-exact"
        self._record.emit(RollBack(reason=str(partial), promise=promise, rewind_data=rewind_data))
        self._session.counters.note_rollback(at_step, self._policy.nonfinite_patience or 1)
        self._spare_optimizer_memory()
        return f"{partial}; returned to step {self._record.global_step}"

    def go_back_again(self) -> None:
        """Return to the last good state once more.

        The rest of the loop body has run on the restored state and may have changed it.
        """
        hindered = self._return(rewind_data=True)
        if hindered is not None:
            self._session.state.spoil()
            raise self._no_way_back(
                f"in step {self._record.global_step + 1}, which was undone", hindered
            )
        self._spare_optimizer_memory()

    def _return(self, *, rewind_data: bool) -> str | None:
        """Return to the last good state.

        Returns:
            None, or why that was impossible.
        """
        try:
            returned = self._session.roll_back(rewind_data=rewind_data)
        except Exception as error:
            found = find_out_of_memory(error)
            if found is None:
                raise
            failure = error
        else:
            return "there is no checkpoint to return to" if returned is None else None
        clear_exception_frames(failure)
        return f"memory does not suffice to read the checkpoint ({found})"

    def _updates_many_at_once(self) -> bool:
        """Return whether an optimizer uses torch's foreach implementation.

        On accelerators torch chooses it by default, that is, for ``foreach=None``.
        """
        is_default = self._session.parts.device_type() != "cpu"
        groups = [
            group
            for optimizer in self._session.parts.optimizers.values()
            for group in optimizer.param_groups
        ]
        settings = [group.get("foreach", False) for group in groups if not group.get("fused")]
        return any(foreach or (foreach is None and is_default) for foreach in settings)

    def _spare_optimizer_memory(self) -> None:
        """Let optimizers update one tensor at a time, which needs the least temporary memory."""
        for optimizer in self._session.parts.optimizers.values():
            for group in optimizer.param_groups:
                if not group.get("fused") and "foreach" in group:
                    group["foreach"] = False

    def _no_way_back(self, when: str, hindered: str) -> OutOfMemoryError:
        reason = f"an optimizer ran out of memory {when}; {hindered}"
        self._record.emit(Stop(reason=reason, promise="bit-exact", rule="H402"))
        return OutOfMemoryError(
            f"the optimizer ran out of memory {when}",
            limit=f"its weights and moments are half changed, and {hindered}",
            fix=(
                "leave the optimizer more memory (fused=True, a smaller model or optimizer) and"
                " start again: a checkpoint, if there is one, is from before."
            ),
            rule="H402",
        )


def _at_places(indices: Sequence[int] | None, places: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dataset indices of the samples at some places of a batch, if they are known."""
    return None if indices is None else tuple(indices[place] for place in places)


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:5]))}{', ...' * (len(numbers) > 5)}"


class Steps:
    """Makes the steps of one run with the step engine.

    ``accumulation`` uses its attributes to make a step batch by batch.
    """

    def __init__(self, session: Session, engine: StepEngine, recovery: Recovery) -> None:
        self.session = session
        self.engine = engine
        self.recovery = recovery
        self.parts = session.parts
        self._record = session.record
        self._clock = session.clock

    def step(
        self, batch: Any, loss_fn: LossFunction, names: Sequence[str], *, split: Split | None
    ) -> StepResult:
        """Make a step; see `Guard.step`."""
        state = self.session.state
        diagnosis = self.engine.diagnosis
        started = self._clock.monotonic_seconds()
        if not callable(loss_fn):
            raise BatchError(
                f"loss_fn is a {type(loss_fn).__name__}",
                limit=(
                    "it is called with the batch, or with parts of it, as often as the step needs"
                ),
                fix=(
                    "pass a function: guard.step(batch, lambda batch: ...) computes the loss, and"
                    " runs no backward."
                ),
                rule="H201",
            )
        # The name of the series of losses: those of this function and these optimizers. It is the
        # same after a restart.
        optimizer = "+".join(names)
        series = f"{optimizer} {self.engine.attempts.safety.describe(loss_fn)}"
        self._record.step(
            StepMark.BEGUN, self.session.ladder.plan.micro_batch_size, None, None, 0.0
        )
        try:
            # The error must have its final form when the handler below saves the weights.
            with naming_lack_of_memory("making a step"):
                judge = partial(self.recovery.judge, series)
                outcome = self.engine.run(batch, loss_fn, names, split=split, judge=judge)
                if outcome.committed:
                    self._committed(outcome, batch, names, series)
        except PartialOptimizerStep as error:
            half_way = error
        except BaseException as error:
            state.step_failed()
            if isinstance(error, OutOfMemoryError) and self.engine.ranks.world_size == 1:
                # The weights are those of the last step.
                self.session.saving.save()
            raise
        else:
            self.session.counters.out_of_memory += outcome.out_of_memory
            reason = None
            if not outcome.committed:
                state.skipped()
                reason = self.recovery.after_refused_step(outcome, batch)
            diagnosis.step_ended(outcome, names, reason)
            facts = outcome.attempt.facts
            seconds = self._clock.monotonic_seconds() - started
            self._record.step(
                StepMark.COMMITTED if outcome.committed else StepMark.SKIPPED,
                outcome.attempt.micro_batch_size,
                facts.loss,
                facts.total,
                seconds,
                "" if len(self.parts.optimizers) == 1 else optimizer,
            )
            return outcome.result(reason)
        return self._undone(half_way)

    def _undone(self, partial: PartialOptimizerStep) -> StepResult:
        """Return to an earlier state after an optimizer ran out of memory half-way.

        Called outside of the exception handler, which would keep the frames and their memory.
        """
        state = self.session.state
        try:
            reason = self.recovery.after_partial_step(partial, rewind_data=state.in_loop)
        except BaseException:
            state.spoil()
            raise
        if state.in_loop:
            state.rewound()
        return partial.outcome.result(reason)

    def _committed(self, outcome: Outcome, batch: Any, names: Sequence[str], series: str) -> None:
        """Do everything that belongs to a committed step.

        Nothing may be saved before the end of it.
        """
        session, facts = self.session, outcome.attempt.facts
        self._record.global_step += 1
        if session.policy.spike_action != "off":
            session.spikes.accepted(series, facts.loss, facts.total)
        if outcome.attempt.dropped:
            self.recovery.micro_batches_dropped(outcome, batch)
        if outcome.dropped and outcome.provenance is not None:
            self.recovery.dropped(outcome, batch)
        session.counters.note_good_step(self._record.global_step)
        if facts.overflowed:
            self._record.emit(run_events.NormOverflowed(total=facts.total))
        session.schedules.after_step(names)
        session.check_new_state(names)
        larger = session.ladder.decide_after_step(
            batch_size=outcome.size or 1, attempts=outcome.attempts
        )
        if larger is not None:
            self._record.emit(larger)
        session.state.committed()
