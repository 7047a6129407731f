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
    """Makes the steps that the module requests."""

    # Whether the module's steps go through the guard. None until its first batch is over.
    _is_guarded: bool | None = None

    def step(
        self, batch: Any, loss_fn: LossFunction, optimizer: Any, split: Split | None
    ) -> StepResult:
        """Make one step; see `HoldfastStrategy.guarded_step`."""
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
        """Return the positions of one optimizer, of several, or, for None, of all of them.

        Each may be wrapped in a ``LightningOptimizer``.
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
        """Call a loss function of the module, and keep its logged values correct."""
        with self._logging_part(part), self._within_training_step():
            return loss_fn(part)

    def note_unguarded_steps(self) -> None:
        """Record once that the first batch was trained without the guard."""
        if self._is_guarded is not None:
            return
        self._is_guarded = False
        why = (
            "the module optimizes manually, and training_step called no guarded_step for its first"
            " batch. Fix: self.trainer.strategy.guarded_step(batch, loss_fn, optimizer=...)"
        )
        self._guard.emit(run_events.OwnSteps(why=why))


class _ManualLoss:
    """Wraps a loss function of the module, which the guard recognises by its `loss_fn`."""

    def __init__(self, optimization: ManualOptimization, loss_fn: LossFunction) -> None:
        self._optimization = optimization
        self.loss_fn = loss_fn

    def __call__(self, part: Any) -> Any:
        return self._optimization.compute_loss(part, self.loss_fn)
