"""`Window`: several batches for one optimizer step, as in gradient accumulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from holdfast.loader.splitting import Split, batch_size, select


class Window(list[Any]):
    """The batches of one step, in the order in which the loss function is called with them.

    After an out-of-memory error, each batch is split separately. Batches are never concatenated,
    since their padding may differ. Sample positions are counted over all batches.

    Args:
        batches: The batches, at least one.
        added: Whether the caller has already divided each loss by the number of batches. If so,
            losses and gradients are simply added. Otherwise, the step equals a step with one large
            batch: each loss is weighted by its number of items or samples.
        on_cut: Function to call with the remaining batches whenever samples have been removed.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        added: bool = False,
        on_cut: Callable[[list[Any]], None] | None = None,
    ) -> None:
        super().__init__(batches)
        self.added = added
        self._on_cut = on_cut

    def choose(self, indices: Sequence[int], split: Split) -> Window:
        """Return a window that contains only copies of the chosen samples.

        Args:
            indices: The positions of the samples, counted over all batches. Their order determines
                the order of samples within a batch.
            split: Which dimension of the batch's tensors is the batch dimension.
        """
        batches = []
        start = 0
        for batch in self:
            size = batch_size(batch, split)
            own_indices = [index - start for index in indices if start <= index < start + size]
            if own_indices:
                batches.append(select(batch, size, own_indices, split))
            start += size
        if self._on_cut is not None:
            self._on_cut(batches)
        return Window(batches, added=self.added, on_cut=self._on_cut)


def largest_of(batch: Any, split: Split) -> Any:
    """Return a batch unchanged. For a window, return its batch with the most samples."""
    if not isinstance(batch, Window):
        return batch
    return max(batch, key=lambda candidate: batch_size(candidate, split))


def samples_of(batch: Any, split: Split) -> int:
    """Return the number of samples in a batch, or in all batches of a window."""
    if not isinstance(batch, Window):
        return batch_size(batch, split)
    return sum(batch_size(part, split) for part in batch)


def selected(batch: Any, indices: Sequence[int], split: Split) -> Any:
    """Return a batch or window that contains only some samples; see `select`."""
    if isinstance(batch, Window):
        return batch.choose(indices, split)
    return select(batch, batch_size(batch, split), indices, split)
