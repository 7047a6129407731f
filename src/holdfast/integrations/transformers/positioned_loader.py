"""A `holdfast.DataLoader` in the Trainer's loop, at the position at which training resumes.

To resume in the middle of an epoch, the Trainer skips batches by wrapping the loader's dataset in
its own loader, which would lose our loader's order, workers and quarantine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from holdfast.loader.loader import DataLoader


class PositionedLoader:
    """The loader that the Trainer iterates instead of a `holdfast.DataLoader`.

    It has the attributes that ``accelerate.skip_first_batches`` copies to the loader that it
    creates: those of a loader without workers whose dataset yields whole batches.

    If the checkpoint holds the position of the loader, only placeholders are skipped. Otherwise the
    batches that were already trained are read again.

    Args:
        loader: The loader.
        epoch: The epoch to iterate, from 0.
        skipped: The number of its batches that the Trainer will skip.
        state: ``loader.state_dict()`` at that position, or None if the checkpoint does not hold it.
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
    """Placeholders for the batches that the Trainer skips, then the rest of the epoch."""

    def __init__(self, loader: DataLoader, *, placeholders: int) -> None:
        self._loader = loader
        self._placeholders = placeholders

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._placeholders):
            yield None
        yield from self._loader
