"""The step engine: run a step that either commits, or is undone completely with a reason.

    begin      copy the random state and the mutable buffers, and clear the gradients
    attempt    run forward and backward on every micro-batch, and compute the gradient norms. After
               an out-of-memory error: leave the exception handler, drop the frames, restore
               everything, ask the memory ladder what to change, and attempt the step again
    skip       after NaN or Inf: restore everything, replay the step under a tracer, and name the
               operation that produced it
    commit     clip the gradients, step every optimizer, update the loss scale. The caller calls
               `state.committed` when the rest of the step, such as its counters, is complete
    launch     commit before the result is known, so that a bad step has no effect (``decision``)
    take_back  restore everything, at any time before the commit

``run.steps`` takes a batch through these phases, and ``accumulation`` takes several. `finish`
commits or skips, depending on the result. Nothing is retried inside the commit: if an optimizer
runs out of memory in its step, `PartialOptimizerStep` is raised, and the run must return to an
earlier state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from holdfast.core.errors import DeviceError
from holdfast.core.events import run_events
from holdfast.core.events.decisions import Decision
from holdfast.guard.context import RunContext
from holdfast.guard.decision import Readout, UnreadAttempt, gated, should_refuse
from holdfast.guard.optimizers import closure_missing, failed_without_closure
from holdfast.guard.parts import Parts
from holdfast.guard.result import Outcome, PartialOptimizerStep, StepAttempt
from holdfast.guard.saving.reserves import Reserves
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.guard.state.work import Work
from holdfast.guard.step.attempts import Attempts
from holdfast.guard.step.failures import Failure, OtherRankFailed, failure_of
from holdfast.guard.step.remedies import StepRemedies
from holdfast.guard.step.repetition import Repetition
from holdfast.guard.step.replay import Replay
from holdfast.loader.splitting import Split
from holdfast.memory.host_memory import trim_heap
from holdfast.memory.oom import (
    clear_exception_frames,
    find_out_of_memory,
    is_sticky,
    release_memory,
)
from holdfast.memory.tensors import versions_of
from holdfast.numerics.gradients import Group, clip, nonfinite_gradients

# A function that returns the decision to refuse an attempt, or None to commit it.
Judge: TypeAlias = Callable[[StepAttempt], Decision | None]

# The steps before this one create optimizer state and choose kernels. Memory that only these steps
# need can be released afterwards.
_FIRST_STEADY_STEP = 3


class StepEngine:
    """Runs the steps of one run.

    Args:
        context: The objects that the parts of the run share.
        split: Which dimension of the batch's tensors is the batch dimension; see `Guard`.
        reserves: Host memory that can be freed when an attempt runs out of memory.
    """

    def __init__(self, context: RunContext, split: Split, reserves: Reserves) -> None:
        self.parts = context.parts
        self.policy = context.policy
        self.record = context.record
        self.ranks = context.ranks
        self.ladder = context.ladder
        self.state = context.state
        self.diagnosis = context.diagnosis
        self.buffers = context.buffers
        self.loss_scale = context.loss_scale
        self.earlier_gradients = context.earlier_gradients
        self._created_state = context.created_state
        self._split = split
        self._devices = context.parts.devices()
        self.attempts = Attempts(context)
        self._safety = self.attempts.safety
        self._remedies = StepRemedies(context, self.attempts, reserves)
        self._model_order = _ModelOrder(context.parts)
        self._replay = Replay(context.parts, self.attempts)
        self._repetition = Repetition(context, self.attempts)
        self._step_count = 0

    def begin(
        self, batch: Any, loss_fn: LossFunction, names: Sequence[str], split: Split | None
    ) -> Work:
        """Start a step: copy the state that attempts may change, and clear the gradients.

        Returns:
            The input of the step, to pass to the other methods.
        """
        work = self.attempts.begin(batch, loss_fn, names, self._split if split is None else split)
        self.state.begin()
        return work

    def attempt(self, work: Work) -> StepAttempt:
        """Make attempts until one fits into memory. Its gradients are left in the parameters.

        Before an error is raised, all state is restored.
        """
        try:
            attempt = self._attempt_until_it_fits(work)
        except BaseException as error:
            self.take_back_after(work, error)
            raise
        assert isinstance(attempt, StepAttempt)
        return attempt

    def attempt_unread(
        self, work: Work, before_retry: Callable[[], object]
    ) -> UnreadAttempt | StepAttempt:
        """Attempt the step until it fits in memory, without waiting for the first result.

        If the first attempt fails, the step is attempted again, and the result of that attempt is
        read as usual.

        Args:
            work: The input of the step.
            before_retry: Function to call before the step is attempted again. It settles the
                previous step.
        """
        work.before_retry = before_retry
        self.buffers.states.note_frozen_parameters()
        try:
            return self._attempt_until_it_fits(work)
        except BaseException as error:
            self.take_back_after(work, error)
            raise

    def attempt_unread_once(self, work: Work) -> UnreadAttempt | StepAttempt:
        """Attempt the step once together with the other ranks, without waiting for the result.

        If the attempt fails on this rank, it is undone here, and all ranks will refuse it. The
        remedy for the failure is applied at once, although the step is repeated later.

        Args:
            work: The input of the step.

        Returns:
            The attempt, whose result is unread, or a `StepAttempt` that has failed on this rank. In
            both cases, the step is still in progress, so the caller must launch it, commit it or
            take it back.
        """
        self.buffers.states.note_frozen_parameters()
        try:
            if not self.ranks.begin_late_attempt(work.names):
                return StepAttempt.failed(self.ranks.loss_of_late_attempt())
            self._check_split(work)
            work.attempts += 1
            result = self._make_attempt(work, reads_result=False)
            assert not isinstance(result, StepAttempt)
            if isinstance(result, Failure):
                self.ranks.end_failed_late_attempt(result.description, work.parameters)
                self.attempts.take_back(work)
                self._remedies.apply(work, result)
                return StepAttempt.failed(self.ranks.loss_of_late_attempt())
            self.ranks.end_late_attempt()
            self._record_event_of_ranks()
        except BaseException as error:
            self.take_back_after(work, error)
            raise
        return result

    def begin_again(self, work: Work) -> None:
        """Begin a step again that was undone because another step ran in between."""
        self.attempts.begin_again(work)
        self.state.begin()

    def check_batch(self, work: Work) -> None:
        """Raise H208 if an attempt that must be made again has changed its batch in place."""
        if versions_of(work.tensors) != work.versions:
            raise self._safety.batch_was_changed(
                work.loss_fn, "the step must be repeated, because the step before it was refused"
            )

    def read(self, work: Work, attempt: UnreadAttempt) -> StepAttempt:
        """Wait for the result of an attempt. Before an error is raised, all state is restored."""
        try:
            return self.attempts.read(attempt)
        except BaseException as error:
            self.take_back_after(work, error)
            raise

    def take_back(self, work: Work) -> None:
        """Restore everything that a step has changed."""
        self.attempts.take_back(work)
        self.state.take_back()

    def keep(
        self, work: Work, attempt: StepAttempt
    ) -> tuple[dict[torch.Tensor, torch.Tensor], Outcome]:
        """End the attempt at one batch of a step over several batches, and keep its gradients.

        Returns:
            The gradients by parameter, which are no longer in ``grad``, and the outcome.
        """
        gradients = {p: p.grad for p in work.parameters if p.grad is not None}
        for parameter in work.parameters:
            parameter.grad = None
        self.attempts.note_changes(work)
        self.loss_scale.forget()
        self.state.take_back()
        return gradients, self.outcome(work, attempt, committed=True)

    def skip(self, work: Work, attempt: StepAttempt) -> Outcome:
        """Undo a step with NaN or Inf, and find the origin of these values."""
        stepped_ids = {id(p) for p in work.parameters}
        named = ((name, p) for name, p in self.parts.named_parameters() if id(p) in stepped_ids)
        culprits, count = nonfinite_gradients(named)
        self.loss_scale.update()
        self.take_back(work)
        scale = self.loss_scale.value() if math.isfinite(attempt.facts.loss) else None
        outcome = self.outcome(
            work, attempt, culprits=culprits, culprit_count=count, loss_scale=scale
        )
        if not self.policy.provenance or (scale is not None and scale >= 1.0):
            # fp16 training finds its loss scale by trial and error, so this is not a failure.
            return outcome
        provenance = self.ranks.find_origin(
            lambda: self._replay.find(work, self.ladder.plan),
            lambda: self._replay.look_at_batch(work),
        )
        return replace(outcome, provenance=provenance)

    def without_bad_samples(self, work: Work, outcome: Outcome) -> Any | None:
        """Return the batch of a skipped step without the samples that caused NaN or Inf.

        Returns None if the policy does not drop samples, or if these samples are unknown.
        """
        if not self.policy.drop_nonfinite_samples:
            return None
        return self._replay.without_samples(work, outcome.provenance)

    def finish(self, work: Work, attempt: StepAttempt, judge: Judge) -> Outcome:
        """Commit or skip a step, now that the result of its attempt is known.

        If the policy allows it, a step with NaN or Inf is run again without the samples that cause
        them.

        Args:
            work: The input of the step.
            attempt: The successful attempt.
            judge: Function that returns the decision to refuse an attempt with finite values, or
                None to commit it.

        Returns:
            The outcome, which tells whether the step was committed.
        """
        outcome = self._commit_or_skip(work, attempt, judge)
        if outcome.committed:
            return outcome
        finite_batch = self.without_bad_samples(work, outcome)
        if finite_batch is None:
            return outcome
        assert outcome.provenance is not None
        second_work = self.begin(finite_batch, work.loss_fn, work.names, work.split)
        second_outcome = self._commit_or_skip(second_work, self.attempt(second_work), judge)
        return replace(
            second_outcome,
            attempts=outcome.attempts + second_outcome.attempts,
            provenance=outcome.provenance,
            dropped=outcome.provenance.samples,
        )

    def _commit_or_skip(self, work: Work, attempt: StepAttempt, judge: Judge) -> Outcome:
        self._step_count += 1
        if attempt.facts.nonfinite:
            return self.skip(work, attempt)
        try:
            self._repetition.repeat_if_due(work, attempt)
            decision = judge(attempt)
        except BaseException as error:
            self.take_back_after(work, error)
            raise
        if decision is not None:
            self.take_back(work)
            return self.outcome(work, attempt, decision=decision)
        return self.commit(work, attempt)

    def commit(self, work: Work, attempt: StepAttempt) -> Outcome:
        """Clip the gradients, and step every optimizer.

        The run stays in the committing phase until the caller calls `state.committed`.
        """
        try:
            if self._may_exceed_limit(attempt.facts.total):
                self._clip(attempt.groups, attempt.norms)
            outcome = self.outcome(work, attempt, committed=True)
            if versions_of(work.tensors) != work.versions:
                self._safety.note_batch_change(work.loss_fn)
            # Do this before any weight changes, so that the step can still be undone after an
            # error.
            self.attempts.note_changes(work)
        except BaseException as error:
            self.take_back_after(work, error)
            raise
        self._run_optimizers(
            work, attempt.groups, attempt.norms, lambda: outcome, updates_averages=True
        )
        if self._step_count < _FIRST_STEADY_STEP and self.parts.device_type() == "cpu":
            # Otherwise, memory that only the first steps need, such as a copy of the batch, would
            # stay in the heap.
            trim_heap()
        return outcome

    def commit_or_refuse(self, work: Work, attempt: UnreadAttempt, loss_limit: float) -> Outcome:
        """Commit a step or undo it, by the same rule that the device applies in `launch`.

        Unlike `finish`, this involves no other ranks, since they may launch the same step instead.

        Args:
            work: The input of the step.
            attempt: The attempt at the step.
            loss_limit: The step is refused if its loss is larger than this.

        Returns:
            The outcome, which tells whether the step was committed.
        """
        self._step_count += 1
        try:
            readout = Readout(attempt.measurement, should_refuse(attempt, loss_limit))
            read_attempt = attempt.with_facts(readout.facts())
            was_refused = readout.was_refused()
        except BaseException as error:
            self.take_back_after(work, error)
            raise
        if was_refused:
            self.take_back(work)
            return self.outcome(work, read_attempt)
        return self.commit(work, read_attempt)

    def launch(self, work: Work, attempt: UnreadAttempt, loss_limit: float) -> Readout:
        """Commit a step before its result is known, so that it has no effect if it is refused.

        Nothing is read from the device. The run stays in the committing phase until the caller
        calls `state.committed`.

        Args:
            work: The input of the step.
            attempt: The attempt at the step.
            loss_limit: The step is refused if its loss is larger than this.

        Returns:
            The result of the step, which the host can read later.
        """
        self._step_count += 1
        try:
            refused = should_refuse(attempt, loss_limit)
            readout = Readout(attempt.measurement, refused)
            # The norm is not known yet, so clipping cannot be left out. Below the limit, it
            # multiplies the gradients by exactly 1.
            self._clip(attempt.groups, attempt.measurement.norms)
            self.attempts.note_changes(work)
            self.buffers.gate(refused)
        except BaseException as error:
            self.take_back_after(work, error)
            raise
        with gated([self.parts.optimizers[name] for name in work.names], refused):
            self._run_optimizers(
                work,
                attempt.groups,
                attempt.measurement.norms,
                lambda: self.outcome(work, attempt.with_facts(readout.facts()), committed=True),
                updates_averages=False,
            )
        self.diagnosis.step_launched()
        return readout

    def _run_optimizers(
        self,
        work: Work,
        groups: Sequence[Group],
        norms: torch.Tensor,
        outcome: Callable[[], Outcome],
        *,
        updates_averages: bool,
    ) -> None:
        """Step every optimizer, and update the loss scale; see `_step_optimizers`.

        From here on, the step can no longer be undone.

        Raises:
            DeviceError: H403 if the device has become unusable.
        """
        self.state.commit()
        try:
            self._step_optimizers(work, groups, norms, outcome, updates_averages=updates_averages)
            if self.loss_scale.enabled:
                self.loss_scale.update()
        except RuntimeError as error:
            if is_sticky(error):
                raise _dead_device(error) from error
            raise
        self._remedies.note_committed(work.names)

    def update_averages(self, work: Work) -> None:
        """Update the averaged models after a late step was accepted.

        The next step may have been attempted already. Its forward pass has changed the buffers, but
        the weights are still those of the accepted step.

        Args:
            work: The input of the accepted step.
        """
        if not self.parts.averages:
            return
        if not self.state.is_attempting:
            self.parts.update_averages(work.parameters)
            return
        with self.buffers.as_captured():
            self.parts.update_averages(work.parameters)
        # If the attempt is undone, the averages must keep this update.
        self.buffers.states.capture_again(self.parts.averages.values())

    def take_back_after(self, work: Work, error: BaseException) -> None:
        """Undo a step that ended with an error, or raise H403 if the device is unusable."""
        if is_sticky(error):
            # State on the device can no longer be restored.
            self.state.spoil()
            self.state.step_failed()
            raise _dead_device(error) from error
        self.take_back(work)

    def check_device_after(self, error: BaseException) -> None:
        """Raise H403 if an error between two steps shows that the device is unusable."""
        if is_sticky(error):
            self.state.spoil()
            raise _dead_device(error) from error

    # --- attempts

    def _attempt_until_it_fits(self, work: Work) -> StepAttempt | UnreadAttempt:
        """Make attempts until one succeeds on all ranks, and apply a remedy after each failure.

        Raises:
            OutOfMemoryError: H401 if no remedy is left.
            BatchError: H208 if the loss function has changed the batch, so that it cannot be
                retried.
        """
        self.ranks.begin_attempt(work.names)
        self._check_split(work)
        while True:
            if work.attempts:
                self.ladder.adopt(self.ranks.plan_of_next_attempt(self.ladder.plan))
            work.attempts += 1
            # `before_retry` is set until the previous step has been settled, which is not the case
            # in the first attempt of `attempt_unread`.
            result = self._make_attempt(work, reads_result=work.before_retry is None)
            if not isinstance(result, Failure):
                return result
            self._prepare_next_attempt(work, result)
            self._remedies.apply(work, result)

    def _make_attempt(
        self, work: Work, *, reads_result: bool
    ) -> StepAttempt | UnreadAttempt | Failure:
        """Make an attempt. Return it if all ranks have succeeded, otherwise return the failure.

        Errors without a known remedy are raised.

        Args:
            work: The input of the step.
            reads_result: Whether to read the result of the attempt. If not, a failure on another
                rank is not noticed.
        """
        try:
            if not reads_result:
                return self.attempts.make_unread(work, self.ladder.plan)
            attempt = self._timed_attempt(work)
            if not self.ranks.accepts(attempt):
                return OtherRankFailed()
            self._record_event_of_ranks()
        except Exception as error:
            failure = failure_of(error, work, self.ladder.plan)
            if failure is None:
                raise
            raised = error
        else:
            return attempt
        # The frames of the failed attempt can be dropped only outside the exception handler.
        clear_exception_frames(raised)
        return failure

    def _prepare_next_attempt(self, work: Work, failure: Failure) -> None:
        """Undo a failed attempt and start another one, together with the other ranks."""
        if not isinstance(failure, OtherRankFailed):
            self.ranks.complete_collectives(failure.description, work.parameters)
        self.attempts.take_back(work)
        if work.before_retry is not None:
            before_retry = work.before_retry
            work.before_retry = None
            before_retry()
        self.ranks.begin_attempt(work.names)
        self.buffers.states.capture(look=True)
        if versions_of(work.tensors) != work.versions:
            raise self._safety.batch_was_changed(work.loss_fn, "the step ran out of memory")

    def _timed_attempt(self, work: Work) -> StepAttempt:
        """Make an attempt. If its batch is split, record how long the attempt took."""
        if work.micro_batch_of(self.ladder.plan) is None:
            return self.attempts.make(work, self.ladder.plan)
        began = self.record.clock.monotonic_seconds()
        attempt = self.attempts.make(work, self.ladder.plan)
        self._safety.note_split_step(work.loss_fn, self.record.clock.monotonic_seconds() - began)
        return attempt

    def _record_event_of_ranks(self) -> None:
        """Record the event that the ranks have reported since the last attempt, if any."""
        event = self.ranks.take_event()
        if event is not None:
            self.record.emit(event)

    def _check_split(self, work: Work) -> None:
        """Check whether the loss function allows splitting. If not, stop splitting batches."""
        part = work.micro_batch_of(self.ladder.plan)
        may_split = self._safety.check(work, part)
        if part is not None and not may_split:
            self.ladder.without_split()

    # --- the end of a step

    def outcome(self, work: Work, attempt: StepAttempt, **facts: Any) -> Outcome:
        """Return the outcome of a step. Unless `facts` say otherwise, it was not committed.

        Args:
            work: The input of the step.
            attempt: The last attempt.
            **facts: Fields of the outcome that differ from their defaults.
        """
        return Outcome(
            attempt=attempt,
            attempts=work.attempts,
            out_of_memory=work.out_of_memory,
            size=work.size,
            **{"committed": False, **facts},
        )

    def _may_exceed_limit(self, total: float) -> bool:
        """Return whether gradients with this total norm may have to be clipped.

        torch multiplies the gradients by ``limit / (total + 1e-6)``, but at most by 1. The margin
        covers the rounding of `total`.
        """
        limit = self.policy.max_grad_norm
        return limit is not None and total > 0.99 * limit - 1e-5

    def _clip(self, groups: Sequence[Group], norms: torch.Tensor) -> None:
        """Clip the gradients if the policy has a limit."""
        limit = self.policy.max_grad_norm
        if limit is None:
            return
        order = self._model_order.of(groups, norms.device)
        clip(groups, norms, limit, self.policy.clip_by, order)

    def _step_optimizers(
        self,
        work: Work,
        groups: Sequence[Group],
        norms: torch.Tensor,
        outcome: Callable[[], Outcome],
        *,
        updates_averages: bool,
    ) -> None:
        """Step the optimizers, and update the averaged models.

        Args:
            work: The input of the step.
            groups: The parameter groups of the attempt.
            norms: The norm of each gradient before clipping, in the order of the groups.
            outcome: Function that returns the outcome to attach to `PartialOptimizerStep`.
            updates_averages: Whether to update the averaged models. If not, `update_averages` must
                be called once the step is accepted.

        Raises:
            PartialOptimizerStep: If an optimizer runs out of memory, unless this rank will receive
                the state of another rank.
        """
        names = work.names
        for name in names:
            try:
                self.diagnosis.before_step(name, groups, norms)
                self.parts.optimizers[name].step()
                self.diagnosis.after_step(name)
                self._created_state.drop_unused(name)
                # Update the averaged models inside this block, which handles out-of-memory errors.
                if updates_averages and self.parts.averages and name == names[-1]:
                    self.parts.update_averages(work.parameters)
                continue
            except Exception as error:
                out_of_memory_message = find_out_of_memory(error)
                if out_of_memory_message is None:
                    if failed_without_closure(error):
                        raise closure_missing(name, self.parts.optimizers[name]) from error
                    raise
                failure = error
            # Memory can be released only outside the handler, which keeps the frames alive.
            clear_exception_frames(failure)
            del failure
            release_memory(self._devices)
            if self.ranks.request_optimizer_state():
                self.record.emit(run_events.StateTaken(error=out_of_memory_message))
                self._created_state.drop_unused(name)
                continue
            raise PartialOptimizerStep(f"optimizer {name!r}: {out_of_memory_message}", outcome())


def _dead_device(error: BaseException) -> DeviceError:
    """Return error H403 for an error that makes the device unusable in this process."""
    message = str(error).strip().splitlines()[0][:200]
    fix = "start the run again: it resumes from its newest checkpoint."
    if "assert" in message:
        # A restart would fail again at the same batch.
        fix = (
            "find the index or label that is out of range (run the batch on the CPU to see which"
            f" one), then {fix}"
        )
    return DeviceError(
        f"the device reports {message!r}",
        limit="its context is dead, so nothing on it can be retried or saved",
        fix=fix,
        rule="H403",
    )


class _ModelOrder:
    """Sorts the parameters of the optimizer's groups by their order in the model.

    ``clip_grad_norm_(model.parameters(), ...)`` combines the norms of the gradients in the model's
    order. If parameters are in several groups, a different order changes the last bit of the total
    norm, and eventually the whole run.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._orders: dict[tuple[int, ...], torch.Tensor | None] = {}

    def of(self, groups: Sequence[Group], device: torch.device) -> torch.Tensor | None:
        """Return the positions of the groups' parameters, sorted by their order in the model.

        The order is cached, keyed by the number of parameters in each group. If a step has
        gradients for other parameters, but for the same number in each group, the cached order is
        used.

        Returns:
            Indices, shape ``(parameters,)``, or None if the groups already have the model's order.
        """
        if len(groups) < 2:
            return None
        sizes = tuple(len(group.parameters) for group in groups)
        if sizes not in self._orders:
            self._orders[sizes] = self._order_of(groups, device)
        return self._orders[sizes]

    def _order_of(self, groups: Sequence[Group], device: torch.device) -> torch.Tensor | None:
        ranking = {
            id(parameter): position
            for position, (_, parameter) in enumerate(self._parts.named_parameters())
        }
        # A parameter that is in no model comes last.
        rankings = [
            ranking.get(id(parameter), len(ranking))
            for group in groups
            for parameter in group.parameters
        ]
        order = sorted(range(len(rankings)), key=rankings.__getitem__)
        if order == list(range(len(order))):
            return None
        return torch.tensor(order, device=device)
