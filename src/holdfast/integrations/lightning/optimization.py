"""The base class of automatic and manual optimization: attempts, parts of a batch, and logs."""

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
    """Base class of the objects that run the steps of one ``fit``.

    Args:
        module: The ``LightningModule``.
        guard: The run's guard.
        optimizers: The trainer's optimizers.
        split: The position of the batch dimension, as for `Guard`.
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
        # Accumulates gradients while the batches of a window arrive.
        self.accumulation = Accumulation(guard)
        # The number of the attempt to which the logged values belong.
        self._logged_attempt: int | None = None
        # The batch that Lightning has loaded or, during a manual step, the batch passed to it.
        self._batch: Any = None
        # Whether the last step left the weights unchanged.
        self.skipped = False
        # Whether the guard is currently calling ``training_step``.
        self.is_called_by_guard = False

    def begin_batch(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - for subclasses
        """Store the batch, because a step may need it several times."""
        self._batch = batch

    def close(self) -> None:
        """Undo the changes made to Lightning's objects. The base class has made none."""

    def _undo_previous_attempt(self) -> None:
        self._logs.undo_attempt()

    @contextlib.contextmanager
    def _logging_part(self, part: Any) -> Iterator[bool]:
        """Return a context for passing a part of the batch through the model.

        The context yields True during an attempt at the step. While the guard tests a split, or
        replays the step to find a cause, the context yields False and discards all logged values.
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
        # The values logged for this part are weighted by its number of samples. The weight does not
        # matter if the part is the whole batch.
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
    """Return the names under which the optimizers are passed to the guard, in the same order."""
    if len(optimizers) == 1:
        return ["optimizer"]
    return [f"optimizer_{number}" for number in range(len(optimizers))]
