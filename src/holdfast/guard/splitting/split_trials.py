"""`SplitTrials`: run the checks of `split_check` for the loss functions of a run.

On the CPU, checks run in a forked copy of the process, so they have no effect on training. If the
process cannot be forked, a check runs in the process itself, but only when its result is needed.
This module also decides in which steps a trial is due. `LossHistory` keeps the results.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from holdfast.core.events import run_events
from holdfast.core.forked import NoAnswer, backward_works_in_a_copy
from holdfast.core.policy.policy import Policy
from holdfast.guard.parts import Parts
from holdfast.guard.record import RunRecord
from holdfast.guard.splitting.loss_functions import LossCalls, called_inside
from holdfast.guard.splitting.loss_history import LossHistory
from holdfast.guard.splitting.trial.evaluation import LossEvaluator
from holdfast.guard.splitting.trial.forked_check import run_check, run_in_copy
from holdfast.guard.splitting.trial.split_check import MIN_DISAGREEMENT, SplitCheck
from holdfast.guard.splitting.trial.split_result import SplitCheckResult
from holdfast.guard.splitting.weighting import (
    Weighting,
    disagreement,
    find_weightings,
    with_an_empty_one,
)
from holdfast.guard.splitting.window import Window, largest_of
from holdfast.guard.state.work import Work
from holdfast.loader.random_state import isolated
from holdfast.loader.splitting import micro_batches

# A batch is cut into at most this many pieces to find out whether it distinguishes weightings.
_NUM_PIECES = 8
# The first 16 batches that distinguish weightings are all tried, and after that the 32nd, the 64th,
# and so on.
_ALWAYS_TRIED = 16


class Need(Enum):
    """When the effect of splitting a step's batch must be known."""

    # The step splits its batch, or weights the batches of a window.
    NOW = auto()
    # The policy asks for splitting in advance, but this batch is not split.
    IN_ADVANCE = auto()
    # Splitting is not used, or its effect is known already.
    NOT = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """How to run a check without an effect on training or on other ranks."""

    # Function that restores the random state and the buffers from the start of a step. It is called
    # after each check that was not run in a forked copy of this process.
    restore: Callable[[Work], None]
    # Function that returns a context in which this rank runs the model without the others.
    alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    # Whether checks may run in a forked copy of this process.
    may_fork: bool = True


class SplitTrials:
    """Runs trial splits, comparisons of micro-batches, and searches for side effects.

    Args:
        parts: The models, optimizers and additional state of the run.
        policy: The policy of the run.
        record: The record that receives events.
        calls: Provides the contexts in which loss functions are called.
        isolation: How to run checks without an effect on training.
    """

    def __init__(
        self,
        parts: Parts,
        policy: Policy,
        record: RunRecord,
        calls: LossCalls,
        isolation: Isolation,
    ) -> None:
        self._parts = parts
        self._policy = policy
        self._record = record
        self._calls = calls
        self._isolation = isolation
        # Whether the policy asks for splitting before memory runs out, so that the trial is run as
        # soon as possible.
        self._asked_in_advance = (
            isinstance(policy.micro_batch_size, int) or policy.forecast_micro_batch_size is not None
        )
        self._reported_no_copy = False

    # --- which checks are due

    def determine_need(
        self, history: LossHistory, work: Work, micro_batch_size: int | None
    ) -> Need:
        """Return when this step needs to know the effect of splitting.

        If the trial would be run in advance, but this process cannot be forked, an event records
        this once.

        Args:
            history: The history of the loss function.
            work: The input of the step.
            micro_batch_size: The number of samples in a micro-batch of this step. None if its
                batch is not split.
        """
        if micro_batch_size is not None:
            return Need.NOW
        # The batches of a window must be weighted even if none of them is split.
        is_weighted = (
            isinstance(work.batch, Window) and len(work.batch) > 1 and not work.batch.added
        )
        if not is_weighted and not self._asked_in_advance:
            return Need.NOT
        is_off = self._policy.micro_batch_size is None or work.size in (None, 1)
        if is_off or history.has_result():
            return Need.NOT
        if is_weighted:
            return Need.NOW
        # Without a fork, the trial runs in this process, so it is postponed until its result is
        # needed.
        return Need.IN_ADVANCE if self._can_fork_or_report() else Need.NOT

    def run_due(
        self, history: LossHistory, work: Work, micro_batch_size: int | None, need: Need
    ) -> bool:
        """Run the checks that are due in a step.

        Afterwards, the random state and the buffers are the same as before.

        Args:
            history: The history of the loss function, which receives the results.
            work: The input of the step.
            micro_batch_size: The number of samples in a micro-batch of this step. None if its
                batch is not split.
            need: The result of `determine_need` for this step.

        Returns:
            Whether any checks were due.
        """
        if need is Need.NOT:
            return False
        trial_is_due = self._is_scheduled(history, micro_batch_size, need)
        if micro_batch_size is None:
            if trial_is_due:
                self.try_split(history, work, needed_now=need is Need.NOW)
            return trial_is_due

        if not trial_is_due and self._distinguishes_weightings(history, work):
            history.distinguishing_steps += 1
            count = history.distinguishing_steps
            trial_is_due = count <= _ALWAYS_TRIED or _is_power_of_two(count)
        if not history.tried_empty and self._has_empty_part(history, work, micro_batch_size):
            # The first part without items in a run must be included in a trial.
            history.tried_empty = True
            trial_is_due = True
        if trial_is_due:
            self.try_split(history, work)
        comparison_is_due = self._is_comparison_due(history, has_tried=trial_is_due)
        if comparison_is_due:
            self._compare_halves(history, work, micro_batch_size)
        return trial_is_due or comparison_is_due

    def _is_scheduled(self, history: LossHistory, micro_batch_size: int | None, need: Need) -> bool:
        """Return whether a trial is due in this step, whatever the batch contains."""
        if need is Need.NOW and history.result is None:
            return True
        if micro_batch_size is None:
            return _is_power_of_two(history.steps)
        return _is_power_of_two(history.split_steps)

    def _distinguishes_weightings(self, history: LossHistory, work: Work) -> bool:
        """Return whether this batch distinguishes weightings that were equal in all trials so far.

        To find out, entries in the batch's integer tensors and masks are counted. If items are
        declared, the result is False.
        """
        result = history.result
        size = work.size
        if result is None or not result.keeps_gradient() or result.declared:
            return False
        if size is None or size < 2:
            return False
        batch = largest_of(work.batch, work.split)
        candidates = dict.fromkeys([*result.held, *find_weightings(batch, size)])
        remaining = [weighting for weighting in candidates if weighting not in result.failed]
        if len(remaining) < 2 or callable(work.split):
            return False
        pieces = micro_batches(batch, size, math.ceil(size / _NUM_PIECES), work.split)
        return disagreement(remaining, pieces) > MIN_DISAGREEMENT

    def _has_empty_part(self, history: LossHistory, work: Work, micro_batch_size: int) -> bool:
        """Return whether a micro-batch of this step has no items."""
        if work.size is None or callable(work.split):
            return False
        batch = largest_of(work.batch, work.split)
        parts = micro_batches(batch, work.size, micro_batch_size, work.split)
        positions = with_an_empty_one(history.weighting_of_parts(), parts, max_parts=2)
        return len(positions) > 0

    def _is_comparison_due(self, history: LossHistory, *, has_tried: bool) -> bool:
        """Return whether a micro-batch must be compared with its halves.

        This is never due in the first split step, since a micro-batch of this size may not fit in
        memory.

        Args:
            history: The history of the loss function.
            has_tried: Whether a trial with four samples was due in this step.
        """
        result = history.result
        if not self._policy.check_split or history.split_steps < 2 or result is None:
            return False
        if not result.keeps_gradient():
            # Any other outcome makes no promise, so there is nothing to verify.
            return False
        if has_tried or history.steps_in_doubt > 0:
            return True
        return history.split_steps % history.steps_between_checks == 0

    # --- the checks

    def try_split(
        self,
        history: LossHistory,
        work: Work,
        *,
        empty: int | None = None,
        needed_now: bool = True,
    ) -> None:
        """Run a trial split with the batch of a step, and add the result to the history.

        Afterwards, the random state and the buffers are the same as before.

        Args:
            history: The history of the loss function.
            work: The input of the step.
            empty: The position of a sample to try as a part without items. None for no such part.
            needed_now: Whether the result is needed in this step. If not, the trial runs only in a
                forked copy.
        """
        if not self._policy.check_split:
            history.result = SplitCheckResult(outcome="trusted", why="check_split=False")
            return
        assert work.size is not None
        size = work.size
        batch = largest_of(work.batch, work.split)
        if isinstance(work.batch, Window):
            # The trial uses only one batch of the window, and the part may be in another one.
            empty = None
        result = self._run(
            history, work, lambda check: check.run(batch, size, empty), needed_now=needed_now
        )
        if result.fork_failed:
            # There is no result yet, so the first split runs the trial again.
            return
        history.add_trial(result)
        if result.outcome != "unknown" and result.side_effects is not None:
            history.add_side_effects(result.side_effects)

    def _compare_halves(self, history: LossHistory, work: Work, micro_batch_size: int) -> None:
        """Compare a micro-batch of this step with its two halves."""
        assert work.size is not None
        batch = largest_of(work.batch, work.split)
        clock = self._record.clock
        # A micro-batch of one sample has no halves.
        parts = micro_batches(batch, work.size, max(2, micro_batch_size), work.split)
        candidates = [(part, num_samples) for part, num_samples in parts if num_samples > 1]
        # Take a different micro-batch each time.
        micro_batch, num_samples = candidates[history.num_comparisons % len(candidates)]
        history.num_comparisons += 1

        started = clock.monotonic_seconds()
        comparison = self._run(
            history,
            work,
            lambda check: check.compare_halves(micro_batch, num_samples),
            needed_now=False,
        )
        history.add_comparison(comparison)
        history.schedule_next_comparison(clock.monotonic_seconds() - started)

    def find_side_effects(
        self, history: LossHistory, work: Work, *, include_logs: bool = False
    ) -> tuple[str, ...] | None:
        """Return the names of state that a forward pass changes, or None if this is unknown.

        It is always None if the process cannot be forked.

        Args:
            history: The history of the loss function.
            work: The input of the step.
            include_logs: Whether to include changes that do not affect the next loss.
        """
        if not self.can_fork():
            return None
        check = self._split_check(history, work, in_a_copy=True)
        size = work.size
        batch = work.batch if size is None else largest_of(work.batch, work.split)
        result = run_in_copy(
            lambda: check.detect_side_effects(batch, size, include_logs=include_logs)
        )
        if result.outcome == "unknown" and size is not None:
            # A trial with few samples may fail, for example if a state has one row per sample.
            result = run_in_copy(
                lambda: check.detect_side_effects(batch, None, include_logs=include_logs)
            )
        if result.called:
            raise called_inside(result.called)
        return None if result.outcome == "unknown" else result.side_effects

    # --- in a fork or in this process

    def _run(
        self,
        history: LossHistory,
        work: Work,
        run: Callable[[SplitCheck], SplitCheckResult],
        *,
        needed_now: bool,
    ) -> SplitCheckResult:
        """Run a check in a forked copy of this process or, if that is impossible, in this process.

        If this process can be forked in general, but not this time, for example because memory is
        short, the check runs in this process only if `needed_now` is True. After a check in this
        process, the random state and the buffers are restored.

        Raises:
            BatchError: H209 for a loss function that calls backward or steps an optimizer.
        """
        result = None
        if self._can_fork_or_report():
            check = self._split_check(history, work, in_a_copy=True)
            result = run_in_copy(lambda: run(check))
            if result.fork_failed:
                self._report_no_copy(result.why)
        if result is None or (result.fork_failed and needed_now):
            check = self._split_check(history, work, in_a_copy=False)
            with isolated(), self._isolation.alone():
                result = run_check(lambda: run(check))
            # `isolated` does not restore the random state of accelerators.
            self._isolation.restore(work)
        if result.called:
            raise called_inside(result.called)
        return result

    def can_fork(self) -> bool:
        """Return whether checks can run in a forked copy of this process."""
        try:
            return self._is_forkable()
        except NoAnswer:
            return False

    def _can_fork_or_report(self) -> bool:
        """Return whether a trial can run in a forked copy of this process.

        If this cannot be determined, an event records the reason once, and the result is False.
        """
        try:
            return self._is_forkable()
        except NoAnswer as error:
            self._report_no_copy(str(error))
            return False

    def _is_forkable(self) -> bool:
        """Return whether a copy of this process could run a check.

        Raises:
            NoAnswer: If this cannot be determined, for example because no descriptor is left.
        """
        if not self._isolation.may_fork or self._parts.device_type() != "cpu":
            return False
        return backward_works_in_a_copy()

    def _report_no_copy(self, why: str) -> None:
        """Record once that this process could not be forked for a trial."""
        if not self._reported_no_copy:
            self._reported_no_copy = True
            self._record.emit(run_events.SplitNotTried(why=why))

    def _split_check(self, history: LossHistory, work: Work, *, in_a_copy: bool) -> SplitCheck:
        """Return a new `SplitCheck` for the loss function of a step."""
        held: tuple[Weighting, ...] = ()
        has_passed = False
        if history.result is not None:
            held = history.result.held
            has_passed = history.result.keeps_gradient()
        evaluator = LossEvaluator(
            loss_fn=work.loss_fn,
            split=work.split,
            models=self._parts.models,
            states=self._calls.new_keeper().states,
            parameters=work.parameters,
            calling=self._calls.calling,
            rounds_to_half=self._policy.precision != "fp32",
            in_a_copy=in_a_copy,
        )
        return SplitCheck(
            evaluator=evaluator,
            earlier_weightings=held,
            has_passed=has_passed,
        )


def _is_power_of_two(count: int) -> bool:
    # A power of two has a single 1 bit, which the subtraction clears.
    return count > 0 and count & (count - 1) == 0
