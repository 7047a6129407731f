"""Resume a `holdfast.DataLoader` in the middle of an epoch, inside the Trainer's loop.

To skip the batches that were already trained, the Trainer wraps the loader's dataset in another
loader. That would lose the order, the workers and the quarantine of a `holdfast.DataLoader`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from holdfast.loader.loader import DataLoader


class PositionedLoader:
    """Wraps a `holdfast.DataLoader` so that it keeps its order when the Trainer skips batches.

    To skip batches, ``accelerate.skip_first_batches`` creates a new loader and copies the class
    attributes below. Their values describe a loader without workers whose dataset yields whole
    batches.

    If the checkpoint contains the loader's position, this object moves the loader there and yields
    placeholders for the Trainer to skip. Otherwise, the batches that were already trained are
    loaded again.

    Args:
        loader: The loader to wrap.
        epoch: The epoch to iterate, counted from 0.
        skipped: The number of batches in this epoch that the Trainer will skip.
        state: The value of ``loader.state_dict()`` after the skipped batches, or None if the
            checkpoint does not contain it.
    """

    drop_last = False
    pin_memory = False
    persistent_workers = False
    batch_size = None
    prefetch_factor = None
    worker_init_fn = None
    multiprocessing_context = None
    generator = None
    num_workers = 0
    timeout = 0

    def __init__(
        self, loader: DataLoader, *, epoch: int, skipped: int, state: dict[str, Any] | None
    ) -> None:
        if state is not None and skipped:
            loader.load_state_dict(state)
        else:
            loader.go_to(epoch)
        self.dataset = _RestOfEpoch(loader, placeholders=0 if state is None else skipped)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    @staticmethod
    def collate_fn(batch: Any) -> Any:
        """Return the batch unchanged, because the loader has already collated it."""
        return batch


class _RestOfEpoch(IterableDataset[Any]):
    """Yields placeholders for the batches that the Trainer skips, then the rest of the epoch."""

    def __init__(self, loader: DataLoader, *, placeholders: int) -> None:
        self._loader = loader
        self._placeholders = placeholders

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._placeholders):
            yield None
        yield from self._loader
