"""The iterator over the batches of an epoch, and what the guard needs to know about all of them."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from typing import Any, ClassVar, NamedTuple


class FailedBatch(NamedTuple):
    """An error that takes the place of a batch.

    It is raised by `Epoch`, because an exception would end the generators below it.
    """

    error: Exception


class Epoch:
    """The iterator over the batches of an epoch.

    As in torch, iteration can continue after an error was raised in place of a batch.

    Args:
        batches: Yields the batches.
        loader: The `DataLoader` that they come from.
    """

    # Unfinished iterators that have handed out a batch since the last `take_unkept_loaders`. The
    # references are weak, so an abandoned iterator disappears from the set.
    under_way: ClassVar[weakref.WeakSet[Epoch]] = weakref.WeakSet()

    # The number of batches that all loaders of this process have handed out.
    handed_out: ClassVar[int] = 0

    def __init__(self, batches: Generator[Any], loader: Any) -> None:
        self._batches = batches
        self.loader = loader

    def __len__(self) -> int:
        """Return the number of batches in a whole epoch, as torch's iterators do."""
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
    """Return the loaders in the middle of an epoch whose position is not saved.

    Only loaders that have handed out a batch since the last call are returned.
    """
    epochs = list(Epoch.under_way)
    Epoch.under_way.clear()
    return [epoch.loader for epoch in epochs if not epoch.loader.is_kept]
