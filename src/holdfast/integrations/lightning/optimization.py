"""The common part of automatic and manual optimization: attempts, parts of a batch, and logs."""

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
        split: Where the batch dimension is, as for `Guard`.
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
        # The gradients of a window, while its batches arrive.
        self.accumulation = Accumulation(guard)
        # The number of the attempt to which the logged values belong.
        self._logged_attempt: int | None = None
        # The batch that Lightning has loaded, or the one used for the step.
        self._batch: Any = None
        # Whether the last step left the weights unchanged.
        self.skipped = False
        # Whether the guard is currently calling ``training_step``.
        self.is_called_by_guard = False

    def begin_batch(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - for subclasses
        """Keep the batch, because a step may need it several times."""
        self._batch = batch

    def close(self) -> None:
        """Undo the changes to Lightning's objects."""

    def _undo_previous_attempt(self) -> None:
        self._logs.undo_attempt()

    @contextlib.contextmanager
    def _logging_part(self, part: Any) -> Iterator[bool]:
        """Return a context in which a part of the batch passes through the model.

        It yields whether this is an attempt of the step. Otherwise it is a test of splitting, or a
        replay to find a cause, and anything logged in it is undone.
        """
        attempt = self.accumulation.attempt
        if attempt is None:
            with self._logs.discarded():
                yield False
            return
        if attempt != self._logged_attempt:
            self._logged_attempt = attempt
            self._undo_previous_attempt()
        self._logs.begin_part(part, self._batch)
        yield True
        # The weight of the part in the logged values.
        samples = 1
        if part is not self._batch and not callable(self._split):
            samples = batch_size(part, self._split)
        self._logs.end_part(samples)

    @contextlib.contextmanager
    def _within_training_step(self) -> Iterator[None]:
        """Make ``self.log`` behave as if it were called in ``training_step``."""
        before = self._module._current_fx_name
        self._module._current_fx_name = "training_step"
        try:
            yield
        finally:
            self._module._current_fx_name = before


def optimizer_names(optimizers: Sequence[Any]) -> list[str]:
    """Return the guard's names of these optimizers."""
    if len(optimizers) == 1:
        return ["optimizer"]
    return [f"optimizer_{number}" for number in range(len(optimizers))]
