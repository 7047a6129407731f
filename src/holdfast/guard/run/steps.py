"""Run steps, and settle those that are decided late.

`Steps` runs a step with the engine, counts it and records it. If a step may be decided late (see
``decision``), it remains undecided until it is settled: its result is read, and the step is then
recorded or, if it was refused, repeated. This happens in the next step after its backward pass, or
when `Steps.settle` is called, whichever comes first.

`JointSteps` adapts this to several ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from holdfast.core.errors import BatchError, HoldfastError, OutOfMemoryError
from holdfast.core.events import run_events
from holdfast.core.events.decisions import Decision, SkipStep
from holdfast.guard.decision import UnreadAttempt, has_reproduced
from holdfast.guard.phase import Phase
from holdfast.guard.result import (
    Outcome,
    PartialOptimizerStep,
    Provenance,
    StepResult,
)
from holdfast.guard.run.recovery import Recovery
from holdfast.guard.run.session import Session
from holdfast.guard.run.surroundings import Surroundings
from holdfast.guard.run.undecided import (
    LaunchedAttempt,
    RefusedAttempt,
    Settlement,
    StepCall,
    UndecidedResult,
    UndecidedStep,
)
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.guard.state.average_use import AverageUse
from holdfast.guard.state.work import Work
from holdfast.guard.step.engine import StepEngine
from holdfast.guard.timing import DecisionTiming
from holdfast.loader.random_state import (
    RandomState,
    capture,
    changed_generators,
    restore,
    with_generators,
)
from holdfast.loader.splitting import Split
from holdfast.memory.oom import naming_lack_of_memory
from holdfast.memory.tensors import versions_of
from holdfast.numerics.gradients import GradientFacts
from holdfast.recorder.black_box import StepMark

# Why a step was refused, for a thread that reads the result before the step has been repeated.
_NOT_RECOVERED = "the device has refused the step, which has not been repeated yet"
_CHANGED_SINCE = (
    "the batch was changed in place before the result of the step was read, so the step cannot be"
    " replayed"
)


class _EarlierStepRefused(BaseException):
    """The loss function of a step has asked for the result of the step before, which was refused.

    This ends the attempt, which is then made again. It is not an `Exception`, so that an exception
    handler in the loss function does not catch it.
    """


class Steps:
    """Implements `Guard.step` with the step engine.

    `Accumulation` also uses this object's attributes, to run one step over several batches.

    Args:
        session: The session of the run.
        engine: The object that makes attempts and commits or undoes them.
        recovery: The object that decides how to continue after a refused step.
        timing: The object that decides when the result of a step is read.
    """

    def __init__(
        self, session: Session, engine: StepEngine, recovery: Recovery, timing: DecisionTiming
    ) -> None:
        self.session = session
        self.engine = engine
        self.recovery = recovery
        self.parts = session.parts
        self._timing = timing
        self._record = session.record
        self._clock = session.clock
        self._devices = session.parts.devices()
        self._modules = [
            module for model in session.parts.models.values() for module in model.modules()
        ]
        self._device_type = session.parts.device_type()
        # On accelerators, a repeated step may differ in the last bits.
        self._is_exact = self._device_type == "cpu"
        # The last step, if its result has not been read yet.
        self._undecided: UndecidedStep | None = None
        if timing.may_decide_late:
            AverageUse(session.parts.averages.values(), self._settle_before_average_use)

    def step(
        self, batch: Any, loss_fn: LossFunction, names: Sequence[str], *, split: Split | None
    ) -> StepResult:
        """Run a step; see `Guard.step`.

        Args:
            batch: The batch.
            loss_fn: The loss function.
            names: The names of the optimizers to step.
            split: The position of the batch dimension, or None to use the guard's `split`.
        """
        call = self._begin_call(batch, loss_fn, names, split)
        self.session.schedules.before_step(names)
        if not self._timing.may_decide_late:
            self._note_begin()
            return self._run(call, decides_now=True)
        # Ask before settling: a step that may be late settles the previous one only after its own
        # backward pass.
        decides_now = self._timing.must_decide_now(batch, names, is_calm=self._is_calm())
        self._note_begin()
        if not decides_now:
            return self._run(call, decides_now=False)
        generators = self._timing.generators
        before = capture(self._devices)
        generators.note_next_step(before)
        # The previous step must be decided before this one can be.
        self.settle()
        result = self._run(call, decides_now=True)
        generators.note_step(before, capture(self._devices))
        return result

    def _is_calm(self) -> bool:
        """Return whether no divergence is suspected."""
        return self.session.spikes.is_calm()

    def _note_begin(self) -> None:
        """Record that a step begins."""
        micro_batch_size = self.session.ladder.plan.micro_batch_size
        self._record.step(StepMark.BEGUN, micro_batch_size, None, None, 0.0)

    def _begin_call(
        self, batch: Any, loss_fn: LossFunction, names: Sequence[str], split: Split | None
    ) -> StepCall:
        """Check the loss function, and return the arguments of a call to `step`."""
        started = self._clock.monotonic_seconds()
        if not callable(loss_fn):
            raise BatchError(
                f"loss_fn is a {type(loss_fn).__name__}",
                limit=(
                    "guard.step calls it with the batch, or with parts of it, as often as necessary"
                ),
                fix=(
                    "pass a function that computes the loss without running backward:"
                    " guard.step(batch, lambda batch: ...)."
                ),
                rule="H201",
            )
        # The name must be the same after a restart, since it is a key of the statistics in
        # checkpoints.
        series = f"{'+'.join(names)} {self.engine.attempts.safety.describe(loss_fn)}"
        return StepCall(
            batch=batch,
            loss_fn=loss_fn,
            names=names,
            split=split,
            series=series,
            started=started,
        )

    def _run(
        self,
        call: StepCall,
        *,
        decides_now: bool,
        first_facts: GradientFacts | None = None,
        failed_work: Work | None = None,
    ) -> StepResult:
        """Run a step, and recover from an error.

        Args:
            call: The arguments of the step.
            decides_now: Whether to read the result before the optimizers run.
            first_facts: The facts of the step when it was first run, if this is a repetition.
            failed_work: The input of the step when it was first run, if it then failed on a rank.
        """
        try:
            # Out-of-memory errors from all allocators must be converted to `OutOfMemoryError`
            # before the handlers below check the type of the error.
            with naming_lack_of_memory("running a step"):
                outcome: Outcome | UndecidedStep
                if decides_now:
                    outcome = self._run_now(call, first_facts, failed_work)
                else:
                    outcome = self._launch_or_decide(call)
                if isinstance(outcome, UndecidedStep):
                    return self._leave_undecided(outcome)
                if outcome.committed:
                    self._committed(outcome, call)
                    self.session.state.committed()
        except PartialOptimizerStep as error:
            partial_step = error
        except BaseException as error:
            self.session.state.step_failed()
            if isinstance(error, OutOfMemoryError) and self.engine.ranks.world_size == 1:
                # The weights are still those of the last committed step, so they can be saved.
                self.session.saving.save()
            raise
        else:
            return self._end(outcome, call)
        return self._undo_partial_step(partial_step)

    def _run_now(
        self, call: StepCall, first_facts: GradientFacts | None, failed_work: Work | None
    ) -> Outcome:
        """Run a step, and read its result before the optimizers run."""
        work = self.engine.begin(call.batch, call.loss_fn, call.names, call.split)
        if failed_work is not None:
            work.continue_from(failed_work)
        attempt = self.engine.attempt(work)
        judge = partial(self.recovery.judge, call.series)
        if first_facts is None or self._can_decide_by(attempt.facts, first_facts):
            return self.engine.finish(work, attempt, judge)
        if first_facts.nonfinite:
            # The first run was not finite. A finite repetition means that something it reads has
            # changed since, so the step stays refused.
            self.engine.loss_scale.note_nonfinite()
            return self.engine.finish(work, replace(attempt, facts=first_facts), judge)
        return self.engine.finish(work, attempt, lambda _: _skip_not_reproduced(first_facts))

    def _can_decide_by(self, facts: GradientFacts, first_facts: GradientFacts) -> bool:
        """Return whether a repeated step may be decided by its own facts.

        A repetition with NaN or Inf is refused in any case.
        """
        return facts.nonfinite or has_reproduced(first_facts, facts, exact=self._is_exact)

    def _end(self, outcome: Outcome, call: StepCall) -> StepResult:
        """Recover from a step that was refused, and record the result of a step."""
        state = self.session.state
        self.session.counters.note_out_of_memory(outcome.out_of_memory)
        reason = None
        if not outcome.committed:
            state.skipped()
            reason = self.recovery.after_refused_step(outcome, call.batch)
        seconds = self._clock.monotonic_seconds() - call.started
        self._record_result(outcome, call, reason, seconds)
        return outcome.result(reason)

    def _record_result(
        self, outcome: Outcome, call: StepCall, reason: str | None, seconds: float
    ) -> None:
        """Pass the result of a step to the diagnosis and the recording.

        Args:
            outcome: The outcome of the step.
            call: The arguments of the step.
            reason: Why the step was skipped, or None if it was committed.
            seconds: The duration of the step.
        """
        self.engine.diagnosis.step_ended(outcome, call.names, reason)
        facts = outcome.attempt.facts
        self._record.step(
            StepMark.COMMITTED if outcome.committed else StepMark.SKIPPED,
            outcome.attempt.micro_batch_size,
            facts.loss,
            facts.total,
            seconds,
            "" if len(self.parts.optimizers) == 1 else "+".join(call.names),
        )

    def _undo_partial_step(self, partial: PartialOptimizerStep) -> StepResult:
        """Return to an earlier state after an optimizer ran out of memory in its step.

        Do not call this inside the exception handler, which would keep the frames of the failed
        step alive and thus their memory allocated.
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

    def _committed(self, outcome: Outcome, call: StepCall) -> None:
        """Update counters, schedulers and the memory ladder after a committed step.

        No state may be saved before this method has returned.
        """
        session = self.session
        names = call.names
        facts = outcome.attempt.facts
        self._record.count_step()
        if session.policy.spike_action != "off":
            session.spikes.accepted(call.series, facts.loss, facts.total)
        if outcome.attempt.dropped:
            self.recovery.samples.report_dropped_micro_batches(outcome, call.batch)
        if outcome.dropped and outcome.provenance is not None:
            self.recovery.samples.report_dropped_samples(outcome, call.batch)
        session.counters.note_good_step(self._record.global_step)
        if facts.overflowed:
            self._record.emit(run_events.NormOverflowed(total=facts.total))
        session.schedules.after_step(names)
        session.check_new_state(names)
        growth = session.ladder.decide_after_step(
            batch_size=outcome.size or 1, attempts=outcome.attempts
        )
        if growth is not None:
            self._record.emit(growth)
        self._timing.note_committed(names)

    # --- steps that are decided late

    @property
    def is_settled(self) -> bool:
        """Return whether the results of all steps have been read, so that `settle` does nothing."""
        return self._undecided is None

    @property
    def may_repeat(self) -> bool:
        """Return whether `settle` may have to run the last step again."""
        return self._undecided is not None

    def settle(self) -> None:
        """Read the result of the undecided step, if there is one, and recover if it was refused.

        With several ranks, all of them must call this at the same point.

        Raises:
            HoldfastError: For the same reasons as `step`. The error belongs to the undecided step.
        """
        self._timing.generators.forget()
        undecided = self._undecided
        if undecided is None:
            return
        if not self._was_refused(undecided):
            self._accept(undecided)
            return
        if self.session.state.is_attempting:
            # The loss function of the next step reads the result of this one.
            raise _EarlierStepRefused
        self._repeat(undecided)

    def _was_refused(self, undecided: UndecidedStep) -> bool:
        """Return whether the device has refused a step, and wait for the result if necessary."""
        try:
            return undecided.attempt.was_refused()
        except BaseException as error:
            self.engine.check_device_after(error)
            raise

    def settle_without_others(self) -> None:
        """Do the same as `settle`, as far as this is possible without the other ranks.

        A single rank may call this. For one process, it is the same as `settle`.

        Raises:
            HoldfastError: For the same reasons as `settle`.
        """
        self.settle()

    def settle_to_read(self) -> None:
        """Settle without other ranks, if this thread has run the undecided step.

        Another thread, which logs results for example, must not repeat a step while the thread
        that trains is running the next one.

        Raises:
            HoldfastError: For the same reasons as `settle`.
        """
        undecided = self._undecided
        if undecided is None or undecided.thread == threading.get_ident():
            self.settle_without_others()

    def _settle_before_average_use(self) -> None:
        """Bring the averages up to date before an averaged model runs its forward pass."""
        if self.session.state.is_attempting:
            self._timing.note_average_use()
        self.settle_to_read()

    def _launch_or_decide(self, call: StepCall) -> Outcome | UndecidedStep:
        """Run a step without reading its result, unless the result turns out to be needed now.

        The previous step's result is read after this step's backward pass is launched.
        """
        work = self.engine.begin(call.batch, call.loss_fn, call.names, call.split)
        generators = self._timing.generators
        generators.note_next_step(work.random_state)
        settle_previous = partial(self._settle_in_step, work)
        try:
            attempt = self.engine.attempt_unread(work, settle_previous)
        except _EarlierStepRefused:
            # The attempt was undone, and is made again below.
            self.engine.begin_again(work)
        if not self._is_valid_after_settling(work):
            attempt = self.engine.attempt_unread(work, settle_previous)
        if isinstance(attempt, UnreadAttempt):
            if not self._timing.must_decide_attempt_now(work, attempt):
                random_state_after = capture(self._devices)
                generators.note_step(work.random_state, random_state_after)
                return self._launch(call, work, attempt, random_state_after)
            attempt = self.engine.read(work, attempt)
        outcome = self.engine.finish(work, attempt, partial(self.recovery.judge, call.series))
        generators.note_step(work.random_state, capture(self._devices))
        return outcome

    def _is_valid_after_settling(self, work: Work) -> bool:
        """Settle the previous step, and return whether the attempt at the current one is valid.

        If not, the attempt was undone, and the current step is ready for another one.

        Args:
            work: The input of the current step, at which an attempt was made.

        Raises:
            HoldfastError: If the previous step cannot be settled, or H208 if the current step
                cannot be attempted again. Before an error is raised, the current step is undone.
        """
        try:
            is_valid = self._settle_in_step(work)
            if not is_valid:
                self.engine.check_batch(work)
        except BaseException as error:
            self.engine.take_back_after(work, error)
            raise
        if not is_valid:
            # The undone attempt does not count: it failed because of the previous step.
            work.attempts = 0
        return is_valid

    def _launch(
        self,
        call: StepCall,
        work: Work,
        attempt: UnreadAttempt,
        random_state_after: RandomState,
    ) -> UndecidedStep:
        """Launch the optimizers before the step's result is known."""
        surroundings = self._surroundings_of(call)
        loss_scale = self.engine.loss_scale.capture()
        # If there is no memory for the copies, the step can still be undone.
        try:
            attempt.copy_outputs()
        except BaseException as error:
            self.engine.take_back_after(work, error)
            raise
        readout = self.engine.launch(work, attempt, self._timing.loss_limit(call.series))
        self.session.state.committed()
        launched = LaunchedAttempt(attempt, readout)
        return UndecidedStep(
            call=call,
            work=work,
            attempt=launched,
            surroundings=surroundings,
            random_state_after=random_state_after,
            loss_scale=loss_scale,
            mark=self.recovery.samples.mark(),
            global_step=self._record.global_step + 1,
            seconds=self._clock.monotonic_seconds() - call.started,
            result=UndecidedResult(attempt, work.attempts, self._settlement_of(work, launched)),
            thread=threading.get_ident(),
        )

    def _surroundings_of(self, call: StepCall) -> Surroundings:
        """Return the current modes, and the hyperparameters of the optimizers in a call."""
        optimizers = [self.parts.optimizers[name] for name in call.names]
        return Surroundings(self._modules, optimizers, self._device_type)

    def _settlement_of(self, work: Work, attempt: LaunchedAttempt | RefusedAttempt) -> Settlement:
        """Return the object through which the result of an undecided step settles the step."""
        return Settlement(self.settle_to_read, partial(self._preliminary_result, work, attempt))

    def _preliminary_result(
        self, work: Work, attempt: LaunchedAttempt | RefusedAttempt
    ) -> StepResult:
        """Return what is known about an undecided step without deciding it."""
        reason = _NOT_RECOVERED if attempt.was_refused() else None
        outcome = self.engine.outcome(work, attempt.read(), committed=reason is None)
        return outcome.result(reason)

    def _leave_undecided(self, undecided: UndecidedStep) -> StepResult:
        """Count a step provisionally, until its result is known."""
        self.session.state.leave_undecided()
        self._record.count_step()
        self._undecided = undecided
        return undecided.result

    def _settle_in_step(self, work: Work) -> bool:
        """Settle the step before the current one, whose attempt has ended.

        Args:
            work: The input of the current step.

        Returns:
            Whether the current attempt is still valid. If not, it was undone, because the step
            before was refused.
        """
        undecided = self._undecided
        if undecided is None:
            return True
        if not undecided.attempt.was_refused():
            self._accept(undecided)
            return True
        self.engine.take_back(work)
        try:
            self._repeat(undecided)
        finally:
            # The caller undoes this step after an error, so it must be in progress again.
            self.engine.begin_again(work)
        return False

    def _remove_provisional_count(self, undecided: UndecidedStep) -> None:
        """Remove the provisional count of a step. A committed step is counted again."""
        self._undecided = None
        self.session.state.decide()
        self._record.move_to_step(undecided.global_step - 1)

    def _accept(self, undecided: UndecidedStep) -> None:
        """Count and record an undecided step that was not refused."""
        self._remove_provisional_count(undecided)
        self.session.counters.note_late_step(repeated=False)
        attempt = undecided.attempt.read()
        outcome = self.engine.outcome(undecided.work, attempt, committed=True)
        call = undecided.call
        undecided.result.set_final(outcome.result(None), repeated=False)
        try:
            decision = self.recovery.judge(call.series, attempt)
            # The gate refuses every step that the host might refuse.
            assert decision is None, decision
            self.engine.update_averages(undecided.work)
            with (
                self.recovery.samples.about(undecided.mark),
                undecided.surroundings.hyperparameters.restored(),
            ):
                self._committed(outcome, call)
        except BaseException:
            # The weights include the step, but a scheduler may not have advanced.
            self.session.state.spoil()
            raise
        self.session.counters.note_out_of_memory(outcome.out_of_memory)
        self._record_result(outcome, call, None, undecided.seconds)

    def _repeat(self, undecided: UndecidedStep) -> None:
        """Repeat a step that the gate has refused, and decide it before its optimizers run.

        The weights, the moments and the buffers have not changed. The random state and the loss
        scale are restored, and the step runs with the modes and hyperparameters of its own call.
        """
        self._remove_provisional_count(undecided)
        self.session.counters.note_late_step(repeated=True)
        self.engine.diagnosis.discard()
        self._rewind(undecided)
        state = self.session.state
        was_at_boundary = state.phase is Phase.AT_BOUNDARY
        # The duration of the repetition is recorded, without the time since the first run.
        call = replace(undecided.call, started=self._clock.monotonic_seconds())
        try:
            with (
                self.recovery.samples.about(undecided.mark),
                undecided.surroundings.restored(),
            ):
                result = self._run_again(undecided, call)
        except BaseException as error:
            undecided.result.set_final(self._refused(undecided, str(error)), repeated=True)
            if isinstance(error, HoldfastError):
                error.add_note(
                    f"This error belongs to step {undecided.global_step}, whose result was read"
                    " one step later."
                )
            raise
        finally:
            if was_at_boundary and state.phase is Phase.AFTER_STEP:
                # The loop has already moved past this step's batch.
                state.boundary()
        undecided.result.set_final(result, repeated=True)

    def _run_again(self, undecided: UndecidedStep, call: StepCall) -> StepResult:
        """Run a refused step again, unless its batch has changed since.

        Args:
            undecided: The step.
            call: The arguments of the step.
        """
        if versions_of(undecided.work.tensors) != undecided.work.versions:
            return self._end(self._skipped_without_repetition(undecided), call)
        facts = undecided.attempt.read().facts
        return self._run(call, decides_now=True, first_facts=facts)

    def _rewind(self, undecided: UndecidedStep) -> None:
        """Restore the random state and the loss scale from before a step.

        A generator is rewound only if the step has drawn from it. If the loop has drawn from it
        since then, it cannot be rewound, because these draws cannot be repeated.
        """
        before = undecided.work.random_state
        after = undecided.random_state_after
        now = capture(self._devices)
        moved = changed_generators(before, after)
        drawn_since = changed_generators(after, now)
        lost = moved & drawn_since
        if lost:
            names = tuple(f"the random state of {name}" for name in sorted(lost))
            self._record.emit(run_events.NotRestored(names=names))
        rewound = moved - drawn_since
        restore(with_generators(now, before, rewound))
        cursor = self.session.cursor
        if cursor is not None and self.recovery.samples.position() != undecided.mark.position:
            # The next batch has been fetched since then, so the cursor holds a random state of its
            # own.
            cursor.rewind_random_state(before, rewound)
        self.engine.loss_scale.restore(undecided.loss_scale)

    def _refused(self, undecided: UndecidedStep, reason: str) -> StepResult:
        """Return the result of a refused step whose repetition has ended with an error."""
        outcome = self.engine.outcome(undecided.work, undecided.attempt.read())
        return outcome.result(reason)

    def _skipped_without_repetition(self, undecided: UndecidedStep) -> Outcome:
        """Return the outcome of a refused step whose batch has since been changed."""
        attempt = undecided.attempt.read()
        outcome = self.engine.outcome(undecided.work, attempt)
        if attempt.facts.nonfinite:
            return replace(outcome, provenance=Provenance(problem=_CHANGED_SINCE))
        reason = f"loss {attempt.facts.loss:g} is unusually high, and {_CHANGED_SINCE}"
        return replace(outcome, decision=SkipStep(reason=reason, promise="changes training"))


def _skip_not_reproduced(first: GradientFacts) -> Decision:
    """Return the decision to skip a step that computes something else when it is repeated."""
    return SkipStep(
        reason=(
            f"loss {first.loss:g} and gradient norm {first.total:g} are unusually high, and"
            " repeating the step gives a different result: the loss function reads a value that has"
            " changed since"
        ),
        promise="changes training",
    )
