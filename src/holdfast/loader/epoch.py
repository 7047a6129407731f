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
            self.under_way.discard(self)
            raise
        self.under_way.add(self)
        Epoch.handed_out += 1
        if isinstance(batch, FailedBatch):
            raise batch.error
        return batch

    def close(self) -> None:
        """Abandon the rest of the epoch."""
        self.under_way.discard(self)
        self._batches.close()


def take_unkept_loaders() -> list[Any]:
    """Return the loaders that are in the middle of an epoch and whose position is not saved.

    Only loaders that have returned a batch since the last call are included.
    """
    if not Epoch.under_way:
        return []
    epochs = list(Epoch.under_way)
    Epoch.under_way.clear()
    return [epoch.loader for epoch in epochs if not epoch.loader.is_kept]
