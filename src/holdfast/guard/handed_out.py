"""Whether a step was made with the batch that the guard's loader handed out, so that its rows are
known samples.

A loop may move that batch to another device, take it apart, augment it, or combine it with a batch
of a second loader. Only while each row is still the sample that the loader put there do its dataset
indices name anything. Nothing is compared until a step has gone wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch

from holdfast.loader.loader import DataLoader, batches_handed_out
from holdfast.loader.splitting import leaves_of


class HandedOut:
    """The batch that a `holdfast.DataLoader` handed out last, and the samples that it was made of.

    Args:
        batch: The batch. It must not be kept for longer than the loop keeps it.
        loader: The loader that has just handed it out.
    """

    def __init__(self, batch: Any, loader: DataLoader) -> None:
        self._batch = batch
        self._entries = _entries_of(batch)
        # Taken now: another iterator of the same loader may move it on while the step is made.
        self._place = loader.place
        self._count = batches_handed_out()

    def indices_of(self, batch: Any, size: int | None) -> list[int] | None:
        """Return the dataset indices of the rows of a batch, or None if they may be other samples.

        Args:
            batch: What the step was made with.
            size: The number of samples in it, None if unknown.
        """
        indices = self._place.dataset_indices()
        if indices is None or size not in (None, len(indices)):
            return None
        return indices if self._is_origin_of(batch, len(indices)) else None

    def _is_origin_of(self, batch: Any, size: int) -> bool:
        """Return whether each row of a batch is the sample that the loader put into this row."""
        # The loop has put something else into the batch itself, such as the batch of a second
        # loader.
        if _entries_of(self._batch) != self._entries:
            return False
        if batch is self._batch:
            return True

        originals = dict(_sample_leaves(self._batch, size))
        leaves = dict(_sample_leaves(batch, size))
        unchanged = [
            leaf
            for leaf in leaves.values()
            if any(_equal(leaf, original) for original in originals.values())
        ]
        if not any(_is_one_of(leaf, originals) or _varies(leaf) for leaf in unchanged):
            return False
        if len(unchanged) == len(leaves):
            return True

        # Part of it was changed, as by augmentation. In the same structure that is still the same
        # batch, unless the part may have come from another loader, which was read since.
        return batches_handed_out() == self._count and _sizes(leaves) == _sizes(originals)


def _entries_of(batch: Any) -> Any:
    """Return what changes when an entry is added to a batch.

    The keys of a mapping, the length of a list.
    """
    if isinstance(batch, Mapping):
        return tuple(batch)
    return len(batch) if isinstance(batch, list) else None


def _sample_leaves(batch: Any, size: int) -> Iterator[tuple[str, Any]]:
    """Yield the leaves that may hold a row for each sample, with their paths.

    Others, such as weights, are shared.
    """
    for path, leaf in leaves_of(batch):
        if isinstance(leaf, (torch.Tensor, np.ndarray)):
            if size in leaf.shape:
                yield path, leaf
        elif isinstance(leaf, (list, tuple)) and len(leaf) == size:
            yield path, leaf


def _sizes(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Return the leading size of each leaf by its path."""
    return {path: len(leaf) for path, leaf in leaves.items() if isinstance(leaf, Sized)}


def _equal(leaf: Any, original: Any) -> bool:
    """Return whether a leaf is the original, or holds its values, on any device and in any type."""
    if leaf is original:
        return True
    if isinstance(leaf, (list, tuple)) and isinstance(original, (list, tuple)):
        return list(leaf) == list(original)
    values = _plain_tensor(leaf)
    others = _plain_tensor(original)
    if values is None or others is None or values.shape != others.shape:
        return False
    if not torch.can_cast(others.dtype, values.dtype):
        return False
    # A few types cannot be compared, and memory may be short: that is no reason to end a run.
    with contextlib.suppress(RuntimeError):
        values = values.to(others.device)
        others = others.to(values.dtype)
        both_nan = (values != values) & (others != others)
        return bool(((values == others) | both_nan).all())
    return False


def _is_one_of(leaf: Any, originals: Mapping[str, Any]) -> bool:
    return any(leaf is original for original in originals.values())


def _varies(leaf: Any) -> bool:
    """Return whether a leaf holds different values.

    One of ones only, such as a mask, equals that of any batch.
    """
    if isinstance(leaf, (list, tuple)):
        return any(item != leaf[0] for item in leaf)
    values = _plain_tensor(leaf)
    return values is not None and bool((values != values.flatten()[0]).any())


def _plain_tensor(leaf: Any) -> torch.Tensor | None:
    """Return the values of a tensor or array, or None for kinds that cannot be compared on one
    rank alone.
    """
    if isinstance(leaf, np.ndarray):
        if leaf.dtype.kind not in "biuf":
            return None
        leaf = torch.as_tensor(leaf)
    if not isinstance(leaf, torch.Tensor) or type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if leaf.layout is not torch.strided or leaf.is_nested:
        return None
    return leaf.detach()
