"""Decide whether batches may be split for a loss function, and what a split promises.

Before a batch is first split, a trial split of four samples shows whether splitting would change
training. An event records the result. If splitting would change training, there is also a warning,
or an error if the policy sets the micro-batch size. If the trial cannot be run, batches are not
split. A run that never splits a batch runs no trial, unless the policy asks for splitting in
advance (``micro_batch_size=8``, ``forecast_micro_batch_size=8``).

While batches are being split, the trial is repeated at the 1st, 2nd, 4th, 8th, ... split step, and
the worst result counts. For example, a mean over tokens looks like a mean over samples as long as
all sentences have the same length. If a batch can distinguish weightings that were equal in all
earlier trials, a trial is run with this batch before it is split.

From time to time, a micro-batch is also compared with its two halves; see `choose_interval`.
If they differ, the promise is lowered, and the next few split steps are checked too. After a second
failure in these steps, batches are no longer split. In that case, the promise was wrong in some
earlier steps. The event ``split_stopped`` contains the last step in which the promise is known to
have been right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from holdfast.core.errors import BatchError
from holdfast.core.events import run_events
from holdfast.core.events.data import Promise
from holdfast.core.policy.policy import Policy
from holdfast.guard.parts import Parts
from holdfast.guard.record import RunRecord
from holdfast.guard.splitting.hazards import (
    Hazard,
    HazardCase,
    find_hazards,
    has_active_dropout,
    promise_of_split,
    refused_by_policy,
)
from holdfast.guard.splitting.loss_functions import LossCalls
from holdfast.guard.splitting.loss_history import LossHistories, LossHistory, Report
from holdfast.guard.splitting.split_trials import Isolation, Need, SplitTrials
from holdfast.guard.splitting.trial.evaluation import mixing_layers
from holdfast.guard.splitting.weighting import Weighting
from holdfast.guard.splitting.window import Window
from holdfast.guard.state.buffers import BufferKeeper
from holdfast.guard.state.work import Work
from holdfast.loader.splitting import Split, batch_size, copied, tensors_in
from holdfast.memory.ladder import Remedies
from holdfast.memory.tensors import versions_of

LossFunction: TypeAlias = Callable[[Any], Any]
# A loss function is searched for side effects when this much time has passed since its first step.
# The search takes about 10 ms, which is 1 % of this time. Automatic saves begin later, so a state
# that no checkpoint contains is reported before a checkpoint lacks it. The first batch is not
# suitable, since it may be special: for example, the loss function may reset a counter.
SECONDS_BEFORE_SEARCH = 1.0


class SplitSafety:
    """Decides, for each loss function of a run, whether batches may be split.

    Args:
        parts: The models, optimizers and additional state of the run.
        policy: The policy of the run.
        buffers: The run's `BufferKeeper`, which knows which buffers change.
        record: The record that receives events.
        isolation: How to run trials without an effect on training.
    """

    def __init__(
        self,
        parts: Parts,
        policy: Policy,
        buffers: BufferKeeper,
        record: RunRecord,
        isolation: Isolation,
    ) -> None:
        self.parts = parts
        self._policy = policy
        self._buffers = buffers
        self._record = record
        self._histories = LossHistories()
        # The contexts for calling a loss function, in steps and in trials.
        self.loss_calls = LossCalls(parts, policy, buffers)
        self._trials = SplitTrials(parts, policy, record, self.loss_calls, isolation)
        # Why the first batch without a batch dimension could not be split. None if there was no
        # such batch.
        self._why_not_splittable: str | None = None

    # --- the batch

    def size_of(self, batch: Any, split: Split) -> int | None:
        """Return the number of samples in a batch, or in the largest batch of a window.

        Returns None if the batch has no batch dimension.

        Raises:
            BatchError: H205 for an empty batch, or for a batch that does not match ``split=`` or
                the policy.
        """
        if isinstance(batch, Window):
            sizes = [self.size_of(part, split) for part in batch]
            return None if None in sizes else max(size for size in sizes if size is not None)
        try:
            size = batch_size(batch, split)
        except BatchError as error:
            self._raise_or_report(error, split)
            return None
        if size == 0:
            raise BatchError(
                "the batch has 0 samples",
                limit="a step needs at least one sample",
                fix="filter out empty batches, or use drop_last=True.",
                rule="H205",
            )
        return size

    def _raise_or_report(self, error: BatchError, split: Split) -> None:
        """Raise an error about the batch dimension, or report once that batches are not split.

        By default, the first dimension of all tensors is assumed to be the batch. If that is wrong,
        the batch is just not split. A wrong setting of the user is an error.
        """
        if self._policy.micro_batch_size is None:
            return
        # `split` is 0 by default, so any other value is the user's.
        is_wrong_split = error.rule != "H205" and split != 0
        if self._policy.micro_batch_size != "auto" or is_wrong_split:
            raise error
        if self._why_not_splittable is None:
            self._why_not_splittable = error.what
            self._record.emit(run_events.CannotSplit(why=error.what, fix=error.fix))

    def smallest_part(self) -> int:
        """Return the smallest number of samples that a forward pass can process."""
        return 2 if self._mixing_layers() else 1

    def _mixing_layers(self) -> list[nn.Module]:
        return [layer for model in self.parts.models.values() for layer in mixing_layers(model)]

    # --- whether a batch may be split

    def check(self, work: Work, micro_batch_size: int | None) -> bool:
        """Run the checks that are due in a step, and report what splitting promises.

        Args:
            work: The input of the step.
            micro_batch_size: The number of samples in a micro-batch of this step. None if its
                batch is not split.

        Returns:
            Whether the batch may be split.

        Raises:
            BatchError: H206 or H207 if the policy sets the micro-batch size and splitting would
                change training.
        """
        is_split = micro_batch_size is not None
        if is_split and self._policy.micro_batch_size is None:
            # The micro-batch size comes from a checkpoint of a run that was allowed to split.
            return False
        history = self._histories.history_of(work.loss_fn)
        self._schedule_search(history)
        need = self._trials.determine_need(history, work, micro_batch_size)
        if need is Need.NOT and not self._is_search_due(history):
            return True
        # In a window, the function's flags may have changed since the first batch.
        history = self._histories.current_history_of(work.loss_fn)
        self._schedule_search(history)
        history.count_step(is_split=is_split)

        has_checked = self._trials.run_due(history, work, micro_batch_size, need)
        self._search_side_effects_if_due(history, work)
        self._report_side_effects(history)

        blocking_hazard = self._blocking_hazard(history)
        if is_split and blocking_hazard is not None:
            self._report_refusal(history, blocking_hazard)
        if is_split and blocking_hazard is None and has_checked:
            history.note_passed_check(self._record.global_step)
        if is_split or history.result is not None:
            self._report_promises_if_new(history, work.size, blocking_hazard)
        return blocking_hazard is None

    def find_remedies(self, work: Work) -> Remedies:
        """Run a trial to find the remedies that splitting offers for an out-of-memory error."""
        if work.size is None or self._policy.micro_batch_size is None:
            return Remedies(
                no_split=self._why_not_splittable
                or "splitting is off, because of micro_batch_size=None or a sharded model",
                smallest=0,
            )
        history = self._histories.current_history_of(work.loss_fn)
        if work.size > 1:
            self._trials.try_split(history, work)
        blocking_hazard = self._blocking_hazard(history)
        if work.size > 1:
            self._report_promises_if_new(history, work.size, blocking_hazard)
        return Remedies(
            no_split=None if blocking_hazard is None else blocking_hazard.why,
            split_promise=self._promise(history),
            smallest=self.smallest_part(),
        )

    def try_leaving_out(self, work: Work, first_sample: int) -> bool:
        """Run a trial to find out whether a part that has a loss but no items can be left out.

        Args:
            work: The input of the step.
            first_sample: The position of the part's first sample in the batch.

        Returns:
            Whether the batch may still be split, without this part.

        Raises:
            BatchError: H207 if the part cannot be left out and the policy sets the micro-batch
                size.
        """
        history = self._histories.history_of(work.loss_fn)
        history.tried_empty = True
        self._trials.try_split(history, work, empty=first_sample)
        blocking_hazard = self._blocking_hazard(history)
        if blocking_hazard is None:
            return True
        if isinstance(self._policy.micro_batch_size, int):
            raise refused_by_policy(self._policy.micro_batch_size, blocking_hazard)
        self._report_promises_if_new(history, work.size, blocking_hazard)
        return False

    def _hazards(self, history: LossHistory) -> list[Hazard]:
        """Return the reasons not to split a batch with a loss function."""
        changed_buffers = list(self._buffers.mutable_outside_norms())
        if history.result is not None and history.result.changed_buffer:
            changed_buffers.append(history.result.changed_buffer)
        case = HazardCase(
            mixing_layers=self._mixing_layers(),
            changed_buffers=changed_buffers,
            result=history.result,
        )
        return find_hazards(case)

    def _blocking_hazard(self, history: LossHistory) -> Hazard | None:
        """Return the first hazard that the policy does not allow, or None."""
        for hazard in self._hazards(history):
            if hazard.name not in self._policy.allow_split_with:
                return hazard
        return None

    def _report_refusal(self, history: LossHistory, blocking_hazard: Hazard) -> None:
        """Report that the batch of this step must not be split, although it was about to be.

        Raises:
            BatchError: H206 or H207 if the policy sets the micro-batch size.
        """
        if history.split_steps > 1:
            self._record.emit(
                run_events.SplitStopped(
                    why=blocking_hazard.why,
                    allow_split_with=blocking_hazard.name,
                    equal_until_step=history.last_passed_step,
                )
            )
        if isinstance(self._policy.micro_batch_size, int):
            raise refused_by_policy(self._policy.micro_batch_size, blocking_hazard)

    # --- what a split promises

    def promise_of_split(self, loss_fn: LossFunction) -> Promise:
        """Return what a split promises, according to the trials so far."""
        return self._promise(self._histories.history_of(loss_fn))

    def _promise(self, history: LossHistory) -> Promise:
        return promise_of_split(
            self._hazards(history),
            history.result,
            may_change_later=history.may_change_gradient_later(),
            has_dropout=has_active_dropout(self.parts.models.values()),
        )

    def _report_promises_if_new(
        self, history: LossHistory, size: int | None, blocking_hazard: Hazard | None
    ) -> None:
        """Record what a split promises if it differs from the last report.

        Args:
            history: The history of the loss function.
            size: The number of samples in the batch.
            blocking_hazard: The hazard that forbids splitting, if any.
        """
        report = Report(
            blocking_hazard, history.weighting_of_parts(), history.may_change_gradient_later()
        )
        if report == history.reported:
            return
        history.reported = report
        self._record.emit(self._promise_event(history, size, blocking_hazard))
        is_first = history.split_steps <= 1
        if blocking_hazard is not None and self._policy.micro_batch_size == "auto" and is_first:
            self._record.emit(
                run_events.SplitRefused(
                    why=blocking_hazard.why, allow_split_with=blocking_hazard.name
                )
            )

    def _promise_event(
        self, history: LossHistory, size: int | None, blocking_hazard: Hazard | None
    ) -> run_events.Promises:
        """Return the event that contains the promise of a split, or why batches are not split."""
        result = history.result
        assert result is not None
        split = "possible"
        split_promise: Promise | None = None
        if blocking_hazard is not None:
            split = f"refused: {blocking_hazard.why}"
        else:
            split_promise = self._promise(history)
        return run_events.Promises(
            batch_size=size,
            split=split,
            split_promise=split_promise,
            weighting="as declared" if result.declared else str(history.weighting_of_parts()),
            split_check=result.event_fields(),
            # On an accelerator, side effects are not detected, so the value is None.
            side_effects=history.side_effects,
        )

    def weighting(self, loss_fn: LossFunction) -> Weighting:
        """Return the weighting of a batch's parts, for a loss function without declared items."""
        return self._histories.history_of(loss_fn).weighting_of_parts()

    def may_skip_empty(self, loss_fn: LossFunction) -> bool:
        """Return whether a part without items may be left out without a trial."""
        return self._histories.history_of(loss_fn).tried_empty or not self._policy.check_split

    def note_split_step(self, loss_fn: LossFunction, seconds: float) -> None:
        """Add the duration of a split step to the total, which limits the time for checks."""
        history = self._histories.history_of(loss_fn)
        history.timed_steps += 1
        history.timed_seconds += seconds

    # --- side effects

    def describe(self, loss_fn: LossFunction) -> str:
        """Return the text that identifies a loss function with its current flags.

        This is called once in each step.
        """
        return self._histories.identify(loss_fn)

    def side_effects(self, work: Work) -> tuple[str, ...]:
        """Return the names of state that the loss function changes and that a retry cannot restore.

        If no trial succeeds, the only entry says that these names are unknown.
        """
        history = self._histories.history_of(work.loss_fn)
        if history.side_effects:
            return history.side_effects
        # The loss function may have started to change state after the first steps.
        names = self._trials.find_side_effects(history, work, include_logs=True)
        if names is None:
            names = history.side_effects
        if names is None and self._trials.can_fork():
            return ("unknown, because a trial was not possible",)
        return names or ()

    def _schedule_search(self, history: LossHistory) -> None:
        """Choose when to search for side effects, in the first step of a loss function."""
        if history.search_after is None:
            now = self._record.clock.monotonic_seconds()
            history.search_after = now + SECONDS_BEFORE_SEARCH

    def _is_search_due(self, history: LossHistory) -> bool:
        """Return whether to search for side effects in this step, which happens once."""
        if history.has_searched or history.search_after is None:
            return False
        return self._record.clock.monotonic_seconds() >= history.search_after

    def _search_side_effects_if_due(self, history: LossHistory, work: Work) -> None:
        """Search for side effects, if this is due and no trial has searched for them."""
        if not self._is_search_due(history):
            return
        history.has_searched = True
        if history.side_effects is None:
            # If the function starts to change state later, this is still found before a retry.
            history.side_effects = self._trials.find_side_effects(history, work)

    def _report_side_effects(self, history: LossHistory) -> None:
        """Report side effects once. They matter for retries and for the next resume."""
        if not history.side_effects or history.warned:
            return
        history.warned = True
        self._record.emit(
            run_events.SideEffects(
                attributes=history.side_effects,
                why=(
                    "each forward pass changes them, including that of a retry, and no checkpoint"
                    " contains them. Keep such state in a buffer, or in an object passed as state="
                ),
            )
        )

    def call(self, loss_fn: LossFunction, function: Callable[[Any], Any], part: Any) -> Any:
        """Call a function with the batch, or with a copy if the function may change it.

        Args:
            loss_fn: The loss function of the step.
            function: The function to call: the loss function or a part of it.
            part: The batch or a part of it.
        """
        history = self._histories.history_of(loss_fn)
        if history.changes_batch is False:
            return function(part)
        copy = copied(part)
        tensors = tensors_in(copy)
        before = versions_of(tensors)
        result = function(copy)
        if history.changes_batch is None:
            history.changes_batch = versions_of(tensors) != before
        return result

    def batch_was_changed(self, loss_fn: LossFunction, why_again: str) -> BatchError:
        """Return an H208 error for a loss function that changed a batch that must be retried.

        Args:
            loss_fn: The loss function.
            why_again: Why the step must be retried, as a clause.
        """
        self.note_batch_change(loss_fn)
        return BatchError(
            f"loss_fn changed the tensors of its batch in place, and {why_again}",
            limit="a step can be retried only with an unchanged batch",
            fix=(
                "do not change the batch in place: write x = x - mean instead of x -= mean. From"
                " the next step on, loss_fn receives copies."
            ),
            rule="H208",
        )

    def note_batch_change(self, loss_fn: LossFunction) -> None:
        """Record that a loss function changes its batch, so that it receives copies from now on."""
        self._histories.history_of(loss_fn).changes_batch = True
