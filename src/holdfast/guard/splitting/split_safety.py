"""What can be promised about the batches and loss functions of a run, found out once and said at
the first step.

A promise that cannot be kept is an event and a warning before training, or an error if the policy
asks for splitting by number. What could not be found out is not promised: such a batch is not
split. While batches are split, the check is repeated at the 1st, 2nd, 4th, 8th ... of them and
after each failure, and the worst that was ever found counts: a mean over tokens looks like one over
samples as long as all sentences are of one length. A batch that could show a difference between
what was equal so far is tried before it is split.

These trials take four samples each, and become rarer. While batches are split, a micro-batch is
also compared with its two halves from time to time, see `steps_between_checks`. If that fails, the
promise is lowered and the next few split steps are checked as well. After a second failure among
these, batches are no longer split. The promise was then wrong for some steps; the event
``split_stopped`` names the last step at which it was still right.
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
_PIECES = 8  # into which a batch is cut to see whether it tells weightings apart
# Loss functions that are distinguished; with more, texts that are bound to them change all the time
_MOST_KNOWN = 64
_ALWAYS = 16  # times that such a batch is tried before it is split; from then on the 32nd, 64th ...
# The share of the time of split steps that comparing micro-batches with their halves may take. Two
# runs of one script differ by 1 % anyway. A loss that begins to couple samples is then detected
# after a few hundred steps.
_SHARE_OF_CHECKS = 0.01
# The number of steps between two such checks until their cost is known, and the least afterwards.
# The trials of the 2nd, 4th ... 64th split step come before.
_FEWEST_STEPS_BETWEEN = 64
# After a comparison that has failed, so many of the next split steps are checked too. One failure
# may be a value that rounding has moved across a threshold; a loss that chooses samples fails more
# often than every other time.
_STEPS_IN_DOUBT = 4
_MOST_STEPS_BETWEEN = 2**16  # where a clock stands still, or a step takes no time beside the check


def steps_between_checks(check_seconds: float, step_seconds: float) -> int:
    """Return the number of split steps until a micro-batch is compared with its halves again.

    Args:
        check_seconds: What the last such check has taken.
        step_seconds: What the attempts of a split step take.

    It is a power of two, so that ranks whose clocks differ a little check in the same steps, and so
    large that checks take at most `_SHARE_OF_CHECKS` of the time.
    """
    steps = _FEWEST_STEPS_BETWEEN
    while check_seconds > _SHARE_OF_CHECKS * step_seconds * steps and steps < _MOST_STEPS_BETWEEN:
        steps *= 2
    return steps


@dataclass(slots=True)
class _Known:
    """What is known about one loss function. None: not yet."""

    verdict: SplitCheckResult | None = None
    changes_batch: bool | None = None
    steps: int = 0
    split_steps: int = 0
    telling_steps: int = 0
    tried_empty: bool = False  # a part that holds nothing of what the mean is over
    said: tuple[tuple[str, str] | None, Weighting, bool] | None = None
    equal_until_step: int | None = None  # the last one at which a check has passed
    later_checks: int = 0  # of a micro-batch and its halves
    steps_between_checks: int = _FEWEST_STEPS_BETWEEN
    # Next split steps to be checked, since a micro-batch differed from its halves
    steps_in_doubt: int = 0
    # Split steps since the last such check, and what their attempts have taken
    timed_steps: int = 0
    timed_seconds: float = 0.0
    settled: bool = False
    side_effects: tuple[str, ...] | None = None
    warned: bool = False

    def chosen(self) -> Weighting:
        """Return what parts are weighted by, as far as it is known."""
        return SAMPLES if self.verdict is None else self.verdict.weighting()

    def take_in(self, comparison: SplitCheckResult) -> None:
        """Take in what comparing a micro-batch with its halves has shown.

        Only a second failure in a row counts.

        In a row: within the split steps that are checked because of the first. What could not be
        tried, such as for lack of memory, says nothing against what was tried before.
        """
        assert self.verdict is not None
        if comparison.outcome == "coupled" and not self.steps_in_doubt:
            self.steps_in_doubt = _STEPS_IN_DOUBT
            return
        self.steps_in_doubt = max(0, self.steps_in_doubt - 1)
        if comparison.outcome != "unknown":
            self.verdict = merged([self.verdict, comparison])

    def may_turn_wrong(self) -> bool:
        """Return whether splitting may change the gradient later, although that has not been
        confirmed so far.
        """
        return self.steps_in_doubt > 0 or (
            self.verdict is not None and self.verdict.may_turn_wrong()
        )


class SplitSafety:
    """Finds out and remembers what holds for each loss function."""

    def __init__(
        self, parts: Parts, policy: Policy, buffers: BufferKeeper, record: RunRecord
    ) -> None:
        self.parts = parts
        self.may_copy = True  # what a step does may be tried out in a copy of this process
        # Of several ranks
        self.alone: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._policy = policy
        self._buffers = buffers
        self._record = record
        self._known: dict[str, _Known] = {}
        self._last: tuple[Callable[[], Any], _Known] = (lambda: None, _Known())
        self._uncuttable: str | None = None
        self._reported_no_copy = False
        # Whether a check has run in this process since that was last asked
        self._has_run_here = False
        every = [parameter for _, parameter in parts.named_parameters()]
        self.inside = functools.partial(ReturningALoss, parts.optimizers.values(), every)

    def keeper(self) -> BufferKeeper:
        """Return a keeper of its own for buffers and states, for what is run within a step and
        taken back.
        """
        untouched = self._buffers.states.untouched()
        states = {
            name: each for name, each in kept_states(self.parts).items() if name not in untouched
        }
        return BufferKeeper(self.parts.models, StateKeeper(states, every=True))

    def size_of(self, batch: Any, split: Split) -> int | None:
        """Return the samples of a batch, of a window those of its largest, or None if it has no
        batch dimension.
        """
        if isinstance(batch, Window):
            sizes = [self.size_of(each, split) for each in batch]
            return None if None in sizes else max(size for size in sizes if size is not None)
        try:
            size = batch_size(batch, split)
        except BatchError as error:
            if self._policy.micro_batch_size is None:
                return None
            # With split= left at 0 nobody has said that the parts agree; else what was said is
            # wrong.
            if self._policy.micro_batch_size != "auto" or (error.rule != "H205" and split != 0):
                raise
            if self._uncuttable is None:
                self._uncuttable = error.what
                self._record.emit(run_events.CannotSplit(why=error.what, fix=error.fix))
            return None
        if size == 0:
            raise BatchError(
                "the batch has 0 samples",
                limit="a step needs at least one",
                fix="leave out empty batches, or use drop_last=True.",
                rule="H205",
            )
        return size

    def check(self, work: Work, part: int | None) -> tuple[bool, bool]:
        """Find out about a loss function, and say at its first step what cannot be promised.

        `part` are the samples of the parts that the batch is cut into now; None: it is not. Return
        whether it was tried out in this process, so that buffers and random state are to be put
        back, and whether this batch may be cut.
        """
        known, splits_now = self._of(work.loss_fn), part is not None
        if not splits_now and known.settled:
            return False, True
        self.describe(work.loss_fn)  # in a window its flags may be others than they were
        known = self._last[1]
        known.steps += 1
        known.split_steps += splits_now
        size, asked = work.size, self._policy.micro_batch_size
        self._has_run_here = False
        looked, forks = False, self._forks()
        due = _is_power_of_two(known.split_steps if splits_now else known.steps)
        if splits_now and not due and self._tells_apart(known, work):
            known.telling_steps += 1
            due = known.telling_steps <= _ALWAYS or _is_power_of_two(known.telling_steps)
        if (
            part is not None
            and not known.tried_empty
            and not callable(work.split)
            and size is not None
        ):
            cut = micro_batches(largest_of(work.batch, work.split), size, part, work.split)
            known.tried_empty = bool(with_an_empty_one(known.chosen(), cut, 2))
            due = due or known.tried_empty
        # The batches of a window are weighted whether one of them is cut or not.
        weighs = isinstance(work.batch, Window) and len(work.batch) > 1 and not work.batch.added
        tries = (
            asked is not None and (forks or splits_now or weighs) and size is not None and size > 1
        )
        if due and tries:
            looked = self._try_split(known, work, splits=splits_now or weighs)
        compares = part is not None and tries and self._is_later_check_due(known, due=due)
        if part is not None and compares:
            self._compare_halves(known, work, part)
        # The second step too, if the first has not shown all: its batch may be one that resets what
        # others change.
        if forks and known.steps <= 2 and not looked and not known.side_effects:
            found = self._look_for_side_effects(known, work)
            known.side_effects = known.side_effects if found is None else found
        if known.side_effects and known.steps <= 2 and not known.warned:
            known.warned = True
            self._record.emit(
                run_events.SideEffects(
                    attributes=known.side_effects,
                    why=(
                        "each forward pass changes them, they are in no checkpoint, and an attempt"
                        " that is made again changes them once more; keep such state in a buffer,"
                        " or in an object given as state="
                    ),
                )
            )
        refused = self._refused(known)
        if splits_now and refused is not None and known.split_steps > 1:
            self._record.emit(
                run_events.SplitStopped(
                    why=refused[1],
                    allow_split_with=refused[0],
                    equal_until_step=known.equal_until_step,
                )
            )
        if splits_now and refused is not None and isinstance(asked, int):
            raise self._refusal(*refused)
        news = refused, known.chosen(), known.may_turn_wrong()
        if known.steps == 1 or (splits_now and news != known.said):
            self._say(known, size, refused)
        known.said = news
        if refused is None and splits_now and (due or compares) and not known.steps_in_doubt:
            known.equal_until_step = self._record.global_step
        tried = known.verdict is not None and known.verdict.outcome != "unknown"
        # What begins later is found before a split and before a step is made again.
        known.settled = tried or not (forks or weighs) or size is None or asked is None
        return self._has_run_here, refused is None

    def _say(self, known: _Known, size: int | None, refused: tuple[str, str] | None) -> None:
        cannot, verdict = refused[1] if refused else self._uncuttable, known.verdict
        split = (
            "possible" if verdict is not None else "possible, to be tried out before the first one"
        )
        if cannot or self._policy.micro_batch_size is None:
            split = f"refused: {cannot}" if cannot else "off"
        weighting = (
            "as declared" if verdict is not None and verdict.declared else str(known.chosen())
        )
        self._record.emit(
            run_events.Promises(
                batch_size=size,
                split=split,
                split_promise=None if cannot or verdict is None else self._promise_of_split(known),
                weighting=None if verdict is None else weighting,
                split_check=None if verdict is None else verdict.facts(),
                # None: not looked for, on an accelerator.
                side_effects=known.side_effects,
            )
        )
        if (
            refused is not None
            and self._policy.micro_batch_size == "auto"
            and known.split_steps <= 1
        ):
            self._record.emit(run_events.SplitRefused(why=refused[1], allow_split_with=refused[0]))

    def remedies(self, work: Work) -> Remedies:
        """Return what a step may do about a lack of memory, finding out what is not known yet."""
        if work.size is None or self._policy.micro_batch_size is None:
            return Remedies(
                no_split=self._uncuttable
                or "micro_batch_size=None, or a sharded model, turns splitting off",
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
        """Return the fewest samples that one forward pass can take."""
        return 2 if self._mixing_layers() else 1

    def _mixing_layers(self) -> list[nn.Module]:
        return [layer for model in self.parts.models.values() for layer in mixing_layers(model)]

    def _of(self, loss_fn: LossFunction) -> _Known:
        """Return what is known of a loss function."""
        if self._last[0]() is not loss_fn:
            self.describe(loss_fn)
        return self._last[1]

    def describe(self, loss_fn: LossFunction) -> str:
        """Return the text that a loss function is known by, with its flags as they are now.

        Once in each step.
        """
        text = key = description_of(loss_fn)
        if key not in self._known and len(self._known) >= _MOST_KNOWN:
            key = description_of(loss_fn, 0)
        known = self._known.get(key) or self._known.setdefault(key, _Known())
        try:
            self._last = weakref.ref(loss_fn), known
        except TypeError:  # it takes none: described each time it is asked for
            self._last = (lambda: None), known
        return text

    def weighting(self, loss_fn: LossFunction) -> Weighting:
        """Return what the parts of a batch are weighted by, where the loss function does not say
        it itself.
        """
        return self._of(loss_fn).chosen()

    def empty_is_tried(self, loss_fn: LossFunction) -> bool:
        """Return whether a part without any items has been tried out, or is not to be."""
        return self._of(loss_fn).tried_empty or not self._policy.check_split

    def may_leave_out(self, work: Work, place: int) -> bool:
        """Try out whether a part, whose first sample is at `place`, may weigh nothing that has no
        items but a loss.

        H207 if the policy asks for parts. Random state and buffers of the step are to be put back.
        """
        known = self._of(work.loss_fn)
        known.tried_empty = True
        self._try_split(known, work, empty=place)
        refused = self._refused(known)
        if refused is not None:
            if isinstance(self._policy.micro_batch_size, int):
                raise self._refusal(*refused)
            known.said = refused, known.chosen(), known.may_turn_wrong()
            self._say(known, work.size, refused)
        return refused is None

    def _tells_apart(self, known: _Known, work: Work) -> bool:
        """Say whether in this batch weights differ that were equal wherever the loss function was
        tried.

        Cost: nothing if items are declared; else some counts of the batch's integer tensors and
        masks.
        """
        verdict, size = known.verdict, work.size
        if (
            verdict is None
            or verdict.outcome not in ("exact", "random")
            or verdict.declared
            or size is None
            or size < 2
        ):
            return False
        batch = largest_of(work.batch, work.split)
        known_or_new = dict.fromkeys([*verdict.held, *find_weightings(batch, size)])
        alive = [weighting for weighting in known_or_new if weighting not in verdict.failed]
        if len(alive) < 2 or callable(work.split):
            return False
        return (
            disagreement(alive, micro_batches(batch, size, -(-size // _PIECES), work.split))
            > TELLING
        )

    def _hazards(self, known: _Known) -> dict[SplitHazard, str]:
        """Return what a split would change, by the name under which a policy can allow it."""
        verdict = known.verdict
        found: dict[SplitHazard, str] = {}
        norms = self._mixing_layers()  # as they are now: in evaluation one is no hazard
        if norms:
            layers = counted(len(norms), f"{type(norms[0]).__name__} layer")
            found["batch_norm"] = (
                f"in training mode, the statistics of {layers} are taken over the samples of one"
                " forward pass"
            )
        changed = self._buffers.mutable_outside_norms()
        changed += (
            [verdict.changed_buffer] if verdict is not None and verdict.changed_buffer else []
        )
        if changed:
            found["buffers"] = f"each forward pass changes the buffer {changed[0]!r}"
        if verdict is not None and verdict.outcome == "unknown":
            found["coupled_loss"] = (
                f"it could not be found out whether that keeps the gradient ({verdict.why};"
                " check_split=False says that it does)"
            )
        if verdict is not None and verdict.outcome == "coupled":
            found["coupled_loss"] = _coupling(verdict)
        return found

    def _refused(self, known: _Known) -> tuple[str, str] | None:
        for name, why in self._hazards(known).items():
            if name not in self._policy.allow_split_with:
                return name, why
        return None

    def _promise_of_split(self, known: _Known) -> Promise:
        """Return what splitting promises, given the hazards that are there and that the policy
        allows.
        """
        if self._hazards(known):
            return "changes training"
        draws = "none" if known.verdict is None else known.verdict.draws
        if draws in ("shared", "unknown"):
            # Shared ones are the same on average over draws, with less variance
            return "changes training"
        if known.may_turn_wrong():
            return "changes training"
        dropout = any(
            module.training and _drops(module)
            for model in self.parts.models.values()
            for module in model.modules()
        )
        return "equal in distribution" if draws != "none" or dropout else "equal up to rounding"

    def _refusal(self, hazard: str, why: str) -> BatchError:
        items = (
            "return Loss(mean, items) if samples are independent and the mean is over something"
            " that the batch does not show; pass TwoPass(outputs, loss) if the loss compares"
            " samples; if it pads to the longest sample, trim each part to its own and leave"
            " padding out of the mean (docs/how-to/out-of-memory.md); else "
            * (hazard == "coupled_loss")
        )
        return BatchError(
            f"micro_batch_size={self._policy.micro_batch_size}, and {why}",
            limit="splitting such a batch changes training",
            fix=(
                f'{items}use micro_batch_size="auto" (recompute comes before splitting), or accept'
                f" it by name with Policy(allow_split_with=({hazard!r},))."
            ),
            rule="H207" if hazard == "coupled_loss" else "H206",
        )

    def _forks(self) -> bool:
        """Return whether a copy of this process can try out what a step does."""
        if not self.may_copy or self.parts.device_type() != "cpu":
            return False
        try:
            return backward_works_in_a_copy()
        except NoAnswer as error:
            self._report_no_copy(str(error))
            return False

    def _report_no_copy(self, why: str) -> None:
        """Record once that the system refuses a process, a descriptor or memory for a copy of
        this process.
        """
        if not self._reported_no_copy:
            self._reported_no_copy = True
            self._record.emit(run_events.SplitNotTried(why=why))

    def _try_split(
        self, known: _Known, work: Work, empty: int | None = None, *, splits: bool = True
    ) -> bool:
        """Try whether the batch of a step can be split, and note the verdict.

        Args:
            known: The facts about the loss function.
            work: The step.
            empty: The position of a sample that is tried as a part without items, or None.
            splits: Whether this step is about to be split, so that the verdict is needed now.

        Returns:
            Whether side effects were checked too.
        """
        if not self._policy.check_split:
            known.verdict = SplitCheckResult(outcome="trusted", why="check_split=False")
            return False
        assert work.size is not None
        batch, size = largest_of(work.batch, work.split), work.size
        empty = None if isinstance(work.batch, Window) else empty

        found = self._verdict_of(
            known, work, lambda check: check.run(batch, size, empty), here=splits
        )
        if found.not_made:
            # There is no verdict yet. The trial is repeated before the first split.
            return False
        known.verdict = found if known.verdict is None else merged([known.verdict, found])
        if known.verdict.changes_batch or known.verdict.outcome != "unknown":
            known.changes_batch = known.verdict.changes_batch or bool(known.changes_batch)
        looked = found.outcome != "unknown" and not self._has_run_here
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

        The check runs in a copy of this process, or in this process if copies are not possible. If
        the system refuses a copy only at the moment, it runs in this process only if `here` is set,
        because the verdict is needed now.

        Raises:
            BatchError: H209, for a loss function that calls backward or steps an optimizer.
        """
        found = None
        if self._forks():
            check = self._split_check(known, work, in_a_copy=True)
            found = in_a_copy(lambda: attempted(lambda: run(check)))
            if found.not_made:
                self._report_no_copy(found.why)
        if found is None or (found.not_made and here):
            self._has_run_here = True
            check = self._split_check(known, work, in_a_copy=False)
            with isolated(), self.alone():  # the caller puts buffers and device random state back
                found = attempted(lambda: run(check))
        if found.called:
            raise called_inside(found.called)
        return found

    def note_split_step(self, loss_fn: LossFunction, seconds: float) -> None:
        """Take in how long the attempt of a split step has taken, of which checks may take a
        share.
        """
        known = self._of(loss_fn)
        known.timed_steps += 1
        known.timed_seconds += seconds

    def _is_later_check_due(self, known: _Known, *, due: bool) -> bool:
        """Say whether a micro-batch is to be compared with its halves.

        One of this size must have fitted before.
        """
        verdict = known.verdict
        if not self._policy.check_split or known.split_steps < 2 or verdict is None:
            return False
        if verdict.outcome not in ("exact", "random"):
            return False  # nothing better is promised
        return (
            due or known.steps_in_doubt > 0 or known.split_steps % known.steps_between_checks == 0
        )

    def _compare_halves(self, known: _Known, work: Work, part: int) -> None:
        """Compare one of the micro-batches that this batch is cut into with its own two halves."""
        assert known.verdict is not None
        assert work.size is not None
        batch, clock = largest_of(work.batch, work.split), self._record.clock
        parts = micro_batches(batch, work.size, max(2, part), work.split)
        candidates = [(piece, samples) for piece, samples in parts if samples > 1]
        piece, samples = candidates[known.later_checks % len(candidates)]
        known.later_checks += 1

        began = clock.monotonic_seconds()
        found = self._verdict_of(
            known, work, lambda check: check.compare_halves(piece, samples), here=False
        )
        seconds = clock.monotonic_seconds() - began
        known.take_in(found)
        if known.timed_steps:
            step_seconds = known.timed_seconds / known.timed_steps
            known.steps_between_checks = steps_between_checks(seconds, step_seconds)
        known.timed_steps = 0
        known.timed_seconds = 0.0

    def _look_for_side_effects(
        self, known: _Known, work: Work, *, logs_too: bool = False
    ) -> tuple[str, ...] | None:
        """Return only what else a forward pass changes; None if that cannot be tried out."""
        check, size = self._split_check(known, work, in_a_copy=True), work.size
        batch = work.batch if size is None else largest_of(work.batch, work.split)
        found = in_a_copy(lambda: attempted(lambda: check.look(batch, size, logs_too=logs_too)))
        # Such as carried state of the size of the whole batch
        if found.outcome == "unknown" and size is not None:
            found = in_a_copy(lambda: attempted(lambda: check.look(batch, None, logs_too=logs_too)))
        if found.called:
            raise called_inside(found.called)
        return None if found.outcome == "unknown" else found.side_effects

    def side_effects(self, work: Work) -> tuple[str, ...]:
        """Return what a loss function changes and nobody puts back, or that this is not known,
        before a retry.
        """
        known = self._of(work.loss_fn)
        found = known.side_effects
        # It may have begun to change something since the first steps
        if not found and self._forks():
            now = self._look_for_side_effects(known, work, logs_too=True)
            found = found if now is None else now
        if found is None and self._forks():
            return ("unknown, since it could not be tried out",)
        return found or ()

    def _split_check(self, known: _Known, work: Work, *, in_a_copy: bool) -> SplitCheck:
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
        """Call a part of the loss function with a copy of the batch, unless it is known to leave
        tensors alone.
        """
        known = self._of(loss_fn)
        if known.changes_batch is False:
            return function(part)
        given = copied(part)
        tensors = tensors_in(given)
        before = versions_of(tensors)
        returned = function(given)
        if known.changes_batch is None:
            known.changes_batch = versions_of(tensors) != before
        return returned

    def batch_was_changed(self, loss_fn: LossFunction) -> BatchError:
        """Return the error about a loss function that has spoiled the batch of a step that must
        be repeated.
        """
        self.notice_change(loss_fn)
        return BatchError(
            "loss_fn changed the tensors of its batch in place, and the step ran out of memory",
            limit="a step can be repeated only with the batch as it was",
            fix=(
                "do not change the batch in place, for instance x = x - mean and not x -= mean."
                " From the next step on, loss_fn is given copies."
            ),
            rule="H208",
        )

    def notice_change(self, loss_fn: LossFunction) -> None:
        """Note that a loss function changes its batch after all: it is given copies from now on."""
        self._of(loss_fn).changes_batch = True


def _is_power_of_two(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0


def _coupling(verdict: SplitCheckResult) -> str:
    """Return by how much the parts miss the whole, and what was tried."""
    if verdict.why:
        return verdict.why
    share = verdict.difference
    percent = f"{share:.1%}" if share >= 1e-3 else f"{100 * share:.1g}%"
    differs = f"differs from that over 3 + 1 of them by {percent}"
    if math.isnan(verdict.difference):
        differs = "differs from that over 3 + 1 of them in one batch or another"
    if math.isinf(verdict.difference):
        differs = "is finite, and that over 3 + 1 of them is not"
    others = [
        str(weighting) for weighting in verdict.failed if weighting.kind not in ("samples", "sum")
    ]
    tried = ", as a mean over samples" if verdict.failed else ""
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        tried += f"; nor is it a sum, or a mean over {', '.join(others[:3])}{more}"
    return f"the gradient over 4 samples {differs}{tried}"


def _drops(module: nn.Module) -> bool:
    rate = module.p if isinstance(module, _DropoutNd) else getattr(module, "dropout", 0.0)
    return isinstance(rate, float) and rate > 0
