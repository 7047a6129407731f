"""Run the steps of several ranks, and settle those that are decided late.

All ranks compute the flag that gates a late step from the same numbers, so either all of them
accept the step or all refuse it. One rank may nevertheless read the result earlier than another,
for example because only its script reads the loss. What a rank then does must not involve the other
ranks, which may be waiting for this rank in a collective of the script.

A rank may do this alone, at any time after the attempt at a step:

- launch the optimizers of the step, or read its result before they run;
- read the result of the step, and accept it: count and record it;
- undo its own attempt at a step that all ranks will refuse, and leave the step undecided.

All ranks do this together:

- attempt a step, since they reduce its gradients together;
- repeat a step that was refused;
- apply the stop requests and save decisions that they have sent with a step;
- determine whether a divergence is suspected, on which it depends how the next step is decided.

They do the last three at a *joint point*: a point in the program that all ranks reach, namely after
the backward pass of the next step, and in `JointSteps.settle`. A script that reads the result of a
refused step before the next joint point gets what is known so far.

A rank undoes its own attempt if it has run out of memory, or if it had to read the result at once
for a reason that other ranks do not have and the step was refused. In the first case, it has
completed the collectives of the attempt with NaN, so that the other ranks refuse the step.
"""

from __future__ import annotations

import threading

from holdfast.core.errors import BatchError
from holdfast.guard.decision import UnreadAttempt
from holdfast.guard.result import Outcome, StepAttempt, StepResult
from holdfast.guard.run.recovery import Recovery
from holdfast.guard.run.session import Session
from holdfast.guard.run.steps import Steps
from holdfast.guard.run.undecided import RefusedAttempt, StepCall, UndecidedResult, UndecidedStep
from holdfast.guard.state.work import Work
from holdfast.guard.step.engine import StepEngine
from holdfast.guard.timing import DecisionTiming
from holdfast.loader.random_state import capture
from holdfast.memory.tensors import versions_of


class JointSteps(Steps):
    """Implements `Guard.step` for a process that is one of several ranks.

    Args:
        session: The session of the run.
        engine: The object that makes attempts and commits or undoes them.
        recovery: The object that decides how to continue after a refused step.
        timing: The object that decides when the result of a step is read.
    """

    def __init__(
        self, session: Session, engine: StepEngine, recovery: Recovery, timing: DecisionTiming
    ) -> None:
        super().__init__(session, engine, recovery, timing)
        self._ranks = engine.ranks
        # Whether no divergence was suspected at the last joint point. Until the next one, the
        # statistics of spikes may differ between ranks, because some ranks accept a step earlier.
        self._was_calm = True

    # --- on all ranks together, at a joint point

    @property
    def is_settled(self) -> bool:
        """Return whether all ranks have passed a joint point since the last step."""
        return super().is_settled and not self._ranks.has_late_attempt

    @property
    def may_repeat(self) -> bool:
        """Return whether `settle` may have to run the last step again, together with others."""
        return super().may_repeat and not self._ranks.has_left_group

    def settle(self) -> None:
        """Settle the undecided step: accept it, or repeat it if it was refused.

        All ranks must call this at the same point. If this rank has left the group, it can only
        accept the step.
        """
        if self._ranks.has_left_group:
            self.settle_without_others()
            return
        self._timing.generators.forget()
        undecided = self._undecided
        if undecided is None or not self._was_refused(undecided):
            self._pass_joint_point(is_next_attempted=False)
        else:
            self._repeat(undecided)

    def _settle_in_step(self, work: Work) -> bool:
        """Settle the step before the current one, whose attempt has ended on all ranks.

        Args:
            work: The input of the current step.

        Returns:
            Whether the current attempt is still valid. If not, it was undone, because the step
            before was refused.
        """
        if self._undecided is not None and self._was_refused(self._undecided):
            return super()._settle_in_step(work)
        self._pass_joint_point(is_next_attempted=True)
        return True

    def _pass_joint_point(self, *, is_next_attempted: bool) -> None:
        """Accept the last step, and apply the stops and saves that the ranks have sent with it.

        This rank may have accepted the step earlier, alone.

        Args:
            is_next_attempted: Whether an attempt at the next step has ended too.
        """
        if self._undecided is not None:
            self._accept(self._undecided)
        self._ranks.receive_stops_and_saves(is_next_attempted=is_next_attempted)
        self._was_calm = super()._is_calm()

    def _is_calm(self) -> bool:
        """Return whether no divergence was suspected at the last joint point.

        The answer is the same on all ranks, even if some of them have accepted a step since then.
        """
        if self.is_settled:
            self._was_calm = super()._is_calm()
        return self._was_calm

    def _run_again(self, undecided: UndecidedStep, call: StepCall) -> StepResult:
        """Run a step again that all ranks have refused, and decide it together.

        If the step has failed on any rank, it has no result yet, so this is just another attempt at
        it. Otherwise, the step is skipped unless the repetition reproduces the first result; see
        `has_reproduced`. The step is run even if its batch has changed on this rank since then,
        because the other ranks would otherwise wait for this one in the collectives of backward.

        Args:
            undecided: The step.
            call: The arguments of the step.
        """
        has_failed = self._ranks.agree_on_failure(has_failed=undecided.attempt.has_failed)
        if has_failed:
            _check_unchanged(undecided.work)
            return self._run(call, decides_now=True, failed_work=undecided.work)
        return self._run(call, decides_now=True, first_facts=undecided.attempt.read().facts)

    # --- on this rank, while other ranks do the same or not

    def settle_without_others(self) -> None:
        """Accept the undecided step, or leave it undecided if it was refused."""
        undecided = self._undecided
        if undecided is not None and not self._was_refused(undecided):
            self._accept(undecided)

    def _launch_or_decide(self, call: StepCall) -> Outcome | UndecidedStep:
        """Attempt a step, pass a joint point, and then launch the optimizers of the step.

        All ranks make the attempt together. After the joint point, this rank may undo the step
        instead, or read its result before its optimizers run, whatever the other ranks do.
        """
        work = self.engine.begin(call.batch, call.loss_fn, call.names, call.split)
        generators = self._timing.generators
        generators.note_next_step(work.random_state)
        attempt = self.engine.attempt_unread_once(work)
        if not self._is_valid_after_settling(work):
            attempt = self.engine.attempt_unread_once(work)
        if isinstance(attempt, StepAttempt):
            self.engine.take_back(work)
            return self._leave_refused(call, work, attempt, has_failed=True)
        if self._timing.must_decide_attempt_now(work, attempt):
            return self._decide_alone(call, work, attempt)
        random_state_after = capture(self._devices)
        generators.note_step(work.random_state, random_state_after)
        return self._launch(call, work, attempt, random_state_after)

    def _decide_alone(
        self, call: StepCall, work: Work, attempt: UnreadAttempt
    ) -> Outcome | UndecidedStep:
        """Read the result of a step, which other ranks may launch without reading it.

        The step is committed or refused by the same rule as on their devices.
        """
        loss_limit = self._timing.loss_limit(call.series)
        outcome = self.engine.commit_or_refuse(work, attempt, loss_limit)
        self._timing.generators.note_step(work.random_state, capture(self._devices))
        if not outcome.committed:
            return self._leave_refused(call, work, outcome.attempt, has_failed=False)
        decision = self.recovery.judge(call.series, outcome.attempt)
        # As in `_accept`: what the device accepts, the host accepts too.
        assert decision is None, decision
        return outcome

    def _leave_refused(
        self, call: StepCall, work: Work, attempt: StepAttempt, *, has_failed: bool
    ) -> UndecidedStep:
        """Leave a step undecided that this rank has undone, until all ranks repeat it.

        Args:
            call: The arguments of the step.
            work: The input of the step.
            attempt: The attempt that was undone.
            has_failed: Whether the attempt has failed on this rank. If not, its result was refused.
        """
        self.session.state.skipped()
        refused = RefusedAttempt(attempt=attempt, has_failed=has_failed)
        settlement = self._settlement_of(work, refused)
        return UndecidedStep(
            call=call,
            work=work,
            attempt=refused,
            surroundings=self._surroundings_of(call),
            random_state_after=work.random_state,
            loss_scale=self.engine.loss_scale.capture(),
            mark=self.recovery.samples.mark(),
            global_step=self._record.global_step + 1,
            seconds=self._clock.monotonic_seconds() - call.started,
            result=UndecidedResult(attempt, work.attempts, settlement),
            thread=threading.get_ident(),
        )


def _check_unchanged(work: Work) -> None:
    """Raise H208 if the batch of a step that must be run again has been changed in place."""
    if versions_of(work.tensors) == work.versions:
        return
    raise BatchError(
        "the batch of a step was changed in place before the result of the step was read",
        limit="a rank ran out of memory in the step, which can be run again only with the batch",
        fix=(
            "pass a new tensor to each step, instead of filling one tensor with every batch; or set"
            ' decide="now", so that a step is run again before guard.step returns.'
        ),
        rule="H208",
    )
