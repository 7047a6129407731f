"""What automatic and manual optimization share: attempts, parts of a batch, and what they log."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from holdfast.guard.accumulation import Accumulation
from holdfast.guard.hosted import HostedGuard
from holdfast.integrations.lightning.step_logs import StepLogs
from holdfast.loader.splitting import Split, batch_size


class Optimization:
    """Makes the steps of one ``fit``.

    Args:
        module: The ``LightningModule``.
        guard: The guard of the run.
        optimizers: The optimizers of the trainer.
        split: Where the batch dimension is, as `Guard` takes it.
    """

    def __init__(
        self,
        module: Any,
        guard: HostedGuard,
        optimizers: Sequence[torch.optim.Optimizer],
        split: Split,
    ) -> None:
        self._module = module
        self._trainer = module.trainer
        self._guard = guard
        self._optimizers = optimizers
        self._split = split
        self._logs = StepLogs(module, self._trainer)
        # Gradients of the batches of a window, between them.
        self.accumulation = Accumulation(guard, self._begin_attempt)
        # The batch that Lightning has loaded, or the one that the step is made with.
        self._batch: Any = None
        # Whether the last step has left the weights as they were.
        self.skipped = False
        # Whether the guard is calling ``training_step`` right now.
        self.is_called_by_guard = False

    def begin_batch(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - for subclasses
        """Keep the batch, since a step may need it several times."""
        self._batch = batch

    def close(self) -> None:
        """Undo what was changed in Lightning's objects."""

    def _begin_attempt(self) -> None:
        self._logs.undo_attempt()

    @contextlib.contextmanager
    def _logging_part(self, part: Any) -> Iterator[bool]:
        """Return a context in which a part of the batch passes through the model.

        It yields whether this is an attempt. Otherwise it is a trial of a split, or a replay that
        looks for a cause, and what is logged in it is undone.
        """
        if not self.accumulation.attempting:
            with self._logs.discarded():
                yield False
            return
        self._logs.begin_part(part, self._batch)
        yield True
        # The weight of the part in what is logged.
        samples = 1
        if part is not self._batch and not callable(self._split):
            samples = batch_size(part, self._split)
        self._logs.end_part(samples)

    @contextlib.contextmanager
    def _within_training_step(self) -> Iterator[None]:
        """Let ``self.log`` see that it is called in ``training_step``."""
        before = self._module._current_fx_name
        self._module._current_fx_name = "training_step"
        try:
            yield
        finally:
            self._module._current_fx_name = before


def optimizer_names(optimizers: Sequence[Any]) -> list[str]:
    """Return what the guard calls these optimizers."""
    if len(optimizers) == 1:
        return ["optimizer"]
    return [f"optimizer_{number}" for number in range(len(optimizers))]
