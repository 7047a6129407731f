"""Delay a ``ModelCheckpoint`` save if a validation or the end of an epoch is imminent."""

from __future__ import annotations

from typing import Any


class DelayedSaves:
    """Delays a save if a validation or the end of the epoch follows at the same batch.

    Lightning would save first, and a run that resumed from the saved file would skip the validation
    or the end of the epoch.

    Args:
        callback: A ``ModelCheckpoint``. This object replaces three of its hooks until `remove` is
            called.
        trainer: The callback's trainer.
    """

    def __init__(self, callback: Any, trainer: Any) -> None:
        self._callback = callback
        self._trainer = trainer
        self._save_at_batch_end = callback.on_train_batch_end
        self._after_validation = callback.on_validation_end
        self._after_epoch = callback.on_train_epoch_end
        # The arguments of the callback's hook for each delayed save.
        self._waiting: list[tuple[Any, ...]] = []
        vars(callback).update(
            on_train_batch_end=self._on_train_batch_end,
            on_validation_end=self._on_validation_end,
            on_train_epoch_end=self._on_train_epoch_end,
        )

    def remove(self) -> None:
        """Restore the callback's own hooks."""
        for name in ("on_train_batch_end", "on_validation_end", "on_train_epoch_end"):
            vars(self._callback).pop(name, None)

    def _on_train_batch_end(self, *args: Any) -> None:
        if self._is_last_batch():
            must_wait = not self._saves_after_validation()
        else:
            must_wait = self._validation_follows()
        if must_wait:
            self._waiting.append(args)
        else:
            self._save_at_batch_end(*args)

    def _is_last_batch(self) -> bool:
        return bool(self._trainer.fit_loop.epoch_loop._num_ready_batches_reached())

    def _saves_after_validation(self) -> bool:
        """Return whether the callback saves after the validation anyway, to monitor a metric."""
        if self._callback.monitor is None:
            return False
        return not self._callback._should_save_on_train_epoch_end(self._trainer)

    def _validation_follows(self) -> bool:
        fit_loop = self._trainer.fit_loop
        if not fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher):
            return False
        return not fit_loop.epoch_loop.val_loop.skip

    def _on_validation_end(self, *args: Any) -> None:
        if not self._is_last_batch():
            self._make_waiting_saves()
        self._after_validation(*args)

    def _on_train_epoch_end(self, *args: Any) -> None:
        if self._is_last_batch():
            self._make_waiting_saves()
        self._after_epoch(*args)

    def _make_waiting_saves(self) -> None:
        while self._waiting:
            self._save_at_batch_end(*self._waiting.pop())
