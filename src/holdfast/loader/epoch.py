"""The iterator over the batches of an epoch, and a registry of the iterators in progress."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from typing import Any, ClassVar, NamedTuple


class FailedBatch(NamedTuple):
    """An error that takes the place of a batch until `Epoch` raises it.

    Raising the error earlier would end the generators that yield the batches.
    """

    error: Exception


class Epoch:
    """The iterator over the batches of an epoch.

    As in torch, iteration can continue after a batch has raised an error.

    Args:
        batches: Yields the batches.
        loader: The `DataLoader` that the batches come from.
    """

    # Unfinished iterators that have returned a batch since the last call of `take_unkept_loaders`.
    # The references are weak, so abandoned iterators disappear from the set.
    under_way: ClassVar[weakref.WeakSet[Epoch]] = weakref.WeakSet()

    # All unfinished iterators that have returned a batch.
    unfinished: ClassVar[weakref.WeakSet[Epoch]] = weakref.WeakSet()

    # Loaders from which a batch was taken for an optimizer step since the last call of
    # `take_unkept_loaders`. They are reported even if they have reached the end of their epoch.
    trained_with: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    # Number of batches that all loaders of this process have returned.
    handed_out: ClassVar[int] = 0

    def __init__(self, batches: Generator[Any], loader: Any) -> None:
        self._batches = batches
        self.loader = loader

    def __len__(self) -> int:
        """Return the number of batches in a full epoch, as torch's iterators do."""
        return len(self.loader)

    def __iter__(self) -> Epoch:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._leave()
            raise
        self.under_way.add(self)
        self.unfinished.add(self)
        Epoch.handed_out += 1
        if isinstance(batch, FailedBatch):
            raise batch.error
        return batch

    def close(self) -> None:
        """Abandon the rest of the epoch."""
        self._leave()
        self._batches.close()

    def _leave(self) -> None:
        self.under_way.discard(self)
        self.unfinished.discard(self)


def is_iterated(loader: Any) -> bool:
    """Return whether an iterator over this loader can still return batches."""
    return any(epoch.loader is loader for epoch in list(Epoch.unfinished))


def note_step() -> None:
    """Record that an optimizer step was taken while loaders are in the middle of an epoch."""
    Epoch.trained_with.update(epoch.loader for epoch in list(Epoch.under_way))


def take_unkept_loaders() -> list[Any]:
    """Return the loaders on whose position the training depends, although it is not saved.

    These are the loaders that have returned a batch since the last call, and either are in the
    middle of an epoch or were when an optimizer step was taken.
    """
    loaders = {epoch.loader for epoch in list(Epoch.under_way)} | set(Epoch.trained_with)
    Epoch.under_way.clear()
    Epoch.trained_with.clear()
    return [loader for loader in loaders if not loader.is_kept]
