"""Manual optimization: the module calls `HoldfastStrategy.guarded_step` in ``training_step``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.core.events import run_events
from holdfast.guard.result import StepResult
from holdfast.guard.splitting.split_safety import LossFunction
from holdfast.integrations.lightning.optimization import Optimization, optimizer_names
from holdfast.loader.splitting import Split


class ManualOptimization(Optimization):
    """Runs the steps that a module requests with ``guarded_step``."""

    # Whether the module calls ``guarded_step``. None until the first call or the end of the first
    # batch.
    _is_guarded: bool | None = None

    def step(
        self, batch: Any, loss_fn: LossFunction, optimizer: Any, split: Split | None
    ) -> StepResult:
        """Run one step; see `HoldfastStrategy.guarded_step`."""
        numbers = self._optimizer_numbers(optimizer)
        names = optimizer_names(self._optimizers)
        wrappers = self._trainer.strategy._lightning_optimizers
        batch_before = self._batch
        self._batch = batch
        self._is_guarded = True
        self._logs.begin_step()
        for number in numbers:
            wrappers[number]._on_before_step()
        try:
            result = self._guard.step(
                batch,
                _ManualLoss(self, loss_fn),
                optimizer=[names[number] for number in numbers],
                split=split,
            )
        finally:
            self._logs.end_step(batch_before)
            self._batch = batch_before
        for number in numbers:
            wrappers[number]._on_after_step()
        return result

    def _optimizer_numbers(self, optimizer: Any) -> list[int]:
        """Return the positions of the requested optimizers in the trainer's list.

        Args:
            optimizer: One optimizer, a list of optimizers, or None for all. Optimizers may be
                wrapped in a ``LightningOptimizer``.
        """
        if optimizer is None:
            return list(range(len(self._optimizers)))
        requested = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        unwrapped = [getattr(wrapper, "optimizer", wrapper) for wrapper in requested]
        return [
            number
            for number, own in enumerate(self._optimizers)
            if any(own is candidate for candidate in unwrapped)
        ]

    def compute_loss(self, part: Any, loss_fn: LossFunction) -> Any:
        """Call the module's loss function on a part of the batch, and correct what it logs."""
        with self._logging_part(part), self._within_training_step():
            return loss_fn(part)

    def note_unguarded_steps(self) -> None:
        """Report once if the module did not call ``guarded_step`` for the first batch."""
        if self._is_guarded is not None:
            return
        self._is_guarded = False
        why = (
            "the module uses manual optimization, but training_step did not call guarded_step for"
            " the first batch. Fix: self.trainer.strategy.guarded_step(batch, loss_fn,"
            " optimizer=...)"
        )
        self._guard.emit(run_events.OwnSteps(why=why))


class _ManualLoss:
    """Wraps the module's loss function, so that logged values stay correct when it is repeated.

    The guard reads the attribute `loss_fn` to identify the wrapped function.
    """

    def __init__(self, optimization: ManualOptimization, loss_fn: LossFunction) -> None:
        self._optimization = optimization
        self.loss_fn = loss_fn

    def __call__(self, part: Any) -> Any:
        return self._optimization.compute_loss(part, self.loss_fn)
