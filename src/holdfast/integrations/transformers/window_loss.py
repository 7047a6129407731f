"""The loss of one accumulation window, normalised as the Trainer normalises it.

The Trainer normalises in one of three ways, and chooses it by the model's signature:

- The model *uses* ``num_items_in_batch``: it is passed the number of label tokens in the window,
  and the losses of the batches are added.
- The model *ignores* it: its forward accepts arbitrary keyword arguments and does not use this one
  (Pegasus, Bart and others in transformers 5.17). The Trainer then adds means, so that the gradient
  is too large by a factor of the number of batches. Here each mean is weighted by the number of
  items that it is over.
- The model *does not accept* it: the loss is the mean of the means of the batches.

The signature does not show whether a model uses the number, so this is tested once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch

from holdfast.core.errors import BatchError
from holdfast.core.events import run_events
from holdfast.guard.hosted import HostedGuard
from holdfast.guard.splitting.window import Window
from holdfast.loader.splitting import Split, batch_size, select

# The label that torch's cross entropy ignores by default, as do the losses of transformers.
_IGNORED_LABEL = -100


class WindowLoss:
    """The loss function of the guard's steps, called for each batch of a window or part of one.

    Args:
        trainer: The Trainer, whose ``compute_loss`` is used.
        model: The model, as wrapped by the Trainer.
        split: Where the batch dimension is, as for `Guard`.
    """

    def __init__(self, trainer: Any, model: torch.nn.Module, split: Split = 0) -> None:
        self._trainer = trainer
        self._model = model
        self._split = split
        # Label tokens in the window, or None if the model does not accept their number.
        self._num_items: Any = None
        self._num_batches = 1
        # Whether the loss depends on `_num_items`. None until it was tested.
        self._uses_items: bool | None = None

    def begin_window(self, batches: Sequence[Any], num_items: Any, guard: HostedGuard) -> Window:
        """Return the batches as one step, for which this object is the loss function.

        Args:
            batches: The micro-batches of the step.
            num_items: Label tokens in all of them, as the Trainer has counted them, or None.
            guard: The guard of the run.
        """
        self._num_items = num_items
        self._num_batches = len(batches)
        if num_items is not None and self._uses_items is None:
            self._find_out_whether_items_are_used(batches[0], guard)
        losses_are_added = num_items is None or self._uses_items is not False
        return Window(batches, added=losses_are_added, on_cut=self._recount)

    def __call__(self, batch: Any) -> Any:
        """Return the loss of a batch, or of a part of one, normalised for the step."""
        num_items = self._num_items
        if self._uses_items is False:
            # If the Trainer gets the number of items, it multiplies the loss by the number of
            # processes. That is right for a share of the loss, and wrong for a mean.
            num_items = None
        loss = self._compute(batch, num_items)
        if self._num_items is None and self._trainer.compute_loss_func is None:
            # The losses are added, so dividing makes their sum the mean over the batches.
            return loss / self._num_batches
        return loss

    def _compute(self, batch: Any, num_items: Any) -> torch.Tensor:
        device_type = self._trainer.args.device.type
        # Accelerate applies autocast to the forward only, so the guard's autocast must not cover
        # the rest of the loss.
        with (
            torch.autocast(device_type, enabled=False),
            self._trainer.compute_loss_context_manager(),
        ):
            loss: torch.Tensor = self._trainer.compute_loss(
                self._model, batch, num_items_in_batch=num_items
            )
        return loss

    def _recount(self, batches: Sequence[Any]) -> None:
        """Count batches and items again after the guard has removed samples from the window."""
        self._num_batches = len(batches)
        # With several processes, counting is a collective, which the others would not join.
        if self._num_items is not None and self._trainer.accelerator.num_processes == 1:
            self._num_items = self._trainer._get_num_items_in_batch(
                list(batches), self._trainer.args.device
            )

    def _find_out_whether_items_are_used(self, batch: Any, guard: HostedGuard) -> None:
        """Test whether the loss depends on the number of items.

        It is computed for one sample with two different numbers, and the results are compared.
        """
        sample = self._sample_with_most_labels(batch)
        with guard.evaluating_alone():
            loss_with_one = self._loss_with_items(sample, 1)
            loss_with_two = self._loss_with_items(sample, 2)
        if not math.isfinite(loss_with_one) or not math.isfinite(loss_with_two):
            # The test is repeated in the next step.
            return
        if loss_with_one == 0.0:
            return
        self._uses_items = loss_with_one != loss_with_two
        if not self._uses_items:
            why = (
                "its loss is a mean, regardless of num_items_in_batch, and the Trainer would add"
                " the means of the batches; instead, each mean is weighted by its number of items"
            )
            guard.emit(run_events.ItemsIgnored(model=type(self._model).__name__, why=why))

    def _sample_with_most_labels(self, batch: Any) -> Any:
        """Return a batch of only the sample with the most labels.

        If the batch cannot be cut, it is returned unchanged.
        """
        try:
            size = batch_size(batch, self._split)
            labels = batch["labels"].reshape(size, -1)
            label_counts = labels.ne(_IGNORED_LABEL).sum(-1)
            return select(batch, size, [int(label_counts.argmax())], self._split)
        except (BatchError, RuntimeError):
            return batch

    def _loss_with_items(self, batch: Any, num_items: int) -> float:
        # A label smoother removes the labels from a batch, so it gets a copy.
        items = torch.tensor(num_items, device=self._trainer.args.device)
        return float(self._compute(copy.copy(batch), items))
