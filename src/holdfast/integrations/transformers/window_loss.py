"""Compute the loss of an accumulation window, normalized as the Trainer normalizes it.

The Trainer passes the number of label tokens in the window to the model as
``num_items_in_batch``, if the signature of ``forward`` accepts it. There are three cases:

- The model uses the argument: it divides each batch's summed loss by this number, and the resulting
  losses of the batches are added.
- The model accepts arbitrary keyword arguments but ignores this one (Pegasus, Bart and others in
  transformers 5.17). In this case, the Trainer adds the mean losses of the batches, so its gradient
  is too large by a factor of the number of batches. This module weights each mean by its number of
  items instead.
- The model does not accept the argument: the loss of the window is the mean of the batches' mean
  losses.

The signature does not show whether a model uses the argument, so `WindowLoss` tests this once.
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

# The label value that torch's cross entropy, and the losses in transformers, ignore by default.
_IGNORED_LABEL = -100


class WindowLoss:
    """Loss function for the guard's steps, which the guard calls for each batch in a window.

    If the guard splits a batch, it calls this function for each part of the batch.

    Args:
        trainer: The Trainer whose ``compute_loss`` is called.
        model: The model, as wrapped by the Trainer.
        split: The position of the batch dimension, as for `Guard`.
    """

    def __init__(self, trainer: Any, model: torch.nn.Module, split: Split = 0) -> None:
        self._trainer = trainer
        self._model = model
        self._split = split
        # The number of label tokens in the window. None if the model does not accept the number.
        self._num_items: Any = None
        self._num_batches = 1
        # Whether the loss depends on `_num_items`. None until this has been tested.
        self._uses_items: bool | None = None

    def begin_window(self, batches: Sequence[Any], num_items: Any, guard: HostedGuard) -> Window:
        """Return a step's batches as a `Window` to train with this object as the loss function.

        Args:
            batches: The micro-batches of the step.
            num_items: The Trainer's count of label tokens in all batches, or None.
            guard: The run's guard.
        """
        self._num_items = num_items
        self._num_batches = len(batches)
        if num_items is not None and self._uses_items is None:
            self._find_out_whether_items_are_used(batches[0], guard)
        losses_are_added = num_items is None or self._uses_items is not False
        return Window(batches, added=losses_are_added, on_cut=self._recount)

    def __call__(self, batch: Any) -> Any:
        """Return the loss of a batch or of a part of a batch, normalized for the step."""
        num_items = self._num_items
        if self._uses_items is False:
            # The Trainer multiplies the loss by the number of processes if it gets `num_items`.
            # That is correct for a share of a sum, but not for the mean that this model returns.
            num_items = None
        loss = self._compute(batch, num_items)
        if self._num_items is None and self._trainer.compute_loss_func is None:
            # The guard adds the losses, so this division makes their sum the mean over the batches.
            return loss / self._num_batches
        return loss

    def _compute(self, batch: Any, num_items: Any) -> torch.Tensor:
        device_type = self._trainer.args.device.type
        # Accelerate applies autocast to the forward pass only, so the guard's autocast must not
        # cover the rest of the loss computation.
        with (
            torch.autocast(device_type, enabled=False),
            self._trainer.compute_loss_context_manager(),
        ):
            loss: torch.Tensor = self._trainer.compute_loss(
                self._model, batch, num_items_in_batch=num_items
            )
        return loss

    def _recount(self, batches: Sequence[Any]) -> None:
        """Count batches and items again after the guard has removed samples from the window.

        Args:
            batches: The remaining batches.
        """
        self._num_batches = len(batches)
        # With several processes, the items cannot be counted again, since counting is a collective
        # in which the other processes would not take part.
        if self._num_items is not None and self._trainer.accelerator.num_processes == 1:
            self._num_items = self._trainer._get_num_items_in_batch(
                list(batches), self._trainer.args.device
            )

    def _find_out_whether_items_are_used(self, batch: Any, guard: HostedGuard) -> None:
        """Test whether the loss depends on ``num_items_in_batch``.

        The test computes the loss of one sample with two different values and compares the results.
        """
        sample = self._sample_with_most_labels(batch)
        with guard.evaluating_alone():
            loss_with_one = self._loss_with_items(sample, 1)
            loss_with_two = self._loss_with_items(sample, 2)
        if not math.isfinite(loss_with_one) or not math.isfinite(loss_with_two):
            # The test is inconclusive, so the next step repeats it.
            return
        if loss_with_one == 0.0:
            return
        self._uses_items = loss_with_one != loss_with_two
        if not self._uses_items:
            why = (
                "it always returns a mean loss, and the Trainer would add the means of the batches;"
                " holdfast weights each mean by its number of items instead"
            )
            guard.emit(run_events.ItemsIgnored(model=type(self._model).__name__, why=why))

    def _sample_with_most_labels(self, batch: Any) -> Any:
        """Return a batch that contains only the sample with the most labels.

        A batch that cannot be indexed by sample is returned unchanged.
        """
        try:
            size = batch_size(batch, self._split)
            labels = batch["labels"].reshape(size, -1)
            label_counts = labels.ne(_IGNORED_LABEL).sum(-1)
            return select(batch, size, [int(label_counts.argmax())], self._split)
        except (BatchError, RuntimeError):
            return batch

    def _loss_with_items(self, batch: Any, num_items: int) -> float:
        # Pass a copy of the batch, since the Trainer's label smoother removes the labels from it.
        items = torch.tensor(num_items, device=self._trainer.args.device)
        return float(self._compute(copy.copy(batch), items))
