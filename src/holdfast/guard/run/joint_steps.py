"""Run the steps of several ranks, and read the results of late ones.

All ranks compute the flag that gates a late step from the same numbers, so either all of them
accept the step or all refuse it. A rank can accept a step on its own as soon as it reads the
result. But to recover from a refused step, the ranks must exchange messages. They do this at
*joint points*, which all ranks reach at the same place in the program: after the backward pass of
the next step, and in `JointSteps.settle`. If a script reads the result of a refused step earlier,
perhaps on one rank only, it gets what is known so far.

A rank may have to read the result of a step at once, for a reason that other ranks do not have. If
it would be refused, this rank undoes it, and leaves it undecided until the next joint point. A rank
that runs out of memory does the same after it has completed the collectives of the attempt, so that
the other ranks refuse the step.
"""

from __future__ import annotations

import threading

from holdfast.guard.decision import UnreadAttempt
from holdfast.guard.result import Outcome, StepAttempt, StepResult
from holdfast.guard.run.recovery import Recovery
from holdfast.guard.run.session import Session
from holdfast.guard.run.steps import Steps
from holdfast.guard.run.surroundings import Surroundings
from holdfast.guard.run.undecided import RefusedAttempt, StepCall, UndecidedResult, UndecidedStep
from holdfast.guard.state.work import Work
from holdfast.guard.step.engine import StepEngine
from holdfast.guard.step.failures import Failure
from holdfast.guard.timing import DecisionTiming
from holdfast.loader.random_state import capture


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
        # Whether no divergence was suspected at the last joint point.
        self._was_calm = True

    # --- when the result is read

    @property
    def is_settled(self) -> bool:
        """Return whether all ranks have passed a joint point since the last step."""
        return super().is_settled and not self._ranks.has_unread

    @property
    def may_repeat(self) -> bool:
        """Return whether `settle` may have to run the last step again, together with others."""
        return super().may_repeat and not self._ranks.has_left_group

    def settle(self) -> None:
        """Read the result of the undecided step, and recover together if it was refused.

        All ranks must call this at the same point.
        """
        if self._ranks.has_left_group:
            self.settle_without_others()
            return
        self._timing.generators.forget()
        undecided = self._undecided
        if undecided is None or not self._was_refused(undecided):
            self._pass_joint_point(in_step=False)
        else:
            self._repeat(undecided)

    def settle_without_others(self) -> None:
        """Read the result of the undecided step, and leave it undecided if it was refused."""
        undecided = self._undecided
        if undecided is not None and not self._was_refused(undecided):
            self._accept(undecided)

    def _settle_in_step(self, work: Work) -> bool:
        """Read the result of the step before the current one, whose attempt has ended.

        Args:
            work: The input of the current step.

        Returns:
            Whether the current attempt is still valid. If not, it was undone, because the step
            before was refused.
        """
        if self._undecided is not None and self._was_refused(self._undecided):
            return super()._settle_in_step(work)
        self._pass_joint_point(in_step=True)
        return True

    def _pass_joint_point(self, *, in_step: bool) -> None:
        """Accept the undecided step, and receive the decisions that the ranks have sent with it.

        Args:
            in_step: Whether the next step has already been attempted.
        """
        if self._undecided is not None:
            self._accept(self._undecided)
        self._ranks.receive_unread(in_step=in_step)
        self._was_calm = super()._is_calm()

    def _is_calm(self) -> bool:
        """Return whether no divergence was suspected when all ranks knew the same results."""
        if self.is_settled:
            self._was_calm = super()._is_calm()
        return self._was_calm

    # --- a step that is decided late

    def _launch_or_decide(self, call: StepCall) -> Outcome | UndecidedStep:
        """Run a step without reading its result, or read it on this rank only.

        The previous step's result is read after this step's backward pass is launched.
        """
        work = self.engine.begin(call.batch, call.loss_fn, call.names, call.split)
        generators = self._timing.generators
        generators.note_next_step(work.random_state)
        attempt = self.engine.attempt_unread_once(work)
        try:
            is_attempt_valid = self._settle_in_step(work)
            if not is_attempt_valid:
                self.engine.check_batch(work)
        except BaseException as error:
            self.engine.take_back_after(work, error)
            raise
        if not is_attempt_valid:
            # The undone attempt does not count: it failed because of the previous step.
            work.attempts = 0
            attempt = self.engine.attempt_unread_once(work)
        if isinstance(attempt, Failure):
            self.engine.take_back(work)
            failed = StepAttempt.failed(work.parameters[0].device)
            return self._leave_refused(call, work, failed, has_failed=True)
        if self._timing.must_decide_attempt_now(work, attempt):
            return self._decide_on_this_rank(call, work, attempt)
        random_state_after = capture(self._devices)
        generators.note_step(work.random_state, random_state_after)
        return self._launch(call, work, attempt, random_state_after)

    def _decide_on_this_rank(
        self, call: StepCall, work: Work, attempt: UnreadAttempt
    ) -> Outcome | UndecidedStep:
        """Read the result of a step that other ranks may have launched without reading it."""
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
        """Leave a step undecided that this rank has undone, until all ranks can recover from it."""
        self.session.state.skipped()
        refused = RefusedAttempt(attempt=attempt, has_failed=has_failed)
        settlement = self._settlement_of(work, refused)
        return UndecidedStep(
            call=call,
            work=work,
            attempt=refused,
            surroundings=Surroundings(
                self._modules,
                [self.parts.optimizers[name] for name in call.names],
                self.parts.device_type(),
            ),
            random_state_after=work.random_state,
            loss_scale=self.engine.loss_scale.capture(),
            mark=self.recovery.samples.mark(),
            global_step=self._record.global_step + 1,
            seconds=self._clock.monotonic_seconds() - call.started,
            result=UndecidedResult(attempt, work.attempts, settlement),
            thread=threading.get_ident(),
        )

    def _run_again(self, undecided: UndecidedStep, call: StepCall) -> StepResult:
        """Run a step again that all ranks have refused, and decide it together.

        If the step has failed on any rank, it is run as another attempt. Otherwise, it is decided
        by its first result.

        Args:
            undecided: The step.
            call: The arguments of the step.
        """
        has_failed = self._ranks.agree_on_failure(failed=undecided.attempt.has_failed)
        if has_failed:
            self.engine.check_batch(undecided.work)
            return self._run(call, decides_now=True, failed_work=undecided.work)
        return self._run(call, decides_now=True, first_facts=undecided.attempt.read().facts)
