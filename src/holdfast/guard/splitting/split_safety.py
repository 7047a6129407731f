"""Decide whether batches may be split for a loss function, and what that promises.

In the first step, a trial with four samples shows what splitting would change. The result is
recorded as an event. If splitting would change training, there is also a warning, or an error if
the policy sets the micro-batch size. If the trial gives no answer, batches are not split.

While batches are being split, the trial is repeated at the 1st, 2nd, 4th, 8th, ... split step, and
the worst result counts. A mean over tokens, for example, looks like a mean over samples as long as
all sentences have the same length. If a batch can distinguish weightings that were equal in all
trials so far, it is tried before it is split.

In addition, a micro-batch is compared with its two halves from time to time, see
`steps_between_checks`. If they differ, the promise is lowered, and the next few split steps are
checked as well. After a second failure among these, batches are no longer split. The promise was
then wrong for some steps; the event ``split_stopped`` names the last step for which it held.
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
# are more, such a string probably changes in every step.
_MOST_KNOWN = 64
# The first batches that distinguish weightings are all tried; after this many, only the 32nd, 64th,
# and so on.
_ALWAYS = 16
# Comparing micro-batches with their halves may take at most this share of the time of split steps.
# Two runs of the same script differ by 1 % anyway. A loss that starts to couple samples is then
# detected after a few hundred steps.
_SHARE_OF_CHECKS = 0.01
# The number of split steps between two such comparisons until their cost is known, and the minimum
# afterwards. Before that, the trials at the 2nd, 4th, ..., 64th split step serve the same purpose.
_FEWEST_STEPS_BETWEEN = 64
# After a comparison has failed, this many of the next split steps are checked too. A single failure
# may come from rounding that has moved a value across a threshold. A loss that selects samples
# fails in more than half of the steps.
_STEPS_IN_DOUBT = 4
# The maximum number of steps between two comparisons, in case a clock does not advance.
_MOST_STEPS_BETWEEN = 2**16


def steps_between_checks(check_seconds: float, step_seconds: float) -> int:
    """Return the number of split steps until a micro-batch is compared with its halves again.

    Checks then take at most `_SHARE_OF_CHECKS` of the time. The number is a power of two, so that
    ranks whose clocks differ slightly check in the same steps.

    Args:
        check_seconds: How long the last comparison took.
        step_seconds: How long the attempts of a split step take.
    """
    steps = _FEWEST_STEPS_BETWEEN
    while check_seconds > _SHARE_OF_CHECKS * step_seconds * steps and steps < _MOST_STEPS_BETWEEN:
        steps *= 2
    return steps


@dataclass(slots=True)
class _Known:
    """What is known about one loss function."""

    # The result of all trials so far, or None before the first.
    verdict: SplitCheckResult | None = None
    # Whether it changes the tensors of its batch; None if that is not known yet.
    changes_batch: bool | None = None
    # The number of steps with this function; of these, how many were split; and of these, how many
    # had a batch that distinguishes weightings.
    steps: int = 0
    split_steps: int = 0
    telling_steps: int = 0
    # Whether a trial had a part with no items, that is, nothing for the mean to count.
    tried_empty: bool = False
    # The last facts that were reported: the hazard that forbids splitting, the weighting, and
    # whether splitting may change the gradient later.
    said: tuple[tuple[str, str] | None, Weighting, bool] | None = None
    # The last step at which a check passed.
    equal_until_step: int | None = None
    # The number of comparisons of a micro-batch with its halves.
    later_checks: int = 0
    steps_between_checks: int = _FEWEST_STEPS_BETWEEN
    # How many of the next split steps to check, after a micro-batch has differed from its halves.
    steps_in_doubt: int = 0
    # The number of split steps since the last comparison, and how long their attempts took.
    timed_steps: int = 0
    timed_seconds: float = 0.0
    # Whether no further trial is necessary until a batch is split.
    settled: bool = False
    # The names of attributes and variables that a forward pass changes; None if not known yet.
    side_effects: tuple[str, ...] | None = None
    warned: bool = False

    def chosen(self) -> Weighting:
        """Return what parts are weighted by, according to the trials so far."""
        return SAMPLES if self.verdict is None else self.verdict.weighting()

    def add_comparison(self, comparison: SplitCheckResult) -> None:
        """Add the result of comparing a micro-batch with its halves.

        A failure counts only if it is followed by a second one in the next few split steps, which
        are checked because of the first. A comparison that was impossible, for example because of a
        lack of memory, does not change the verdict.
        """
        assert self.verdict is not None
        if comparison.outcome == "coupled" and not self.steps_in_doubt:
            self.steps_in_doubt = _STEPS_IN_DOUBT
            return
        self.steps_in_doubt = max(0, self.steps_in_doubt - 1)
        if comparison.outcome != "unknown":
            self.verdict = merged([self.verdict, comparison])

    def may_turn_wrong(self) -> bool:
        """Return whether splitting may change the gradient later, although no trial has so far."""
        return self.steps_in_doubt > 0 or (
            self.verdict is not None and self.verdict.may_turn_wrong()
        )


class SplitSafety:
    """Determines for each loss function of a run whether batches may be split.

    Args:
        parts: The models, optimizers and further state of the run.
        policy: The policy of the run.
        buffers: The keeper of buffers, which knows which of them change.
        record: Where events are recorded.
        may_fork: Whether trials may run in a forked copy of this process.
        alone: Returns a context in which one of several ranks runs the model without the others.
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
        # What is known about each loss function, by its description.
        self._known: dict[str, _Known] = {}
        # A weak reference to the last loss function, and what is known about it.
        self._last: tuple[Callable[[], Any], _Known] = (lambda: None, _Known())
        # Why the first batch without a batch dimension cannot be split, or None.
        self._uncuttable: str | None = None
        self._reported_no_copy = False
        # Whether a trial of the current step has run in this process rather than in a copy.
        self._has_run_here = False
        parameters = [parameter for _, parameter in parts.named_parameters()]
        # Returns a context for a call of a loss function; see `ReturningALoss`.
        self.inside = functools.partial(ReturningALoss, parts.optimizers.values(), parameters)

    def keeper(self) -> BufferKeeper:
        """Return a new keeper of buffers and states, for extra passes that are undone in a step."""
        untouched = self._buffers.states.untouched()
        states = {
            name: state for name, state in kept_states(self.parts).items() if name not in untouched
        }
        return BufferKeeper(self.parts.models, StateKeeper(states, every=True))

    def size_of(self, batch: Any, split: Split) -> int | None:
        """Return the number of samples in a batch, or in the largest batch of a window.

        None if the batch has no batch dimension.

        Raises:
            BatchError: H205 for an empty batch, or if the batch does not match ``split=`` or the
                policy.
        """
        if isinstance(batch, Window):
            sizes = [self.size_of(part, split) for part in batch]
            return None if None in sizes else max(size for size in sizes if size is not None)
        try:
            size = batch_size(batch, split)
        except BatchError as error:
            if self._policy.micro_batch_size is None:
                return None
            # With default settings, it is only a guess that all tensors have the batch dimension
            # first, so a mismatch is no error. Otherwise the user's setting is wrong.
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
                fix="leave out empty batches, or use drop_last=True.",
                rule="H205",
            )
        return size

    def check(self, work: Work, part: int | None) -> tuple[bool, bool]:
        """Run a trial of splitting if one is due, and report what cannot be promised.

        Args:
            work: The step.
            part: The number of samples in a micro-batch of this step; None if it is not split.

        Returns:
            Whether a trial has run in this process, so that buffers and random state must be
            restored; and whether the batch may be split.

        Raises:
            BatchError: H206 or H207 if the policy sets the micro-batch size, and splitting would
                change training.
        """
        known = self._of(work.loss_fn)
        splits_now = part is not None
        if not splits_now and known.settled:
            return False, True
        # In a window, flags of the function may have changed since the first batch.
        self.describe(work.loss_fn)
        known = self._last[1]
        known.steps += 1
        known.split_steps += splits_now
        self._has_run_here = False
        size = work.size
        can_fork = self._forks()
        trial_is_due = self._is_trial_due(known, work, part)
        # The batches of a window are weighted even if none of them is split.
        is_weighted = (
            isinstance(work.batch, Window) and len(work.batch) > 1 and not work.batch.added
        )
        may_ever_split = self._policy.micro_batch_size is not None and size is not None
        # Without a fork, a trial runs in this process, so it waits until the result is needed.
        may_try = may_ever_split and size != 1 and (can_fork or splits_now or is_weighted)
        has_looked = False
        if trial_is_due and may_try:
            has_looked = self._try_split(known, work, splits=splits_now or is_weighted)
        must_compare = may_try and splits_now and self._is_later_check_due(known, due=trial_is_due)
        if part is not None and must_compare:
            self._compare_halves(known, work, part)
        # This includes the second step, since the first batch may be special, for example because
        # the loss function resets a counter at the start of an epoch.
        if known.steps <= 2:
            self._check_side_effects(known, work, look=can_fork and not has_looked)

        refused = self._refused(known)
        if splits_now and refused is not None:
            self._stop_splitting(known, *refused)
        facts = (refused, known.chosen(), known.may_turn_wrong())
        if known.steps == 1 or (splits_now and facts != known.said):
            self._say(known, size, refused)
        known.said = facts
        was_checked = trial_is_due or must_compare
        if refused is None and splits_now and was_checked and not known.steps_in_doubt:
            known.equal_until_step = self._record.global_step
        has_verdict = known.verdict is not None and known.verdict.outcome != "unknown"
        # Changes in the loss function are still noticed before a split or a retry.
        known.settled = has_verdict or not (can_fork or is_weighted) or not may_ever_split
        return self._has_run_here, refused is None

    def _is_trial_due(self, known: _Known, work: Work, part: int | None) -> bool:
        """Return whether a trial of four samples is due in this step."""
        if part is None:
            return _is_power_of_two(known.steps)
        is_due = _is_power_of_two(known.split_steps)
        if not is_due and self._tells_apart(known, work):
            known.telling_steps += 1
            is_due = known.telling_steps <= _ALWAYS or _is_power_of_two(known.telling_steps)
        if not known.tried_empty and work.size is not None and not callable(work.split):
            # The first time that a part would contain no items, that must be tried.
            batch = largest_of(work.batch, work.split)
            parts = micro_batches(batch, work.size, part, work.split)
            known.tried_empty = bool(with_an_empty_one(known.chosen(), parts, 2))
            is_due = is_due or known.tried_empty
        return is_due

    def _check_side_effects(self, known: _Known, work: Work, *, look: bool) -> None:
        """Look for side effects of a forward pass, and report them once.

        Args:
            known: The facts about the loss function.
            work: The step.
            look: Whether to look for side effects if none are known.
        """
        if look and not known.side_effects:
            side_effects = self._look_for_side_effects(known, work)
            if side_effects is not None:
                known.side_effects = side_effects
        if known.side_effects and not known.warned:
            known.warned = True
            self._record.emit(
                run_events.SideEffects(
                    attributes=known.side_effects,
                    why=(
                        "each forward pass changes them, including those of a retry, and no"
                        " checkpoint holds them; keep such state in a buffer, or in an object"
                        " passed as state="
                    ),
                )
            )

    def _stop_splitting(self, known: _Known, hazard: SplitHazard, why: str) -> None:
        """Report that batches must not be split, in a step that was about to split its batch.

        Raises:
            BatchError: H206 or H207 if the policy sets the micro-batch size.
        """
        if known.split_steps > 1:
            self._record.emit(
                run_events.SplitStopped(
                    why=why,
                    allow_split_with=hazard,
                    equal_until_step=known.equal_until_step,
                )
            )
        if isinstance(self._policy.micro_batch_size, int):
            raise self._refusal(hazard, why)

    def _say(self, known: _Known, size: int | None, refused: tuple[str, str] | None) -> None:
        """Record what splitting promises, or why batches are not split."""
        verdict = known.verdict
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
            weighting = "as declared" if verdict.declared else str(known.chosen())
            if not obstacle:
                split_promise = self._promise_of_split(known)
        self._record.emit(
            run_events.Promises(
                batch_size=size,
                split=split,
                split_promise=split_promise,
                weighting=weighting,
                split_check=None if verdict is None else verdict.facts(),
                # This is None on an accelerator, where side effects are not searched for.
                side_effects=known.side_effects,
            )
        )
        is_first = known.split_steps <= 1
        if refused is not None and self._policy.micro_batch_size == "auto" and is_first:
            self._record.emit(run_events.SplitRefused(why=refused[1], allow_split_with=refused[0]))

    def remedies(self, work: Work) -> Remedies:
        """Return the possible remedies for an out-of-memory, after a trial of splitting."""
        if work.size is None or self._policy.micro_batch_size is None:
            return Remedies(
                no_split=self._uncuttable
                or "splitting is off, because of micro_batch_size=None or a sharded model",
                smallest=0,
            )
        self.describe(work.loss_fn)
        known = self._last[1]
        if work.size > 1:
            self._try_split(known, work)
        refused = self._refused(known)
        return Remedies(
            no_split=None if refused is None else refused[1],
            split_promise=self._promise_of_split(known),
            smallest=self.smallest_part(),
        )

    def smallest_part(self) -> int:
        """Return the smallest number of samples that a forward pass can process."""
        return 2 if self._mixing_layers() else 1

    def _mixing_layers(self) -> list[nn.Module]:
        return [layer for model in self.parts.models.values() for layer in mixing_layers(model)]

    def _of(self, loss_fn: LossFunction) -> _Known:
        """Return what is known about a loss function."""
        if self._last[0]() is not loss_fn:
            self.describe(loss_fn)
        return self._last[1]

    def describe(self, loss_fn: LossFunction) -> str:
        """Return the text that identifies a loss function with its current flags.

        Called once in each step.
        """
        text = description_of(loss_fn)
        key = text
        if key not in self._known and len(self._known) >= _MOST_KNOWN:
            key = description_of(loss_fn, 0)
        known = self._known.get(key) or self._known.setdefault(key, _Known())
        try:
            self._last = (weakref.ref(loss_fn), known)
        except TypeError:
            # It does not support weak references, so it must be described again each time.
            self._last = ((lambda: None), known)
        return text

    def weighting(self, loss_fn: LossFunction) -> Weighting:
        """Return what the parts of a batch are weighted by, if no items are declared."""
        return self._of(loss_fn).chosen()

    def empty_is_tried(self, loss_fn: LossFunction) -> bool:
        """Return whether a part without items needs no trial, or has had one."""
        return self._of(loss_fn).tried_empty or not self._policy.check_split

    def may_leave_out(self, work: Work, place: int) -> bool:
        """Find out by a trial whether a part that has a loss but no items can be left out.

        The random state and the buffers of the step must be restored afterwards.

        Args:
            work: The step.
            place: The position of the first sample of the part.

        Raises:
            BatchError: H207 if it cannot, and the policy sets the micro-batch size.
        """
        known = self._of(work.loss_fn)
        known.tried_empty = True
        self._try_split(known, work, empty=place)
        refused = self._refused(known)
        if refused is not None:
            if isinstance(self._policy.micro_batch_size, int):
                raise self._refusal(*refused)
            known.said = (refused, known.chosen(), known.may_turn_wrong())
            self._say(known, work.size, refused)
        return refused is None

    def _tells_apart(self, known: _Known, work: Work) -> bool:
        """Return whether this batch distinguishes weightings that were equal in all trials so far.

        This counts entries of the batch's integer tensors and masks, unless items are declared.
        """
        verdict = known.verdict
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
        pieces = micro_batches(batch, size, -(-size // _PIECES), work.split)
        return disagreement(remaining, pieces) > TELLING

    def _hazards(self, known: _Known) -> dict[SplitHazard, str]:
        """Return the reasons not to split, by the names under which the policy can allow them."""
        verdict = known.verdict
        hazards: dict[SplitHazard, str] = {}
        # The current mode counts, since in evaluation mode these layers are harmless.
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

    def _refused(self, known: _Known) -> tuple[SplitHazard, str] | None:
        """Return the first hazard that the policy does not allow, with its description, or None."""
        for name, why in self._hazards(known).items():
            if name not in self._policy.allow_split_with:
                return name, why
        return None

    def _promise_of_split(self, known: _Known) -> Promise:
        """Return what splitting promises, with the hazards that the policy allows."""
        if self._hazards(known):
            return "changes training"
        draws = "none" if known.verdict is None else known.verdict.draws
        if draws in ("shared", "unknown"):
            # If samples share random numbers, splitting changes the variance of the loss, although
            # not its expected value.
            return "changes training"
        if known.may_turn_wrong():
            return "changes training"
        dropout = any(
            module.training and _drops(module)
            for model in self.parts.models.values()
            for module in model.modules()
        )
        if draws != "none" or dropout:
            return "equal in distribution"
        return "equal up to rounding"

    def _refusal(self, hazard: str, why: str) -> BatchError:
        """Return H206 or H207 for a policy that sets the micro-batch size."""
        items = ""
        if hazard == "coupled_loss":
            items = (
                "if samples are independent and the mean is over something that the batch does not"
                " show, return Loss(mean, items); if the loss compares samples, pass"
                " TwoPass(outputs, loss); if batches are padded to the longest sample, trim each"
                " part to its own longest sample and leave padding out of the mean"
                " (docs/how-to/out-of-memory.md); otherwise "
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
        """Record once that this process cannot be forked for a trial."""
        if not self._reported_no_copy:
            self._reported_no_copy = True
            self._record.emit(run_events.SplitNotTried(why=why))

    def _try_split(
        self, known: _Known, work: Work, empty: int | None = None, *, splits: bool = True
    ) -> bool:
        """Run a trial of splitting with the batch of a step, and note the verdict.

        Args:
            known: The facts about the loss function.
            work: The step.
            empty: The position of a sample to try as a part without items, or None.
            splits: Whether this step is about to be split, so that the verdict is needed now.

        Returns:
            Whether the trial has also looked for side effects.
        """
        if not self._policy.check_split:
            known.verdict = SplitCheckResult(outcome="trusted", why="check_split=False")
            return False
        assert work.size is not None
        size = work.size
        batch = largest_of(work.batch, work.split)
        if isinstance(work.batch, Window):
            empty = None

        result = self._verdict_of(
            known, work, lambda check: check.run(batch, size, empty), here=splits
        )
        if result.not_made:
            # There is no verdict yet. The first split will try again.
            return False
        known.verdict = result if known.verdict is None else merged([known.verdict, result])
        if known.verdict.changes_batch or known.verdict.outcome != "unknown":
            known.changes_batch = known.verdict.changes_batch or bool(known.changes_batch)
        looked = result.outcome != "unknown" and not self._has_run_here
        if looked:
            known.side_effects = known.verdict.side_effects
        return looked

    def _verdict_of(
        self,
        known: _Known,
        work: Work,
        run: Callable[[SplitCheck], SplitCheckResult],
        *,
        here: bool,
    ) -> SplitCheckResult:
        """Run a check and return its verdict.

        The check runs in a forked copy of this process if possible, and otherwise in this process.
        If only this fork has failed, for example for lack of memory, the check runs in this process
        only if `here` is True, because the verdict is needed now.

        Raises:
            BatchError: H209, for a loss function that calls backward or steps an optimizer.
        """
        result = None
        if self._forks():
            check = self._split_check(known, work, in_a_copy=True)
            result = in_a_copy(lambda: attempted(lambda: run(check)))
            if result.not_made:
                self._report_no_copy(result.why)
        if result is None or (result.not_made and here):
            self._has_run_here = True
            check = self._split_check(known, work, in_a_copy=False)
            # The caller restores buffers and the random state of accelerators.
            with isolated(), self._alone():
                result = attempted(lambda: run(check))
        if result.called:
            raise called_inside(result.called)
        return result

    def note_split_step(self, loss_fn: LossFunction, seconds: float) -> None:
        """Note how long the attempt of a split step took, to limit the time spent on checks."""
        known = self._of(loss_fn)
        known.timed_steps += 1
        known.timed_seconds += seconds

    def _is_later_check_due(self, known: _Known, *, due: bool) -> bool:
        """Return whether a micro-batch must be compared with its halves.

        Not in the first split step, since it is not known yet that a micro-batch of this size fits.
        """
        verdict = known.verdict
        if not self._policy.check_split or known.split_steps < 2 or verdict is None:
            return False
        if verdict.outcome not in ("exact", "random"):
            # In this case splitting makes no promise that could turn out wrong.
            return False
        if due or known.steps_in_doubt > 0:
            return True
        return known.split_steps % known.steps_between_checks == 0

    def _compare_halves(self, known: _Known, work: Work, part: int) -> None:
        """Compare one of the micro-batches of this step with its two halves."""
        assert known.verdict is not None
        assert work.size is not None
        batch = largest_of(work.batch, work.split)
        clock = self._record.clock
        parts = micro_batches(batch, work.size, max(2, part), work.split)
        candidates = [(piece, samples) for piece, samples in parts if samples > 1]
        piece, samples = candidates[known.later_checks % len(candidates)]
        known.later_checks += 1

        began = clock.monotonic_seconds()
        comparison = self._verdict_of(
            known, work, lambda check: check.compare_halves(piece, samples), here=False
        )
        seconds = clock.monotonic_seconds() - began
        known.add_comparison(comparison)
        if known.timed_steps:
            step_seconds = known.timed_seconds / known.timed_steps
            known.steps_between_checks = steps_between_checks(seconds, step_seconds)
        known.timed_steps = 0
        known.timed_seconds = 0.0

    def _look_for_side_effects(
        self, known: _Known, work: Work, *, logs_too: bool = False
    ) -> tuple[str, ...] | None:
        """Return the names of what a forward pass changes, or None if a trial is impossible."""
        check = self._split_check(known, work, in_a_copy=True)
        size = work.size
        batch = work.batch if size is None else largest_of(work.batch, work.split)
        result = in_a_copy(lambda: attempted(lambda: check.look(batch, size, logs_too=logs_too)))
        if result.outcome == "unknown" and size is not None:
            # A few samples may fail, for example if a state has the size of the whole batch.
            result = in_a_copy(
                lambda: attempted(lambda: check.look(batch, None, logs_too=logs_too))
            )
        if result.called:
            raise called_inside(result.called)
        return None if result.outcome == "unknown" else result.side_effects

    def side_effects(self, work: Work) -> tuple[str, ...]:
        """Return the names of state that a loss function changes and a retry does not restore.

        If that is not known because a trial was impossible, the only entry says so.
        """
        known = self._of(work.loss_fn)
        names = known.side_effects
        # The loss function may have begun to change something since the first steps.
        if not names and self._forks():
            names_now = self._look_for_side_effects(known, work, logs_too=True)
            if names_now is not None:
                names = names_now
        if names is None and self._forks():
            return ("unknown, since a trial was not possible",)
        return names or ()

    def _split_check(self, known: _Known, work: Work, *, in_a_copy: bool) -> SplitCheck:
        """Return a check of a step's loss function, which has not run yet."""
        return SplitCheck(
            loss_fn=work.loss_fn,
            split=work.split,
            models=self.parts.models,
            states=self.keeper().states,
            parameters=work.parameters,
            calling=self._calling,
            rounds_to_half=self._policy.precision != "fp32",
            in_a_copy=in_a_copy,
            known=() if known.verdict is None else known.verdict.held,
            has_passed=known.verdict is not None and known.verdict.outcome in ("exact", "random"),
        )

    @contextlib.contextmanager
    def _calling(self) -> Iterator[None]:
        with self.inside(), autocast(self.parts.device_type(), self._policy.precision):
            yield

    def called(self, loss_fn: LossFunction, function: Callable[[Any], Any], part: Any) -> Any:
        """Call a loss function, or a part of it, with a copy of the batch if it may change that.

        Args:
            loss_fn: The loss function.
            function: The function to call, which is the loss function or a part of it.
            part: The batch, or a part of it.
        """
        known = self._of(loss_fn)
        if known.changes_batch is False:
            return function(part)
        copy = copied(part)
        tensors = tensors_in(copy)
        before = versions_of(tensors)
        result = function(copy)
        if known.changes_batch is None:
            known.changes_batch = versions_of(tensors) != before
        return result

    def batch_was_changed(self, loss_fn: LossFunction) -> BatchError:
        """Return H208 for a loss function that changed its batch in a step that must be retried."""
        self.notice_change(loss_fn)
        return BatchError(
            "loss_fn changed the tensors of its batch in place, and the step ran out of memory",
            limit="a step can be retried only with an unchanged batch",
            fix=(
                "do not change the batch in place: write x = x - mean instead of x -= mean. From"
                " the next step on, loss_fn receives copies."
            ),
            rule="H208",
        )

    def notice_change(self, loss_fn: LossFunction) -> None:
        """Note that a loss function changes its batch, so that it receives copies from now on."""
        self._of(loss_fn).changes_batch = True


def _is_power_of_two(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0


def _coupling(verdict: SplitCheckResult) -> str:
    """Return a sentence that says how much gradients differ, and which weightings were tried."""
    if verdict.why:
        return verdict.why
    share = verdict.difference
    percent = f"{share:.1%}" if share >= 1e-3 else f"{100 * share:.1g}%"
    difference = f"differs by {percent} from that over 3 + 1 of them"
    if math.isnan(share):
        difference = "differs from that over 3 + 1 of them in at least one batch"
    if math.isinf(share):
        difference = "is finite, but that over 3 + 1 of them is not"
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


def _drops(module: nn.Module) -> bool:
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(rate, float) and rate > 0
