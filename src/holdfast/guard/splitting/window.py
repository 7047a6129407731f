"""Several batches that make one optimizer step together.

Gradient accumulation over batches that are cut already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from holdfast.loader.splitting import Split, batch_size, select


class Window(list[Any]):
    """The batches of one step, each of which goes through the loss function by itself, in this
    order.

    Out of memory cuts each of them into smaller parts; a batch is never joined with another, since
    they may be padded differently. Positions of samples count through all of them.

    Args:
        batches: At least one, each as ``Guard.step`` takes it.
        added: Whether the caller has divided each loss already, so that losses and gradients are
            added as they are. Else the step is that of one large batch: each loss counts by its
            samples, by what its mean was found to be over, or by the items that it declares.
        on_cut: Called with the batches that are left when samples were taken out, before they are
            used.
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
        """Return a window of some of the samples, in the order of `indices` within each batch.

        Tensors are copied.
        """
        left, start = [], 0
        for batch in self:
            size = batch_size(batch, split)
            mine = [index - start for index in indices if start <= index < start + size]
            if mine:
                left.append(select(batch, size, mine, split))
            start += size
        if self._on_cut is not None:
            self._on_cut(left)
        return Window(left, added=self.added, on_cut=self._on_cut)


def largest_of(batch: Any, split: Split) -> Any:
    """Return the batch itself.

    Of a window, the one with the most samples, which stands for the others.
    """
    return (
        max(batch, key=lambda each: batch_size(each, split)) if isinstance(batch, Window) else batch
    )


def samples_of(batch: Any, split: Split) -> int:
    """Return the samples of a batch, or of all batches of a window."""
    return (
        sum(batch_size(each, split) for each in batch)
        if isinstance(batch, Window)
        else batch_size(batch, split)
    )


def selected(batch: Any, indices: Sequence[int], split: Split) -> Any:
    """Return a batch or a window of some of its samples; see `select`."""
    if isinstance(batch, Window):
        return batch.choose(indices, split)
    return select(batch, batch_size(batch, split), indices, split)
