"""The step engine: a step commits, or it leaves no trace and says why.

    begin      note random state and mutable buffers, empty the gradients
    attempt    forward and backward of every micro-batch, and one look at the norms. Out of memory →
               outside the handler: drop the frames, put everything back, ask the ladder, attempt
               again from the start
    skip       not finite → everything back, replay under a tracer, name the culprit
    commit     clip, step every optimizer, update the scaler; `state.committed` when all that
               belongs to it is done
    take_back  leave no trace, from anywhere before the commit

`run` is the usual way through these for one batch; ``accumulation`` drives them one by one. Inside
the commit nothing is retried: an optimizer that fails half-way raises `PartialOptimizerStep`, and
only an earlier state helps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from holdfast.core.errors import DeviceError, OutOfMemoryError
from holdfast.core.events import run_events
from holdfast.core.events.data import Promise
from holdfast.core.events.decisions import Decision, Stop
from holdfast.core.events.decisions import Split as SplitDecision
from holdfast.core.policy.policy import Policy
from holdfast.guard.diagnosis import Diagnosis
from holdfast.guard.optimizers import closure_missing, failed_without_closure
from holdfast.guard.parts import Parts
from holdfast.guard.phase import RunState
from holdfast.guard.ranks.one import OneRank
from holdfast.guard.record import RunRecord, describe_error
from holdfast.guard.result import Outcome, PartialOptimizerStep, StepAttempt
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.guard.state.work import Work
from holdfast.guard.step.attempts import Attempts
from holdfast.guard.step.passes import EmptyPartError
from holdfast.guard.step.replay import Replay
from holdfast.loader.splitting import Split
from holdfast.memory.host_memory import trim_heap
from holdfast.memory.ladder import MemoryLadder, Remedies
from holdfast.memory.onednn import is_onednn_failure, switch_off_if_broken, switch_off_if_unsafe
from holdfast.memory.oom import (
    clear_exception_frames,
    find_out_of_memory,
    is_sticky,
    release_memory,
)
from holdfast.memory.recompute import COMPILED, may_be_caused_by_recomputing
from holdfast.memory.saved_bytes import NOTHING_SAVES
from holdfast.memory.tensors import versions_of
from holdfast.numerics.gradients import Group, clip, nonfinite_gradients

_SETTLED_STEP = 3  # in the first, state is made and kernels are chosen


class StepEngine:
    """Carries out steps on one set of parts."""

    def __init__(
        self,
        parts: Parts,
        policy: Policy,
        record: RunRecord,
        split: Split,
        ranks: OneRank | None = None,
    ) -> None:
        self.parts, self.policy, self.record = parts, policy, record
        self.ranks = ranks or OneRank()
        self.ladder = MemoryLadder.of(policy)
        self.state = RunState()
        self._split = split
        self._devices = parts.devices()
        self.diagnosis = Diagnosis(parts, policy, record)
        self.attempts = Attempts(parts, policy, record, self.diagnosis.attempt, self.ranks)
        self._safety = self.attempts.safety
        # A copy of one rank would wait for the others
        self._safety.may_copy = self.ranks.world_size == 1
        self._safety.alone = self.ranks.alone
        self.buffers = self.attempts.buffers
        self.loss_scale = self.attempts.loss_scale
        self._model_order = _ModelOrder(parts)
        self._replay = Replay(parts, self.attempts)
        self._step_id = 0
        self._reports_no_gain = policy.recompute is True
        # Called when memory is short on the host
        self.spare_memory: Callable[[], None] = lambda: None
        self._stepped: set[str] = set()  # optimizers whose kernels for whole batches are made

    def state_was_replaced(self) -> None:
        """Note that optimizer state was loaded: some of it may be missing again."""
        self.attempts.state_was_replaced()

    def run(
        self,
        batch: Any,
        loss_fn: LossFunction,
        names: Sequence[str],
        *,
        split: Split | None,
        judge: Callable[[StepAttempt], Decision | None],
    ) -> Outcome:
        """Make one step."""
        work = self.begin(batch, loss_fn, names, split)
        outcome = self._try(work, judge)
        less = None if outcome.committed else self.without_bad_samples(work, outcome)
        if less is None:
            return outcome
        assert outcome.provenance is not None
        again = self.begin(less, loss_fn, names, work.split)
        repeated = self._try(again, judge)
        return replace(
            repeated,
            attempts=outcome.attempts + repeated.attempts,
            provenance=outcome.provenance,
            dropped=outcome.provenance.samples,
        )

    def _try(self, work: Work, judge: Callable[[StepAttempt], Decision | None]) -> Outcome:
        self._step_id += 1
        attempt = self.attempt(work)
        if attempt.facts.nonfinite:
            return self.skip(work, attempt)
        try:
            decision = judge(attempt)
        except BaseException as error:
            self._undo(work, error)
            raise
        if decision is not None:
            self.take_back(work)
            return self._outcome(work, attempt, decision=decision)
        return self.commit(work, attempt)

    # --- the seam

    def begin(
        self, batch: Any, loss_fn: LossFunction, names: Sequence[str], split: Split | None
    ) -> Work:
        """Note everything that an attempt may change, and empty the gradients."""
        work = self.attempts.begin(batch, loss_fn, names, self._split if split is None else split)
        self.state.begin()
        return work

    def attempt(self, work: Work) -> StepAttempt:
        """Make attempts until one fits into memory; its gradients are there.

        An error takes the step back.
        """
        try:
            return self._attempt_until_it_fits(work)
        except BaseException as error:
            self._undo(work, error)
            raise

    def take_back(self, work: Work) -> None:
        """Leave no trace of a step."""
        self.attempts.take_back(work)
        self.state.take_back()

    def keep(
        self, work: Work, attempt: StepAttempt
    ) -> tuple[dict[torch.Tensor, torch.Tensor], Outcome]:
        """End a step without a commit, for one that is made of several batches.

        Return the gradients by parameter, which are the caller's now, and how the attempt ended.
        """
        gradients = {p: p.grad for p in work.parameters if p.grad is not None}
        for parameter in work.parameters:
            parameter.grad = None
        self.attempts.learn(work)
        self.loss_scale.forget()
        self.state.take_back()
        return gradients, self._outcome(work, attempt, committed=True)

    def skip(self, work: Work, attempt: StepAttempt) -> Outcome:
        """Take a step back that is not finite, and find out where that came from."""
        mine = {id(p) for p in work.parameters}
        named = ((name, p) for name, p in self.parts.named_parameters() if id(p) in mine)
        culprits, count = nonfinite_gradients(named)
        self.loss_scale.update()
        self.take_back(work)
        scale = self.loss_scale.value() if math.isfinite(attempt.facts.loss) else None
        outcome = self._outcome(
            work, attempt, culprits=culprits, culprit_count=count, loss_scale=scale
        )
        if not self.policy.provenance or (scale is not None and scale >= 1.0):
            return outcome  # fp16 finds its scale by trying: nothing is wrong
        found = self.ranks.origin(
            lambda: self._replay.find(work, self.ladder.plan),
            lambda: self._replay.look_at_batch(work),
        )
        return replace(outcome, provenance=found)

    def without_bad_samples(self, work: Work, outcome: Outcome) -> Any | None:
        """Return the batch of a skipped step without the samples that NaN came from, if that is
        known and wanted.
        """
        return (
            self._replay.without_samples(work, outcome.provenance)
            if self.policy.drop_nonfinite_samples
            else None
        )

    def commit(self, work: Work, attempt: StepAttempt) -> Outcome:
        """Clip, and step every optimizer.

        The run is committing until whoever drives it says `state.committed`.
        """
        try:
            self._clip(attempt.groups, attempt.norms, attempt.facts.total)
            outcome = self._outcome(work, attempt, committed=True)
            if versions_of(work.tensors) != work.versions:
                self._safety.notice_change(work.loss_fn)
            # Before a weight moves: what fails here can still be taken back
            self.attempts.learn(work)
        except BaseException as error:
            self._undo(work, error)
            raise
        self.state.commit()
        try:
            self._step_optimizers(work.names, outcome, work.parameters)
            if self._step_id < _SETTLED_STEP and self.parts.device_type() == "cpu":
                # What only the first steps take, such as a copy of the batch, would stay in the
                # heap
                trim_heap()
            if self.loss_scale.enabled:
                self.loss_scale.update()
        except RuntimeError as error:
            if is_sticky(error):
                raise _dead_device(error) from error
            raise
        self._stepped.update(work.names)
        return outcome

    def _undo(self, work: Work, error: BaseException) -> None:
        """Leave no trace of a step that an error ends."""
        if is_sticky(error):
            self.state.spoil()
            raise _dead_device(error) from error
        self.take_back(work)

    # --- attempts

    def _attempt_until_it_fits(self, work: Work) -> StepAttempt:
        ranks = self.ranks
        if ranks.begin is not None:
            ranks.begin()
        self._check_split(work)
        while True:
            if work.attempts and ranks.plan is not None:
                self.ladder.plan = ranks.plan(self.ladder.plan)
            work.attempts += 1
            failure = None
            try:
                attempt = self._timed_attempt(work)
                if ranks.accepts is None:
                    return attempt
                if ranks.accepts(attempt):
                    self._report_news()
                    return attempt
            except Exception as error:
                found = find_out_of_memory(error)
                mismatch = bool(self.ladder.plan.recompute) and may_be_caused_by_recomputing(error)
                unmeasurable = not mismatch and self.attempts.may_come_of_measuring(work, error)
                if found is None and not (
                    mismatch or unmeasurable or isinstance(error, EmptyPartError)
                ):
                    raise
                failure = error
            # Out of the handler: only now can the frames of the failed attempt be dropped.
            if failure is not None:
                clear_exception_frames(failure)
                ranks.pay(found or describe_error(failure), work.parameters)
            self.attempts.take_back(work)
            if ranks.begin is not None:
                ranks.begin()
            self.buffers.states.keep(look=True)
            if versions_of(work.tensors) != work.versions:
                raise self._safety.batch_was_changed(work.loss_fn)
            if failure is None:  # another rank has failed
                continue
            if isinstance(failure, EmptyPartError):
                may_split = self._safety.may_leave_out(work, failure.place)
                self.attempts.restore(work)
                if not may_split:
                    self.ladder.without_split()
                continue
            if found is None and unmeasurable:
                self._reports_no_gain = False
                self.attempts.give_up_measuring(failure)
                continue
            if found is None:
                self.attempts.give_up_recomputing(self.ladder.plan, failure)
                self.ladder.without_recompute()
                del failure
                release_memory(self._devices)  # its frames are in cycles
                continue
            del failure
            if self.parts.device_type() == "cpu":
                self.spare_memory()
            release_memory(self._devices)
            if is_onednn_failure(found) and switch_off_if_broken():
                self.record.emit(run_events.OnednnSwitchedOff())
                # The same attempt with torch's own kernels: it was not the batch that did not fit
                continue
            work.out_of_memory += 1
            self._decide(work, found)

    def _timed_attempt(self, work: Work) -> StepAttempt:
        """Make an attempt; of one that splits its batch, note how long it has taken."""
        if self._samples_of_a_part(work) is None:
            return self.attempts.make(work, self.ladder.plan)
        began = self.record.clock.monotonic_seconds()
        attempt = self.attempts.make(work, self.ladder.plan)
        self._safety.note_split_step(work.loss_fn, self.record.clock.monotonic_seconds() - began)
        return attempt

    def _samples_of_a_part(self, work: Work) -> int | None:
        """Return the samples of the parts that the plan cuts a batch into.

        None if it is not cut.
        """
        plan = self.ladder.plan
        if (
            work.size is None
            or plan.micro_batch_size is None
            or plan.samples(work.size) == work.size
        ):
            return None
        return plan.samples(work.size)

    def _report_news(self) -> None:
        news = self.ranks.take_news()
        if news is not None:
            self.record.emit(news)

    def _check_split(self, work: Work) -> None:
        """Find out what holds for the loss function, and split no more if the batch may not be
        cut.
        """
        part = self._samples_of_a_part(work)
        tried_here, may_split = self._safety.check(work, part)
        if tried_here:
            self.attempts.restore(work)
        if part is not None and not may_split:
            self.ladder.without_split()

    def _decide(self, work: Work, found: str) -> None:
        """Ask the ladder what to do about a lack of memory, and record it.

        Raise H401 if nothing is left.
        """
        plan = self.ladder.plan
        size = work.size or 1
        self.record.emit(
            run_events.OutOfMemory(
                error=found,
                attempt=work.attempts,
                micro_batch_size=plan.samples(size),
                recompute=bool(plan.recompute),
            )
        )
        remedies = self._remedies(work)
        if (
            self._reports_no_gain
            and work.prepared
            and work.out_of_memory > 1
            and not remedies.recompute
        ):
            self._reports_no_gain = False
            self.record.emit(
                run_events.RecomputeImpossible(
                    why=COMPILED if self.attempts.compiled else NOTHING_SAVES
                )
            )
        decision = self.ladder.decide_after_oom(
            batch_size=size, failures=work.out_of_memory, remedies=remedies
        )
        decision = self.attempts.as_promised(decision, work)
        self.record.emit(replace(decision, rule="H401") if isinstance(decision, Stop) else decision)
        if isinstance(decision, Stop):
            raise self._does_not_fit(work, found, decision.reason)
        makes_kernels = isinstance(decision, SplitDecision) or not self._stepped.issuperset(
            work.names
        )
        if (
            makes_kernels
            and self.parts.device_type() == "cpu"
            and switch_off_if_unsafe(self.parts.models.values())
        ):
            self.record.emit(run_events.OnednnSwitchedOff())

    def _does_not_fit(self, work: Work, error: str, reason: str) -> OutOfMemoryError:
        """Return H401 for a step that no remedy is left for."""
        if work.size is None:
            batch = "the batch"
            fix = (
                "pass split= with the batch dimension of each part, for instance split={'frames':"
                " 1, 'mask': None, 'targets': 'items'}, so that the batch can be split; or free"
                " memory, use a smaller batch or model; "
            )
        else:
            batch = f"a batch of {work.size} samples"
            fix = (
                "free memory, use a smaller batch or model, or return Loss(mean, items) if samples"
                " are independent, TwoPass(outputs, loss) if the loss compares them, or allow what"
                " was refused by Policy(allow_split_with=...); "
            )
        return OutOfMemoryError(
            f"{batch} does not fit, in {work.attempts} attempts ({error})",
            limit=reason,
            fix=fix + "the weights are those of the last committed step.",
            rule="H401",
        )

    def _remedies(self, work: Work) -> Remedies:
        if not work.prepared:
            return Remedies(
                no_split="the state of the optimizer does not fit, whatever the micro-batch"
            )
        if work.out_of_memory == 1 and not self.ladder.on_trial:
            return Remedies()  # the first remedy changes nothing, so nothing has to be found out
        if self.ranks.why_only_retry is not None:
            return Remedies(no_split=self.ranks.why_only_retry)
        # Kernels of accelerators may add in another order each time
        exact = self.parts.device_type() == "cpu"
        modules = self.attempts.modules_to_recompute(self.ladder.plan)
        remedies = self._safety.remedies(work)
        self.attempts.restore(work)
        promise: Promise = "bit-exact" if exact else "equal up to rounding"
        return replace(remedies, recompute=modules, recompute_promise=promise)

    # --- the end of a step

    def _outcome(self, work: Work, attempt: StepAttempt, **facts: Any) -> Outcome:
        return Outcome(
            attempt=attempt,
            attempts=work.attempts,
            out_of_memory=work.out_of_memory,
            size=work.size,
            **{"committed": False, **facts},
        )

    def _clip(self, groups: Sequence[Group], norms: torch.Tensor, total: float) -> None:
        limit = self.policy.max_grad_norm
        # Well below the limit every factor is exactly 1.
        if limit is not None and total > 0.99 * limit - 1e-5:
            clip(
                groups,
                norms,
                limit,
                self.policy.clip_by,
                self._model_order.of(groups, norms.device),
            )

    def _step_optimizers(
        self, names: Sequence[str], outcome: Outcome, moved: Sequence[torch.Tensor]
    ) -> None:
        for name in names:
            try:
                self.diagnosis.before_step(name, outcome.attempt)
                self.parts.optimizers[name].step()
                self.diagnosis.after_step(name)
                self.attempts.drop_unused_state(name)
                # Here, since what fails half-way is undone
                if self.parts.averages and name == names[-1]:
                    self.parts.update_averages(moved)
                continue
            except Exception as error:
                found = find_out_of_memory(error)
                if found is None:
                    if failed_without_closure(error):
                        raise closure_missing(name, self.parts.optimizers[name]) from error
                    raise
                failure = error
            clear_exception_frames(failure)
            del failure
            release_memory(self._devices)
            if self.ranks.falls_behind():
                self.record.emit(run_events.StateTaken(error=found))
                self.attempts.drop_unused_state(name)
                continue
            raise PartialOptimizerStep(f"optimizer {name!r}: {found}", outcome)


def _dead_device(error: BaseException) -> DeviceError:
    said = str(error).strip().splitlines()[0][:200]
    first = ""
    if "assert" in said:  # which the same batch would meet again
        first = (
            "find the index or label outside its range (the same batch on the CPU names it), then "
        )
    return DeviceError(
        f"the device reports {said!r}",
        limit="its context is dead and nothing on it can be retried or saved",
        fix=f"{first}start the run again: it continues from its newest checkpoint.",
        rule="H403",
    )


class _ModelOrder:
    """The order in which a bare loop adds up norms.

    That of the model's parameters, not of optimizer groups.

    ``clip_grad_norm_(model.parameters(), ...)`` takes the norm of the norms in that order. With
    parameters in several groups another order gives another last bit, and so another run.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._known: dict[tuple[int, ...], torch.Tensor | None] = {}

    def of(self, groups: Sequence[Group], device: torch.device) -> torch.Tensor | None:
        """Return where in the groups the parameters lie, in the model's order.

        None if they lie in that order.

        Cost: that of a look-up by the sizes of the groups, after the first time; parameters that
        get a gradient now and then, as many as before, may be added up in the order of then.
        """
        if len(groups) < 2:
            return None
        key = tuple(len(group.parameters) for group in groups)
        if key not in self._known:
            found = {id(p): at for at, (_, p) in enumerate(self._parts.named_parameters())}
            places = [found.get(id(p), len(found)) for group in groups for p in group.parameters]
            order = sorted(range(len(places)), key=places.__getitem__)
            is_same = order == list(range(len(order)))
            self._known[key] = None if is_same else torch.tensor(order, device=device)
        return self._known[key]
