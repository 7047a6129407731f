"""What can be promised about the batches and loss functions of a run, found out once and said at the first step.

For each loss function: whether its batch can be cut, whether cutting it keeps the gradient, and by which weights,
whether it changes the batch that it is given, whether its forward pass leaves something behind. A promise that cannot
be kept is an event and a warning before training, or an error if the policy asks for splitting by number. What could
not be found out is not promised: such a batch is not split.

While batches are split, the rehearsal is repeated at the 1st, 2nd, 4th, 8th ... of them and after each failure, and
the worst that was ever found counts: a mean over tokens looks like one over samples as long as all sentences are of
one length. A batch that could tell apart what was equal so far is tried before it is split.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from holdfast.core.errors import BatchError
from holdfast.core.forked import backward_works_in_a_copy
from holdfast.core.policy import Policy, SplitHazard
from holdfast.guard.parts import Parts
from holdfast.guard.record import RunRecord
from holdfast.guard.splitting.closure import called_inside, returning_a_loss
from holdfast.guard.splitting.identity import Identities
from holdfast.guard.splitting.split_check import TELLING, Rehearsal, attempted, in_a_copy
from holdfast.guard.splitting.verdict import Verdict, find_hazards, merged, mixing_layers, split_promise
from holdfast.guard.splitting.weighting import SAMPLES, Weighting, disagreement, find_weightings
from holdfast.guard.step.buffers import BufferKeeper
from holdfast.guard.step.mixed_precision import autocast
from holdfast.guard.step.states import StateKeeper, kept_states
from holdfast.guard.step.window import Window, largest_of
from holdfast.loader.random_state import isolated
from holdfast.loader.splitting import Split, batch_size, copied, micro_batches, tensors_in, versions_of
from holdfast.memory.ladder import Means

LossFunction: TypeAlias = Callable[[Any], Any]
_PIECES = 8  # into which a batch is cut to see whether it tells weightings apart
_ALWAYS = 16  # times that such a batch is tried before it is split; from then on the 32nd, 64th ...


@dataclass(slots=True)
class _Known:
    """What is known about one loss function. None: not yet."""

    verdict: Verdict | None = None
    changes_batch: bool | None = None
    steps: int = 0
    split_steps: int = 0
    telling_steps: int = 0
    said: tuple[str, str] | Weighting | None = None
    settled: bool = False
    side_effects: tuple[str, ...] | None = None

    def chosen(self) -> Weighting:
        """Return what parts are weighted by, as far as it is known."""
        return SAMPLES if self.verdict is None else self.verdict.weighting()


class Promises:
    """Finds out and remembers what holds for each loss function.

    Args:
        parts: Models and optimizers.
        policy: Settings.
        buffers: Knows which buffers a forward pass changes.
        record: Where promises are written down.
    """

    def __init__(self, parts: Parts, policy: Policy, buffers: BufferKeeper, record: RunRecord) -> None:
        self.parts = parts
        self._policy = policy
        self._buffers = buffers
        self._record = record
        self._known: dict[Any, _Known] = {}
        self._identities = Identities()
        self._uncuttable: str | None = None
        every = [parameter for _, parameter in parts.named_parameters()]
        self.inside = functools.partial(returning_a_loss, parts.optimizers.values(), every)

    def keeper(self) -> BufferKeeper:
        """Return a keeper of its own for buffers and states, for what is run within a step and taken back."""
        untouched = self._buffers.states.untouched()
        states = {name: each for name, each in kept_states(self.parts).items() if name not in untouched}
        return BufferKeeper(self.parts.models, StateKeeper(states, every=True))

    def size_of(self, batch: Any, split: Split) -> int | None:
        """Return the samples of a batch, of a window those of its largest, or None if it has no batch dimension.

        Raises:
            BatchError: H204 or H205, unless the policy does without splitting.
        """
        if isinstance(batch, Window):
            sizes = [self.size_of(each, split) for each in batch]
            return None if None in sizes else max(size for size in sizes if size is not None)
        try:
            size = batch_size(batch, split)
        except BatchError as error:
            if self._policy.micro_batch_size is None:
                return None
            if error.rule != "H205" or self._policy.micro_batch_size != "auto":
                raise
            if self._uncuttable is None:
                self._uncuttable = error.what
                self._record.happened("cannot_split", why=error.what, fix=error.fix)
            return None
        if size == 0:
            raise BatchError(
                "the batch has 0 samples",
                limit="a step needs at least one",
                fix="leave out empty batches, or use drop_last=True.",
                rule="H205",
            )
        return size

    def make(
        self,
        batch: Any,
        size: int | None,
        split: Split,
        loss_fn: LossFunction,
        parameters: Sequence[torch.Tensor],
        *,
        splits_now: bool,
    ) -> tuple[bool, bool]:
        """Find out about a loss function, and say at its first step what cannot be promised.

        Args:
            batch: The batch of this step.
            size: Its samples, if it can be cut.
            split: How it is cut.
            loss_fn: As given to the step.
            parameters: That the step moves.
            splits_now: Whether the plan is to cut this batch.

        Returns:
            Whether it was tried out in this process, so that buffers and random state are to be put back; and
            whether this batch may be cut.

        Raises:
            BatchError: H206 or H207, if the policy asks for a micro-batch size and splitting would change
                training.
        """
        known, batch = self._of(loss_fn), batch if size is None else largest_of(batch, split)
        known.steps += 1
        known.split_steps += splits_now
        if not splits_now and known.settled:
            return False, True
        in_place = False
        forks = self._forks()
        due = _is_power_of_two(known.split_steps if splits_now else known.steps)
        if splits_now and not due and self._tells_apart(known, batch, size, split):
            known.telling_steps += 1
            due = known.telling_steps <= _ALWAYS or _is_power_of_two(known.telling_steps)
        wanted = self._policy.micro_batch_size is not None and (forks or splits_now)
        if due and wanted and size is not None and size > 1:
            self._rehearse(known, batch, size, split, loss_fn, parameters)
            in_place = not forks
        if known.steps == 1 and known.side_effects is None and forks:
            self._look(known, batch, size, split, loss_fn, parameters)
        refused = self._refused(known)
        if splits_now and refused is not None and isinstance(self._policy.micro_batch_size, int):
            raise self._refusal(*refused)
        news = refused or known.chosen()
        if known.steps == 1 or (splits_now and news != known.said):
            self._say(known, size, refused)
        known.said = news
        tried = known.verdict is not None and known.verdict.outcome != "unknown"
        known.settled = tried or not forks or size is None or self._policy.micro_batch_size is None
        return in_place, refused is None

    def _say(self, known: _Known, size: int | None, refused: tuple[str, str] | None) -> None:
        cannot = refused[1] if refused else self._uncuttable
        split = "possible" if known.verdict is not None else "possible, to be tried out before the first one"
        if cannot or self._policy.micro_batch_size is None:
            split = f"refused: {cannot}" if cannot else "off"
        facts: dict[str, Any] = {"batch_size": size, "split": split, "weighting": None, "rehearsal": None}
        if known.verdict is not None:
            declared = "as declared" if known.verdict.declared else None
            facts |= {
                "weighting": declared or str(known.chosen()),
                "rehearsal": known.verdict.facts(),
            }
        # None: not looked for, on an accelerator.
        facts["side_effects"] = None if known.side_effects is None else list(known.side_effects)
        self._record.happened("promises", **facts)
        if known.steps == 1 and known.side_effects:
            self._record.happened(
                "side_effects",
                attributes=list(known.side_effects),
                why="each forward pass changes them, they are in no checkpoint, and an attempt that is made again "
                "changes them once more; keep such state in a buffer, or in an object given as state=",
            )
        if refused is not None and self._policy.micro_batch_size == "auto":
            self._record.happened("split_refused", why=refused[1], allow_split_with=refused[0])

    def means(
        self,
        batch: Any,
        size: int | None,
        split: Split,
        loss_fn: LossFunction,
        parameters: Sequence[torch.Tensor],
    ) -> Means:
        """Return what a step may do about a lack of memory, finding out what is not known yet."""
        if size is None or self._policy.micro_batch_size is None:
            return Means(no_split=self._uncuttable or "micro_batch_size=None turns splitting off", smallest=0)
        known, batch = self._of(loss_fn), largest_of(batch, split)
        if size > 1:
            self._rehearse(known, batch, size, split, loss_fn, parameters)
        refused = self._refused(known)
        hazards = self._hazards(known)
        return Means(
            no_split=None if refused is None else refused[1],
            split_promise=split_promise(self.parts.models.values(), list(hazards), known.verdict),
            smallest=self.smallest_part(),
        )

    def smallest_part(self) -> int:
        """Return the fewest samples that one forward pass can take."""
        return 2 if mixing_layers(self.parts.models.values()) else 1

    def _of(self, loss_fn: LossFunction) -> _Known:
        return self._known.setdefault(self._identities.key(loss_fn), _Known())

    def weighting(self, loss_fn: LossFunction) -> Weighting:
        """Return what the parts of a batch are weighted by, where the loss function does not say it itself."""
        return self._of(loss_fn).chosen()

    def _tells_apart(self, known: _Known, batch: Any, size: int | None, split: Split) -> bool:
        """Say whether in this batch weights differ that were equal wherever the loss function was tried.

        Cost: nothing if items are declared; else some counts of the batch's integer tensors and masks.
        """
        verdict = known.verdict
        if verdict is None or verdict.outcome != "exact" or verdict.declared or size is None or size < 2:
            return False
        known_or_new = dict.fromkeys([*verdict.held, *find_weightings(batch, size)])
        alive = [weighting for weighting in known_or_new if weighting not in verdict.failed]
        if len(alive) < 2 or callable(split):
            return False
        pieces = micro_batches(batch, size, -(-size // _PIECES), split)
        return disagreement(alive, pieces) > TELLING

    def _hazards(self, known: _Known) -> dict[SplitHazard, str]:
        return find_hazards(self.parts.models.values(), self._buffers.mutable_outside_norms(), known.verdict)

    def _refused(self, known: _Known) -> tuple[str, str] | None:
        for name, why in self._hazards(known).items():
            if name not in self._policy.allow_split_with:
                return name, why
        return None

    def _refusal(self, hazard: str, why: str) -> BatchError:
        items = (
            "return Loss(mean, items) if the mean is over something that the batch does not show; pass "
            "TwoPass(outputs, loss) if the loss compares samples; else "
        ) * (hazard == "coupled_loss")
        return BatchError(
            f"micro_batch_size={self._policy.micro_batch_size}, and {why}",
            limit="splitting such a batch changes training",
            fix=f'{items}use micro_batch_size="auto" (recompute comes before splitting), or accept it by name with '
            f"Policy(allow_split_with=({hazard!r},)).",
            rule="H207" if hazard == "coupled_loss" else "H206",
        )

    def _forks(self) -> bool:
        """Return whether a copy of this process can try out what a step does."""
        return self.parts.device_type() == "cpu" and backward_works_in_a_copy()

    def _rehearse(
        self,
        known: _Known,
        batch: Any,
        size: int,
        split: Split,
        loss_fn: LossFunction,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        if not self._policy.check_split:
            known.verdict = Verdict(outcome="trusted", why="check_split=False")
            return
        forks = self._forks()
        rehearsal = self._rehearsal(known, split, loss_fn, parameters)
        if forks:
            found = in_a_copy(lambda: attempted(lambda: rehearsal.run(batch, size)))
        else:
            with isolated():  # the caller puts buffers and device random state back
                found = attempted(lambda: rehearsal.run(batch, size))
        if found.called:
            raise called_inside(found.called)
        known.verdict = found if known.verdict is None else merged([known.verdict, found])
        if known.verdict.changes_batch or known.verdict.outcome != "unknown":
            known.changes_batch = known.verdict.changes_batch or bool(known.changes_batch)
        if forks and known.verdict.outcome != "unknown":
            known.side_effects = known.verdict.side_effects

    def _look(
        self,
        known: _Known,
        batch: Any,
        size: int | None,
        split: Split,
        loss_fn: LossFunction,
        parameters: Sequence[torch.Tensor],
    ) -> None:
        """Find only what else a forward pass changes, where no split is tried out."""
        rehearsal = self._rehearsal(known, split, loss_fn, parameters)
        found = in_a_copy(lambda: attempted(lambda: rehearsal.look(batch, size)))
        if found.called:
            raise called_inside(found.called)
        if found.outcome != "unknown":
            known.side_effects = found.side_effects

    def side_effects(self, loss_fn: LossFunction) -> tuple[str, ...]:
        """Return what a loss function is known to change and nobody puts back."""
        return self._of(loss_fn).side_effects or ()

    def _rehearsal(
        self, known: _Known, split: Split, loss_fn: LossFunction, parameters: Sequence[torch.Tensor]
    ) -> Rehearsal:
        return Rehearsal(
            loss_fn=loss_fn,
            split=split,
            models=self.parts.models,
            states=self.keeper().states,
            parameters=parameters,
            autocast=functools.partial(autocast, self.parts.device_type(), self._policy.precision),
            inside=self.inside,
            rounds_to_half=self._policy.precision != "fp32",
            in_a_copy=self._forks(),
            known=() if known.verdict is None else known.verdict.held,
        )

    @contextlib.contextmanager
    def pristine(self, loss_fn: LossFunction, part: Any) -> Iterator[Any]:
        """Yield what the loss function may be given: a copy, unless it is known to leave tensors alone."""
        known = self._of(loss_fn)
        if known.changes_batch is False:
            yield part
            return
        given = copied(part)
        tensors = tensors_in(given)
        before = versions_of(tensors)
        yield given
        if known.changes_batch is None:
            known.changes_batch = versions_of(tensors) != before

    def batch_was_changed(self, loss_fn: LossFunction) -> BatchError:
        """Return the error about a loss function that has spoiled the batch of a step that must be repeated."""
        self._of(loss_fn).changes_batch = True
        return BatchError(
            "loss_fn changed the tensors of its batch in place, and the step ran out of memory",
            limit="a step can be repeated only with the batch as it was",
            fix="do not change the batch in place, for instance x = x - mean and not x -= mean. From the next "
            "step on, loss_fn is given copies.",
            rule="H208",
        )

    def notice_change(self, loss_fn: LossFunction) -> None:
        """Note that a loss function changes its batch after all: it is given copies from now on."""
        self._of(loss_fn).changes_batch = True


def _is_power_of_two(count: int) -> bool:
    return count > 0 and count & (count - 1) == 0
