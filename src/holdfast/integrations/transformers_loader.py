"""A `holdfast.DataLoader` in the loop of a Hugging Face Trainer.

The Trainer goes on in the middle of an epoch by building another loader that skips batches, which would have another
order. Here it is given a loader that stands at its place already, behind as many placeholders as are to be skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from holdfast.loader.loader import DataLoader


class _Placed(IterableDataset[Any]):
    """The rest of an epoch, behind placeholders."""

    def __init__(self, loader: DataLoader, placeholders: int) -> None:
        self._loader = loader
        self._placeholders = placeholders

    def __iter__(self) -> Iterator[Any]:
        yield from (None for _ in range(self._placeholders))
        yield from self._loader


def _as_it_is(batch: Any) -> Any:
    return batch


class PlacedLoader:
    """What the Trainer iterates instead; ``accelerate.skip_first_batches`` finds in it what it needs.

    Args:
        loader: The user's.
        epoch: Of the Trainer.
        skipped: Batches that the Trainer will skip.
        state: Where the loader stood when the checkpoint was written; None: not known, so batches are read over.
    """

    drop_last = pin_memory = persistent_workers = False
    batch_size = prefetch_factor = worker_init_fn = multiprocessing_context = generator = None
    num_workers = timeout = 0
    collate_fn = staticmethod(_as_it_is)

    def __init__(self, loader: DataLoader, epoch: int, skipped: int, state: dict[str, Any] | None) -> None:
        known = state is not None and skipped > 0
        if known and state is not None:
            loader.load_state_dict(state)
        else:
            loader.go_to(epoch)
        self.dataset = _Placed(loader, skipped if known else 0)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of the epoch."""
        return iter(self.dataset)
