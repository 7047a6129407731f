"""The loss of a Hugging Face Trainer, batch by batch of one accumulation window, normalised as the Trainer means it.

The Trainer has three ways, and which one holds is asked of the model itself, once:

    items used      the model is given how many label tokens the window holds, and the losses of the batches add up
    items ignored   it is given them, and its forward takes any keyword and uses none (Pegasus, Bart and others in
                    transformers 5.17). The Trainer then adds up means, so that the gradient is as many times too
                    large as there are batches. Here the guard finds out what the means are over, and weights them
    no items        the model takes none: the mean of the means of the batches, as in the Trainer
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch

from holdfast.core.errors import BatchError
from holdfast.guard.hosted import HostedGuard
from holdfast.guard.splitting.window import Window
from holdfast.loader.splitting import Split, batch_size, select


class TrainerLoss:
    """The loss function of one training, of the model that ``training_step`` is given."""

    def __init__(self, trainer: Any, model: torch.nn.Module, split: Split = 0) -> None:
        self._trainer = trainer
        self._model = model
        self._split = split
        self._items: Any = None
        self._batches = 1
        self._uses_items: bool | None = None

    def window(self, batches: Sequence[Any], items: Any, guard: HostedGuard) -> Window:
        """Return what one step is made of, and be the loss function of it; `items` is what the Trainer counted."""
        self._items, self._batches = items, len(batches)
        if items is not None and self._uses_items is None:
            self._find_out(batches[0], guard)
        return Window(batches, added=items is None or self._uses_items is not False, on_cut=self._cut)

    def _cut(self, batches: Sequence[Any]) -> None:
        """Take in that samples were taken out of the window."""
        self._batches = len(batches)
        if self._items is not None:
            self._items = self._trainer._get_num_items_in_batch(list(batches), self._trainer.args.device)

    def __call__(self, batch: Any) -> Any:
        """Return the loss of one batch, or of a part of one, as it goes into the step."""
        loss = self._compute(batch, self._items)
        mean_of_means = self._items is None and self._trainer.compute_loss_func is None
        return loss / self._batches if mean_of_means else loss

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
        try:
            size = batch_size(batch, self._split)
            most_labels = int(batch["labels"].reshape(size, -1).ne(-100).sum(-1).argmax())
            batch = select(batch, size, [most_labels], self._split)
        except (BatchError, RuntimeError):
            pass

        def loss_with(items: int) -> float:
            # A label smoother takes the labels out of a batch, so each has its own.
            return float(self._compute(copy.copy(batch), torch.tensor(items, device=self._trainer.args.device)))

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
                "they are weighted by what they are over instead",
            )
