"""What can be promised about the batches and loss functions of a run, found out once and said at the first step.

For each loss function: whether its batch can be cut, whether cutting it keeps the gradient, whether it changes the
batch that it is given. A promise that cannot be kept is an event and a warning before training, or an error if the
policy asks for splitting by number.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch

from holdfast.core.errors import BatchError
from holdfast.core.policy import Policy
from holdfast.data.random_state import isolated
from holdfast.data.splitting import Split, batch_size, copied, tensors_in, versions_of
from holdfast.memory.ladder import Means
from holdfast.run.buffers import BufferKeeper
from holdfast.run.hazards import find_hazards, split_promise
from holdfast.run.parts import Parts
from holdfast.run.record import RunRecord
from holdfast.run.rehearsal import Verdict, attempted, in_a_copy_of_this_process, rehearse

LossFunction: TypeAlias = Callable[[Any], Any]


@dataclass(slots=True)
class _Known:
    """What is known about one loss function. None: not yet."""

    verdict: Verdict | None = None
    changes_batch: bool | None = None
    made: bool = False


class Promises:
    """Finds out and remembers what holds for each loss function.

    Args:
        parts: Models and optimizers.
        policy: Settings.
        buffers: Knows which buffers a forward pass changes.
        record: Where promises are written down.
    """

    def __init__(self, parts: Parts, policy: Policy, buffers: BufferKeeper, record: RunRecord) -> None:
        self._parts = parts
        self._policy = policy
        self._buffers = buffers
        self._record = record
        self._known: dict[Any, _Known] = {}
        self._uncuttable: str | None = None

    def size_of(self, batch: Any, split: Split) -> int | None:
        """Return the samples of a batch, or None if it has no batch dimension.

        Raises:
            BatchError: H204 or H205, unless the policy does without splitting.
        """
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
    ) -> bool:
        """Find out about a loss function, at its first step, and say what cannot be promised.

        Returns:
            Whether it was tried out in this process, so that buffers and random state are to be put back.

        Raises:
            BatchError: H206 or H207, if the policy asks for a micro-batch size and splitting would change
                training.
        """
        known = self._of(loss_fn)
        asked = self._policy.micro_batch_size
        splits_now = isinstance(asked, int) and size is not None and size > asked
        if known.made and not splits_now:
            return False
        in_place = False
        on_cpu = self._parts.device_type() == "cpu"
        wanted = asked is not None and (on_cpu or splits_now)
        if wanted and known.verdict is None and size is not None and size > 1:
            self._rehearse(known, batch, size, split, loss_fn, parameters)
            in_place = not on_cpu
        refused = self._refused(known)
        if splits_now and refused is not None:
            raise self._refusal(*refused)
        if not known.made:
            known.made = True
            self._say(known, size, refused)
        return in_place

    def _say(self, known: _Known, size: int | None, refused: tuple[str, str] | None) -> None:
        cannot = refused[1] if refused else self._uncuttable
        self._record.happened(
            "promises",
            batch_size=size,
            split="off" if self._policy.micro_batch_size is None else f"refused: {cannot}" if cannot else "possible",
            rehearsal=None if known.verdict is None else asdict(known.verdict),
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
            return Means(no_split=self._uncuttable or "micro_batch_size=None turns splitting off")
        known = self._of(loss_fn)
        if size > 1 and known.verdict is None:
            self._rehearse(known, batch, size, split, loss_fn, parameters)
        refused = self._refused(known)
        hazards = self._hazards(known)
        return Means(
            no_split=None if refused is None else refused[1],
            split_promise=split_promise(self._parts.models.values(), list(hazards), known.verdict),
            smallest=2 if "batch_norm" in hazards else 1,
        )

    def _of(self, loss_fn: LossFunction) -> _Known:
        # A lambda in a loop is a new object each time; its code is not.
        plain = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
        plain = getattr(plain, "__func__", plain)
        key = getattr(plain, "__code__", type(plain))
        return self._known.setdefault(key, _Known())

    def _hazards(self, known: _Known) -> dict[Any, str]:
        return find_hazards(self._parts.models.values(), self._buffers.mutable_outside_norms(), known.verdict)

    def _refused(self, known: _Known) -> tuple[str, str] | None:
        for name, why in self._hazards(known).items():
            if name not in self._policy.allow_split_with:
                return name, why
        return None

    def _refusal(self, hazard: str, why: str) -> BatchError:
        items = "return Loss(mean, items) if the mean is over tokens or frames; else " * (hazard == "coupled_loss")
        return BatchError(
            f"micro_batch_size={self._policy.micro_batch_size}, and {why}",
            limit="splitting such a batch changes training",
            fix=f'{items}use micro_batch_size="auto" (recompute comes before splitting), or accept it by name with '
            f"Policy(allow_split_with=({hazard!r},)).",
            rule="H207" if hazard == "coupled_loss" else "H206",
        )

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
            known.verdict = Verdict(outcome="unknown", why="check_split=False")
            return

        trainable = [parameter for parameter in parameters if parameter.requires_grad]

        def run() -> Verdict:
            return rehearse(batch, size, split, loss_fn, list(self._parts.models.values()), trainable)

        if self._parts.device_type() == "cpu":
            known.verdict = in_a_copy_of_this_process(run)
        else:
            with isolated():  # the caller puts buffers and device random state back
                known.verdict = attempted(run)
        if known.verdict.changes_batch:
            known.changes_batch = True
        elif known.verdict.outcome != "unknown":
            known.changes_batch = False

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
