"""The loss of a Hugging Face Trainer, batch by batch of one accumulation window, normalised as the Trainer means it.

The Trainer has three ways, and which one holds is asked of the model itself, once:

    items used      it tells the model how many label tokens the window holds, and the losses of the batches add up
    items ignored   it tells the model, whose forward takes any keyword and uses none (Pegasus, Bart and others in
                    transformers 5.17). The Trainer then adds up means, so that the gradient is as many times too
                    large as there are batches. Here the means are weighted by their tokens
    no items        the model takes none: the mean of the means of the batches, as in the Trainer
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from holdfast.core.errors import BatchError
from holdfast.guard.hosted import HostedGuard
from holdfast.guard.splitting.window import Window
from holdfast.loader.splitting import Split, batch_size, select
from holdfast.numerics.loss import Loss

_MOST_DOUBTS = 4  # steps in which it is tried to find out what a mean is over
_ROUNDING = 1e-5  # of a mean in fp32, relative
_SAME = 1e-3  # of what lies between two means; counts that miss one label in a hundred are twice as far apart


class TrainerLoss:
    """The loss function of one training.

    Args:
        trainer: A ``transformers.Trainer``.
        model: As it is given to ``training_step``.
        split: Where the batch dimension is.
    """

    def __init__(self, trainer: Any, model: torch.nn.Module, split: Split = 0) -> None:
        self._trainer = trainer
        self._model = model
        self._split = split
        self._counts: list[Callable[[Any], Any]] = [self._as_the_trainer, _after_the_first, _all, _rows]
        self._doubts = _MOST_DOUBTS
        self._items: Any = None
        self._batches = 1
        self._uses_items: bool | None = None

    def window(self, batches: Sequence[Any], items: Any, guard: HostedGuard) -> Window:
        """Return what one step is made of, and be the loss function of it.

        Args:
            batches: Of the window, on the device.
            items: What the Trainer has counted in them, or None.
            guard: Of this training.
        """
        self._items, self._batches = items, len(batches)
        if items is not None and self._uses_items is None:
            self._find_out(batches[0], guard)
        if self._uses_items is False and self._doubts and guard.policy.precision == "fp32":
            self._doubts -= 1
            with guard.trying():
                self._find_count(batches)
        return Window(batches, added=items is None or self._uses_items is not False, on_cut=self._cut)

    def _cut(self, batches: Sequence[Any]) -> None:
        """Take in that samples were taken out of the window."""
        self._batches = len(batches)
        if self._items is not None:
            self._items = self._count(batches)

    def _count(self, batches: Sequence[Any]) -> Any:
        """Return what the Trainer counts in batches, as it tells the model."""
        return self._trainer._get_num_items_in_batch(list(batches), self._trainer.args.device)

    def _as_the_trainer(self, batch: Any) -> Any:
        return self._count([batch])

    def __call__(self, batch: Any) -> Any:
        """Return the loss of one batch, or of a part of one, as it goes into the step."""
        if self._items is None:
            loss = self._compute(batch, None)
            return loss if self._trainer.compute_loss_func is not None else loss / self._batches
        if self._uses_items is not False:
            return self._compute(batch, self._items)
        items = self._counts[0](batch)  # before a label smoother takes the labels out
        return Loss(self._compute(batch, self._items), items)

    def _compute(self, batch: Any, items: Any) -> torch.Tensor:
        # Accelerate has put autocast around forward, and around nothing else.
        with (
            torch.autocast(self._trainer.args.device.type, enabled=False),
            self._trainer.compute_loss_context_manager(),
        ):
            loss: torch.Tensor = self._trainer.compute_loss(self._model, batch, num_items_in_batch=items)
        return loss

    def _find_out(self, batch: Any, guard: HostedGuard) -> None:
        """Ask one sample, or a batch that cannot be cut, whether its loss depends on the items of the window."""
        sample = self._samples(batch, 1)

        def loss_with(items: int) -> float:
            given = batch if sample is None else sample[0]
            return float(self._compute(_own(given), torch.tensor(items, device=self._trainer.args.device)))

        with guard.trying():
            once, twice = loss_with(1), loss_with(2)
        if not (math.isfinite(once) and math.isfinite(twice)) or once == 0.0:
            return  # asked again in the next step
        self._uses_items = once != twice
        if not self._uses_items:
            guard.note(
                "items_ignored",
                model=type(self._model).__name__,
                why="its loss is a mean whatever num_items_in_batch is, and Trainer would add up such means; "
                "batches are weighted by their label tokens instead",
            )

    def _find_count(self, batches: Sequence[Any]) -> None:
        """Keep the counts by which the means over two samples make up the mean over both."""
        found = (self._samples(batch, 2) for batch in batches)
        cut = next((each for each in found if each is not None), None)
        if cut is None:
            return
        one, other, both = (float(self._compute(_own(each), self._items)) for each in cut)
        apart, noise = abs(one - other), _ROUNDING * abs(both)
        if not apart > 100 * noise:  # NaN too: they tell nothing
            return
        left = []
        for count in self._counts:
            first, second = float(count(cut[0])), float(count(cut[1]))
            mean = (first * one + second * other) / max(first + second, 1.0)
            left += [count] if abs(mean - both) <= max(noise, _SAME * apart) else []
        self._counts = left or self._counts

    def _samples(self, batch: Any, count: int) -> list[Any] | None:
        """Return the samples with most labels and with fewest, as batches, and the two as one; or just the first.

        None, for a batch that cannot be cut, or has too few samples.
        """
        try:
            size = batch_size(batch, self._split)
            labels = batch["labels"].reshape(size, -1).ne(-100).sum(-1)
            order = [int(labels.argmax()), int(labels.argmin())][:count]
            if len(set(order)) < count:
                return None
            alone = [select(batch, size, [place], self._split) for place in order]
            return alone if count == 1 else [*alone, select(batch, size, order, self._split)]
        except (BatchError, RuntimeError):
            return None


def _own(batch: Any) -> Any:
    """Return a batch from which a label smoother may take the labels."""
    return copy.copy(batch)


def _after_the_first(batch: Any) -> Any:
    labels = batch["labels"]
    return (labels[..., 1:] if labels.ndim > 1 else labels).ne(-100).sum()


def _all(batch: Any) -> Any:
    return batch["labels"].ne(-100).sum()


def _rows(batch: Any) -> Any:
    return len(batch["labels"])
