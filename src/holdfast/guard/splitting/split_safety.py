"""Decide whether batches may be split for a loss function, and what a split promises.

In the first step, a trial split of four samples shows whether splitting would change training. An
event records the result. If splitting would change training, there is also a warning, or an error
if the policy sets the micro-batch size. If the trial cannot be run, batches are not split.

While batches are being split, the trial is repeated at the 1st, 2nd, 4th, 8th, ... split step, and
the worst result counts. For example, a mean over tokens looks like a mean over samples as long as
all sentences have the same length. If a batch can distinguish weightings that were equal in all
earlier trials, a trial is run with this batch before it is split.

From time to time, a micro-batch is also compared with its two halves; see `steps_between_checks`.
If they differ, the promise is lowered, and the next few split steps are checked too. After a second
failure in these steps, batches are no longer split. In that case, the promise was wrong in some
earlier steps. The event ``split_stopped`` contains the last step in which the promise is known to
have been right.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from holdfast.core.errors import BatchError
from holdfast.core.events import run_events
from holdfast.core.events.data import Promise
from holdfast.core.forked import NoAnswer, backward_works_in_a_copy
from holdfast.core.policy.kinds import SplitHazard
from holdfast.core.policy.policy import Policy
from holdfast.core.text import counted
from holdfast.guard.parts import Parts
from holdfast.guard.precision import autocast
from holdfast.guard.record import RunRecord
from holdfast.guard.splitting.loss_functions import ReturningALoss, called_inside, description_of
from holdfast.guard.splitting.split_check import (
    TELLING,
    SplitCheck,
    SplitCheckResult,
    attempted,
    in_a_copy,
    merged,
    mixing_layers,
)
from holdfast.guard.splitting.weighting import (
    SAMPLES,
    Weighting,
    disagreement,
    find_weightings,
    with_an_empty_one,
)
from holdfast.guard.splitting.window import Window, largest_of
from holdfast.guard.state.buffers import BufferKeeper
from holdfast.guard.state.states import StateKeeper, kept_states
from holdfast.guard.state.work import Work
from holdfast.loader.random_state import isolated
from holdfast.loader.splitting import (
    Split,
    batch_size,
    copied,
    micro_batches,
    tensors_in,
)
from holdfast.memory.ladder import Remedies
from holdfast.memory.tensors import versions_of

LossFunction: TypeAlias = Callable[[Any], Any]
# A batch is cut into this many pieces to find out whether it distinguishes weightings.
_PIECES = 8
# At most this many loss functions are distinguished by the strings that are bound to them. If there
# are more, a string probably changes in every step.
_MOST_HISTORIES = 64
# Up to this number, every batch that distinguishes weightings is tried. After that, only the 32nd,
# the 64th, and so on are tried.
_ALWAYS = 16
# Comparing micro-batches with their halves may take at most this share of the time that split steps
# take, which is within the usual variation between two runs of the same script. With this share, a
# loss that starts to couple samples is detected after a few hundred steps.
_SHARE_OF_CHECKS = 0.01
# The number of split steps between two comparisons of a micro-batch with its halves, until their
# cost is known, and the minimum afterwards. Before the first comparison, the trials at the 2nd,
# 4th, ..., 64th split step serve the same purpose.
_FEWEST_STEPS_BETWEEN = 64
# After a comparison has failed, this many of the next split steps are checked too. A single failure
# may be due to rounding that moves a value across a threshold, but a loss that selects samples
# fails in more than half of the steps.
_STEPS_IN_DOUBT = 4
# The maximum number of steps between two comparisons, in case the clock does not advance.
_MOST_STEPS_BETWEEN = 2**16


def steps_between_checks(check_seconds: float, step_seconds: float) -> int:
    """Return the number of split steps until a micro-batch is compared with its halves again.

    With this number, comparisons take at most `_SHARE_OF_CHECKS` of the time. The number is a power
    of two, so that ranks whose timings differ slightly still check in the same steps.

    Args:
        check_seconds: How long the last comparison took, in seconds.
        step_seconds: How long the attempts of a split step take, in seconds.
    """
    steps = _FEWEST_STEPS_BETWEEN
    while check_seconds > _SHARE_OF_CHECKS * step_seconds * steps and steps < _MOST_STEPS_BETWEEN:
        steps *= 2
    return steps


@dataclass(slots=True)
class _LossHistory:
    """The trial results and step counts of one loss function."""

    # The combined result of all trials so far. None before the first trial.
    verdict: SplitCheckResult | None = None
    # Whether the loss function changes the tensors of its batch. None if this is unknown.
    changes_batch: bool | None = None
    # The number of steps with this function, how many of them were split, and how many of the split
    # steps had a batch that distinguishes weightings.
    steps: int = 0
    split_steps: int = 0
    distinguishing_steps: int = 0
    # Whether a trial has included a part without items, over which no mean can be taken.
    tried_empty: bool = False
    # The content of the last report: the hazard that forbids splitting, the weighting, and whether
    # splitting may change the gradient later.
    reported: tuple[tuple[str, str] | None, Weighting, bool] | None = None
    # The last step in which a check passed.
    equal_until_step: int | None = None
    # The number of comparisons of a micro-batch with its halves.
    later_checks: int = 0
    steps_between_checks: int = _FEWEST_STEPS_BETWEEN
    # How many of the next split steps to check because a micro-batch differed from its halves.
    steps_in_doubt: int = 0
    # The number of split steps since the last comparison, and the total time of their attempts.
    timed_steps: int = 0
    timed_seconds: float = 0.0
    # Whether no more trials are needed until a batch is split.
    settled: bool = False
    # The names of attributes and variables that a forward pass changes, or None if unknown.
    side_effects: tuple[str, ...] | None = None
    # Whether these side effects have been reported.
    warned: bool = False

    def weighting_of_parts(self) -> Weighting:
        """Return how to weight the parts of a batch, according to the trials so far."""
        return SAMPLES if self.verdict is None else self.verdict.weighting()

    def add_comparison(self, comparison: SplitCheckResult) -> None:
        """Add the result of comparing a micro-batch with its halves.

        A failure counts only if a second one follows in the next few split steps, which are checked
        because of the first failure. If a comparison was impossible, for example because memory was
        short, the verdict does not change.
        """
        assert self.verdict is not None
        if comparison.outcome == "coupled" and not self.steps_in_doubt:
            self.steps_in_doubt = _STEPS_IN_DOUBT
            return
        self.steps_in_doubt = max(0, self.steps_in_doubt - 1)
        if comparison.outcome != "unknown":
            self.verdict = merged([self.verdict, comparison])

    def may_change_gradient_later(self) -> bool:
        """Return whether splitting may change the gradient later, though it has not so far."""
        return self.steps_in_doubt > 0 or (
            self.verdict is not None and self.verdict.may_change_gradient_later()
        )


class SplitSafety:
    """Decides, for each loss function of a run, whether batches may be split.

    Args:
        parts: The models, optimizers and additional state of the run.
        policy: The policy of the run.
        buffers: The run's `BufferKeeper`, which knows which buffers change.
        record: The record that receives events.
        may_fork: Whether trials may run in a forked copy of this process.
        alone: Function that returns a context in which this rank runs the model without the others.
    """

    def __init__(
        self,
        parts: Parts,
        policy: Policy,
        buffers: BufferKeeper,
        record: RunRecord,
        *,
        may_fork: bool = True,
        alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.parts = parts
        self._may_fork = may_fork
        self._alone = alone
        self._policy = policy
        self._buffers = buffers
        self._record = record
        # The history of each loss function, keyed by the function's description.
        self._histories: dict[str, _LossHistory] = {}
        # A weak reference to the last loss function, and its history.
        self._last_function: tuple[Callable[[], Any], _LossHistory] = (lambda: None, _LossHistory())
        # Why the first batch without a batch dimension could not be split. None if there was no
        # such batch.
        self._uncuttable: str | None = None
        self._reported_no_copy = False
        # Whether a trial in the current step has run in this process rather than in a forked copy.
        self._ran_in_this_process = False
        parameters = [parameter for _, parameter in parts.named_parameters()]
        # Function that returns a context for calling a loss function; see `ReturningALoss`.
        self.inside = functools.partial(ReturningALoss, parts.optimizers.values(), parameters)

    def keeper(self) -> BufferKeeper:
        """Return a new `BufferKeeper`, for extra passes whose changes of state must be undone."""
        untouched = self._buffers.states.untouched()
        states = {
            name: state for name, state in kept_states(self.parts).items() if name not in untouched
        }
        return BufferKeeper(self.parts.models, StateKeeper(states, copy_large_objects=True))

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
            if self._policy.micro_batch_size is None:
                return None
            # By default, the first dimension of all tensors is assumed to be the batch. If that is
            # wrong, the batch is just not split. But if the user's own setting is wrong, it is an
            # error.
            if self._policy.micro_batch_size != "auto" or (error.rule != "H205" and split != 0):
                raise
            if self._uncuttable is None:
                self._uncuttable = error.what
                self._record.emit(run_events.CannotSplit(why=error.what, fix=error.fix))
            return None
        if size == 0:
            raise BatchError(
                "the batch has 0 samples",
                limit="a step needs at least one sample",
                fix="filter out empty batches, or use drop_last=True.",
                rule="H205",
            )
        return size

    def check(self, work: Work, part: int | None) -> tuple[bool, bool]:
        """Run a trial split if one is due, and report what splitting promises.

        Args:
            work: The input of the step.
            part: The number of samples in a micro-batch of this step. None if it is not split.

        Returns:
            Two values. The first is whether a trial has run in this process, so that buffers and
            random state must be restored. The second is whether the batch may be split.

        Raises:
            BatchError: H206 or H207 if the policy sets the micro-batch size and splitting would
                change training.
        """
        history = self._history_of(work.loss_fn)
        splits_now = part is not None
        if not splits_now and history.settled:
            return False, True
        # In a window, the function's flags may have changed since the first batch.
        self.describe(work.loss_fn)
        history = self._last_function[1]
        history.steps += 1
        history.split_steps += splits_now
        self._ran_in_this_process = False
        size = work.size
        can_fork = self._forks()
        trial_is_due = self._is_trial_due(history, work, part)
        # The batches of a window must be weighted even if none of them is split.
        is_weighted = (
            isinstance(work.batch, Window) and len(work.batch) > 1 and not work.batch.added
        )
        may_ever_split = self._policy.micro_batch_size is not None and size is not None
        # Without a fork, the trial runs in this process, so it is postponed until its result is
        # needed.
        may_try = may_ever_split and size != 1 and (can_fork or splits_now or is_weighted)
        has_detected_effects = False
        if trial_is_due and may_try:
            has_detected_effects = self._try_split(history, work, splits=splits_now or is_weighted)
        must_compare = (
            may_try and splits_now and self._is_later_check_due(history, due=trial_is_due)
        )
        if part is not None and must_compare:
            self._compare_halves(history, work, part)
        # The second step is checked as well, since the first batch may be special. For example, the
        # loss function may reset a counter at the start of an epoch.
        if history.steps <= 2:
            self._check_side_effects(history, work, detect=can_fork and not has_detected_effects)

        refused = self._refused(history)
        if splits_now and refused is not None:
            self._stop_splitting(history, *refused)
        facts = (refused, history.weighting_of_parts(), history.may_change_gradient_later())
        if history.steps == 1 or (splits_now and facts != history.reported):
            self._report_promises(history, size, refused)
        history.reported = facts
        was_checked = trial_is_due or must_compare
        if refused is None and splits_now and was_checked and not history.steps_in_doubt:
            history.equal_until_step = self._record.global_step
        has_verdict = history.verdict is not None and history.verdict.outcome != "unknown"
        # If a loss function starts to change state later, this is still detected before a split or
        # a retry.
        history.settled = has_verdict or not (can_fork or is_weighted) or not may_ever_split
        return self._ran_in_this_process, refused is None

    def _is_trial_due(self, history: _LossHistory, work: Work, part: int | None) -> bool:
        """Return whether a trial with four samples is due in this step."""
        if part is None:
            return _is_power_of_two(history.steps)
        is_due = _is_power_of_two(history.split_steps)
        if not is_due and self._distinguishes_weightings(history, work):
            history.distinguishing_steps += 1
            is_due = history.distinguishing_steps <= _ALWAYS or _is_power_of_two(
                history.distinguishing_steps
            )
        if not history.tried_empty and work.size is not None and not callable(work.split):
            # The first part without items in a run must be included in a trial.
            batch = largest_of(work.batch, work.split)
            parts = micro_batches(batch, work.size, part, work.split)
            history.tried_empty = bool(with_an_empty_one(history.weighting_of_parts(), parts, 2))
            is_due = is_due or history.tried_empty
        return is_due

    def _check_side_effects(self, history: _LossHistory, work: Work, *, detect: bool) -> None:
        """Look for side effects of a forward pass, and report them once.

        Args:
            history: The history of the loss function.
            work: The input of the step.
            detect: Whether to run a trial for side effects if none has been run yet.
        """
        if detect and not history.side_effects:
            side_effects = self._detect_side_effects(history, work)
            if side_effects is not None:
                history.side_effects = side_effects
        if history.side_effects and not history.warned:
            history.warned = True
            self._record.emit(
                run_events.SideEffects(
                    attributes=history.side_effects,
                    why=(
                        "each forward pass changes them, including that of a retry, and no"
                        " checkpoint contains them. Keep such state in a buffer, or in an object"
                        " passed as state="
                    ),
                )
            )

    def _stop_splitting(self, history: _LossHistory, hazard: SplitHazard, why: str) -> None:
        """Report that the batch of this step must not be split, although it was about to be.

        Raises:
            BatchError: H206 or H207 if the policy sets the micro-batch size.
        """
        if history.split_steps > 1:
            self._record.emit(
                run_events.SplitStopped(
                    why=why,
                    allow_split_with=hazard,
                    equal_until_step=history.equal_until_step,
                )
            )
        if isinstance(self._policy.micro_batch_size, int):
            raise self._refusal(hazard, why)

    def _report_promises(
        self, history: _LossHistory, size: int | None, refused: tuple[str, str] | None
    ) -> None:
        """Record the promise of a split, or the reason why batches are not split."""
        verdict = history.verdict
        obstacle = refused[1] if refused else self._uncuttable
        split_promise = None
        weighting = None
        if obstacle:
            split = f"refused: {obstacle}"
        elif self._policy.micro_batch_size is None:
            split = "off"
        elif verdict is None:
            split = "possible, to be tried before the first split"
        else:
            split = "possible"
        if verdict is not None:
            weighting = "as declared" if verdict.declared else str(history.weighting_of_parts())
            if not obstacle:
                split_promise = self._promise_of_split(history)
        self._record.emit(
            run_events.Promises(
                batch_size=size,
                split=split,
                split_promise=split_promise,
                weighting=weighting,
                split_check=None if verdict is None else verdict.facts(),
                # On an accelerator, side effects are not detected, so the value is None.
                side_effects=history.side_effects,
            )
        )
        is_first = history.split_steps <= 1
        if refused is not None and self._policy.micro_batch_size == "auto" and is_first:
            self._record.emit(run_events.SplitRefused(why=refused[1], allow_split_with=refused[0]))

    def remedies(self, work: Work) -> Remedies:
        """Return the remedies that splitting offers for an out-of-memory error."""
        if work.size is None or self._policy.micro_batch_size is None:
            return Remedies(
                no_split=self._uncuttable
                or "splitting is off, because of micro_batch_size=None or a sharded model",
                smallest=0,
            )
        self.describe(work.loss_fn)
        history = self._last_function[1]
        if work.size > 1:
            self._try_split(history, work)
        refused = self._refused(history)
        return Remedies(
            no_split=None if refused is None else refused[1],
            split_promise=self._promise_of_split(history),
            smallest=self.smallest_part(),
        )

    def smallest_part(self) -> int:
        """Return the smallest number of samples that a forward pass can process."""
        return 2 if self._mixing_layers() else 1

    def _mixing_layers(self) -> list[nn.Module]:
        return [layer for model in self.parts.models.values() for layer in mixing_layers(model)]

    def _history_of(self, loss_fn: LossFunction) -> _LossHistory:
        """Return the history of a loss function."""
        if self._last_function[0]() is not loss_fn:
            self.describe(loss_fn)
        return self._last_function[1]

    def describe(self, loss_fn: LossFunction) -> str:
        """Return the text that identifies a loss function with its current flags.

        This is called once in each step.
        """
        text = description_of(loss_fn)
        key = text
        if key not in self._histories and len(self._histories) >= _MOST_HISTORIES:
            key = description_of(loss_fn, 0)
        history = self._histories.get(key) or self._histories.setdefault(key, _LossHistory())
        try:
            self._last_function = (weakref.ref(loss_fn), history)
        except TypeError:
            # This loss function does not support weak references, so it must be described again
            # each time.
            self._last_function = ((lambda: None), history)
        return text

    def weighting(self, loss_fn: LossFunction) -> Weighting:
        """Return the weighting of a batch's parts, for a loss function without declared items."""
        return self._history_of(loss_fn).weighting_of_parts()

    def empty_is_tried(self, loss_fn: LossFunction) -> bool:
        """Return whether a part without items may be left out without a trial."""
        return self._history_of(loss_fn).tried_empty or not self._policy.check_split

    def may_leave_out(self, work: Work, place: int) -> bool:
        """Run a trial to find out whether a part that has a loss but no items can be left out.

        The caller must restore the random state and the buffers of the step afterwards.

        Args:
            work: The input of the step.
            place: The position of the part's first sample.

        Returns:
            Whether the batch may still be split, without this part.

        Raises:
            BatchError: H207 if the part cannot be left out and the policy sets the micro-batch
                size.
        """
        history = self._history_of(work.loss_fn)
        history.tried_empty = True
        self._try_split(history, work, empty=place)
        refused = self._refused(history)
        if refused is not None:
            if isinstance(self._policy.micro_batch_size, int):
                raise self._refusal(*refused)
            history.reported = (
                refused,
                history.weighting_of_parts(),
                history.may_change_gradient_later(),
            )
            self._report_promises(history, work.size, refused)
        return refused is None

    def _distinguishes_weightings(self, history: _LossHistory, work: Work) -> bool:
        """Return whether this batch distinguishes weightings that were equal in all trials so far.

        To find out, entries in the batch's integer tensors and masks are counted. If items are
        declared, the result is False.
        """
        verdict = history.verdict
        size = work.size
        if verdict is None or verdict.outcome not in ("exact", "random") or verdict.declared:
            return False
        if size is None or size < 2:
            return False
        batch = largest_of(work.batch, work.split)
        candidates = dict.fromkeys([*verdict.held, *find_weightings(batch, size)])
        remaining = [weighting for weighting in candidates if weighting not in verdict.failed]
        if len(remaining) < 2 or callable(work.split):
            return False
        # Round the size of a piece up, so that there are at most `_PIECES` pieces.
        pieces = micro_batches(batch, size, -(-size // _PIECES), work.split)
        return disagreement(remaining, pieces) > TELLING

    def _hazards(self, history: _LossHistory) -> dict[SplitHazard, str]:
        """Return the reasons not to split, keyed by their names in ``Policy.allow_split_with``."""
        verdict = history.verdict
        hazards: dict[SplitHazard, str] = {}
        # Only layers in training mode count, since they are harmless in evaluation mode.
        norms = self._mixing_layers()
        if norms:
            layers = counted(len(norms), f"{type(norms[0]).__name__} layer")
            hazards["batch_norm"] = (
                f"in training mode, {layers} would compute statistics over a micro-batch instead of"
                " the batch"
            )
        changed_buffers = list(self._buffers.mutable_outside_norms())
        if verdict is not None and verdict.changed_buffer:
            changed_buffers.append(verdict.changed_buffer)
        if changed_buffers:
            hazards["buffers"] = f"each forward pass changes the buffer {changed_buffers[0]!r}"
        if verdict is not None and verdict.outcome == "unknown":
            hazards["coupled_loss"] = (
                f"a trial could not show whether splitting keeps the gradient ({verdict.why};"
                " set check_split=False if you know that it does)"
            )
        if verdict is not None and verdict.outcome == "coupled":
            hazards["coupled_loss"] = _coupling(verdict)
        return hazards

    def _refused(self, history: _LossHistory) -> tuple[SplitHazard, str] | None:
        """Return the name and description of the first hazard that the policy does not allow.

        Returns None if there is no such hazard.
        """
        for name, why in self._hazards(history).items():
            if name not in self._policy.allow_split_with:
                return name, why
        return None

    def _promise_of_split(self, history: _LossHistory) -> Promise:
        """Return the promise of a split. Hazards that the policy allows lower the promise."""
        if self._hazards(history):
            return "changes training"
        draws = "none" if history.verdict is None else history.verdict.draws
        if draws in ("shared", "unknown"):
            # If samples share random numbers, splitting changes the variance of the loss, but not
            # its expected value.
            return "changes training"
        if history.may_change_gradient_later():
            return "changes training"
        dropout = any(
            module.training and _has_dropout(module)
            for model in self.parts.models.values()
            for module in model.modules()
        )
        if draws != "none" or dropout:
            return "equal in distribution"
        return "equal up to rounding"

    def _refusal(self, hazard: str, why: str) -> BatchError:
        """Return an H206 or H207 error for a policy that sets the micro-batch size."""
        items = ""
        if hazard == "coupled_loss":
            items = (
                "if samples are independent and the mean is over something that the batch does not"
                " show, return Loss(mean, items). If the loss compares samples, pass"
                " TwoPass(outputs, loss). If batches are padded to the longest sample, trim each"
                " part to its own longest sample and leave padding out of the mean"
                " (docs/how-to/out-of-memory.md). Otherwise, "
            )
        return BatchError(
            f"micro_batch_size={self._policy.micro_batch_size}, and {why}",
            limit="splitting such a batch changes training",
            fix=(
                f'{items}use micro_batch_size="auto" (which tries recompute before splitting), or'
                f" allow it with Policy(allow_split_with=({hazard!r},))."
            ),
            rule="H207" if hazard == "coupled_loss" else "H206",
        )

    def _forks(self) -> bool:
        """Return whether trials can run in a forked copy of this process."""
        if not self._may_fork or self.parts.device_type() != "cpu":
            return False
        try:
            return backward_works_in_a_copy()
        except NoAnswer as error:
            self._report_no_copy(str(error))
            return False

    def _report_no_copy(self, why: str) -> None:
        """Record once that this process could not be forked for a trial."""
        if not self._reported_no_copy:
            self._reported_no_copy = True
            self._record.emit(run_events.SplitNotTried(why=why))

    def _try_split(
        self, history: _LossHistory, work: Work, empty: int | None = None, *, splits: bool = True
    ) -> bool:
        """Run a trial split with the batch of a step, and store the verdict.

        Args:
            history: The history of the loss function.
            work: The input of the step.
            empty: The position of a sample to try as a part without items. None for no such part.
            splits: Whether this step is about to be split, so that the verdict is needed now.

        Returns:
            Whether the trial has also looked for side effects.
        """
        if not self._policy.check_split:
            history.verdict = SplitCheckResult(outcome="trusted", why="check_split=False")
            return False
        assert work.size is not None
        size = work.size
        batch = largest_of(work.batch, work.split)
        if isinstance(work.batch, Window):
            empty = None

        result = self._verdict_of(
            history, work, lambda check: check.run(batch, size, empty), here=splits
        )
        if result.not_made:
            # There is no verdict yet, so the first split runs the trial again.
            return False
        history.verdict = result if history.verdict is None else merged([history.verdict, result])
        if history.verdict.changes_batch or history.verdict.outcome != "unknown":
            history.changes_batch = history.verdict.changes_batch or bool(history.changes_batch)
        has_detected = result.outcome != "unknown" and not self._ran_in_this_process
        if has_detected:
            history.side_effects = history.verdict.side_effects
        return has_detected

    def _verdict_of(
        self,
        history: _LossHistory,
        work: Work,
        run: Callable[[SplitCheck], SplitCheckResult],
        *,
        here: bool,
    ) -> SplitCheckResult:
        """Run a check and return its verdict.

        If possible, the check runs in a forked copy of this process, otherwise in this process. If
        this process can be forked in general, but not this time, for example because memory is
        short, the check runs in this process only if `here` is True. Pass True if the verdict is
        needed now.

        Raises:
            BatchError: H209 for a loss function that calls backward or steps an optimizer.
        """
        result = None
        if self._forks():
            check = self._split_check(history, work, in_a_copy=True)
            result = in_a_copy(lambda: attempted(lambda: run(check)))
            if result.not_made:
                self._report_no_copy(result.why)
        if result is None or (result.not_made and here):
            self._ran_in_this_process = True
            check = self._split_check(history, work, in_a_copy=False)
            # The caller restores the buffers and the random state of accelerators.
            with isolated(), self._alone():
                result = attempted(lambda: run(check))
        if result.called:
            raise called_inside(result.called)
        return result

    def note_split_step(self, loss_fn: LossFunction, seconds: float) -> None:
        """Add the duration of a split step to the total, which limits the time for checks."""
        history = self._history_of(loss_fn)
        history.timed_steps += 1
        history.timed_seconds += seconds

    def _is_later_check_due(self, history: _LossHistory, *, due: bool) -> bool:
        """Return whether a micro-batch must be compared with its halves.

        This is never due in the first split step, since a micro-batch of this size may not fit in
        memory.
        """
        verdict = history.verdict
        if not self._policy.check_split or history.split_steps < 2 or verdict is None:
            return False
        if verdict.outcome not in ("exact", "random"):
            # With any other outcome, a split makes no promise that could turn out to be wrong.
            return False
        if due or history.steps_in_doubt > 0:
            return True
        return history.split_steps % history.steps_between_checks == 0

    def _compare_halves(self, history: _LossHistory, work: Work, part: int) -> None:
        """Compare a micro-batch of this step with its two halves."""
        assert history.verdict is not None
        assert work.size is not None
        batch = largest_of(work.batch, work.split)
        clock = self._record.clock
        # A micro-batch of one sample has no halves. Take a different micro-batch each time.
        parts = micro_batches(batch, work.size, max(2, part), work.split)
        candidates = [(piece, samples) for piece, samples in parts if samples > 1]
        piece, samples = candidates[history.later_checks % len(candidates)]
        history.later_checks += 1

        started = clock.monotonic_seconds()
        comparison = self._verdict_of(
            history, work, lambda check: check.compare_halves(piece, samples), here=False
        )
        seconds = clock.monotonic_seconds() - started
        history.add_comparison(comparison)
        if history.timed_steps:
            step_seconds = history.timed_seconds / history.timed_steps
            history.steps_between_checks = steps_between_checks(seconds, step_seconds)
        history.timed_steps = 0
        history.timed_seconds = 0.0

    def _detect_side_effects(
        self, history: _LossHistory, work: Work, *, logs_too: bool = False
    ) -> tuple[str, ...] | None:
        """Return the names of state that a forward pass changes, or None if a trial fails."""
        check = self._split_check(history, work, in_a_copy=True)
        size = work.size
        batch = work.batch if size is None else largest_of(work.batch, work.split)
        result = in_a_copy(
            lambda: attempted(lambda: check.detect_side_effects(batch, size, logs_too=logs_too))
        )
        if result.outcome == "unknown" and size is not None:
            # A trial with few samples may fail, for example if a state has one row per sample.
            result = in_a_copy(
                lambda: attempted(lambda: check.detect_side_effects(batch, None, logs_too=logs_too))
            )
        if result.called:
            raise called_inside(result.called)
        return None if result.outcome == "unknown" else result.side_effects

    def side_effects(self, work: Work) -> tuple[str, ...]:
        """Return the names of state that the loss function changes and that a retry cannot restore.

        If no trial succeeds, the only entry says that these names are unknown.
        """
        history = self._history_of(work.loss_fn)
        names = history.side_effects
        # The loss function may have started to change state after the first steps.
        if not names and self._forks():
            names_now = self._detect_side_effects(history, work, logs_too=True)
            if names_now is not None:
                names = names_now
        if names is None and self._forks():
            return ("unknown, because a trial was not possible",)
        return names or ()

    def _split_check(self, history: _LossHistory, work: Work, *, in_a_copy: bool) -> SplitCheck:
        """Return a new `SplitCheck` for the loss function of a step."""
        held: tuple[Weighting, ...] = ()
        has_passed = False
        if history.verdict is not None:
            held = history.verdict.held
            has_passed = history.verdict.outcome in ("exact", "random")
        return SplitCheck(
            loss_fn=work.loss_fn,
            split=work.split,
            models=self.parts.models,
            states=self.keeper().states,
            parameters=work.parameters,
            calling=self._calling,
            rounds_to_half=self._policy.precision != "fp32",
            in_a_copy=in_a_copy,
            earlier_weightings=held,
            has_passed=has_passed,
        )

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        with self.inside(), autocast(self.parts.device_type(), self._policy.precision):
            yield

    def called(self, loss_fn: LossFunction, function: Callable[[Any], Any], part: Any) -> Any:
        """Call a function with the batch, or with a copy if the function may change it.

        Args:
            loss_fn: The loss function of the step.
            function: The function to call: the loss function or a part of it.
            part: The batch or a part of it.
        """
        history = self._history_of(loss_fn)
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
        self.notice_change(loss_fn)
        return BatchError(
            f"loss_fn changed the tensors of its batch in place, and {why_again}",
            limit="a step can be retried only with an unchanged batch",
            fix=(
                "do not change the batch in place: write x = x - mean instead of x -= mean. From"
                " the next step on, loss_fn receives copies."
            ),
            rule="H208",
        )

    def notice_change(self, loss_fn: LossFunction) -> None:
        """Record that a loss function changes its batch, so that it receives copies from now on."""
        self._history_of(loss_fn).changes_batch = True


def _is_power_of_two(count: int) -> bool:
    # A power of two has a single 1 bit, which the subtraction clears.
    return count > 0 and count & (count - 1) == 0


def _coupling(verdict: SplitCheckResult) -> str:
    """Return a message on how much the gradients differ and which weightings were tried."""
    if verdict.why:
        return verdict.why
    share = verdict.difference
    percent = f"{share:.1%}" if share >= 1e-3 else f"{100 * share:.1g}%"
    difference = f"differs by {percent} from the gradient over 3 + 1 of them"
    if math.isnan(share):
        difference = "differs from the gradient over 3 + 1 of them in at least one batch"
    if math.isinf(share):
        difference = "is finite, but the gradient over 3 + 1 of them is not"
    others = [
        str(weighting) for weighting in verdict.failed if weighting.kind not in ("samples", "sum")
    ]
    tried = ""
    if verdict.failed:
        tried = ", weighted as a mean over samples"
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        tried += f"; neither a sum nor a mean over {', '.join(others[:3])}{more} matches"
    return f"the gradient over 4 samples {difference}{tried}"


def _has_dropout(module: nn.Module) -> bool:
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(rate, float) and rate > 0
