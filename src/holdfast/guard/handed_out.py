"""Decide whether the rows of a step's batch are still the samples that the guard's loader yielded.

A loop may move the loader's batch to another device, take it apart, augment it, or combine it with
a batch from a second loader. The guard may report dataset indices and quarantine samples only if
each row of the step's batch is the sample from the same row of the loader's batch. If this is not
certain, the indices count as unknown.

The batches are compared only after a step fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sized
from typing import Any

import numpy as np
import torch

from holdfast.loader.epoch import Epoch
from holdfast.loader.loader import DataLoader
from holdfast.loader.splitting import leaves_of

# The kinds of numpy dtypes that torch supports: bool, signed and unsigned integers, and floats.
_NUMPY_KINDS = "biuf"


class HandedOut:
    """The last batch that a `holdfast.DataLoader` yielded, and the dataset indices of its samples.

    Args:
        batch: The batch. To save memory, drop this object as soon as the loop drops the batch.
        loader: The loader that has just yielded the batch.
    """

    def __init__(self, batch: Any, loader: DataLoader) -> None:
        self._batch = batch
        self._entries = _entries_of(batch)
        # Read `place` now, since another iterator over the same loader may change it during a step.
        self._place = loader.place
        self._batches_handed_out = Epoch.handed_out

    def indices_of(self, batch: Any, size: int | None) -> list[int] | None:
        """Return the dataset index of each row of a batch, or None if this is not certain.

        Args:
            batch: The batch used for the step.
            size: The number of samples in the batch, or None if unknown.
        """
        indices = self._place.dataset_indices()
        if indices is None or size not in (None, len(indices)):
            return None
        if not self._has_same_rows(batch, len(indices)):
            return None
        return indices

    def _has_same_rows(self, batch: Any, size: int) -> bool:
        """Return whether each row of a batch is the sample from that row of the loader's batch."""
        if _entries_of(self._batch) != self._entries:
            # The loop has added entries to the batch, such as the batch of a second loader.
            return False
        if batch is self._batch:
            return True

        originals = _leaves_with_rows(self._batch, size)
        leaves = _leaves_with_rows(batch, size)
        unchanged = [leaf for leaf in leaves.values() if _equals_any(leaf, originals)]
        if not any(_is_any(leaf, originals) or _varies(leaf) for leaf in unchanged):
            # Nothing proves that this batch was made from the loader's batch. For example, a mask
            # of ones equals the masks in many other batches.
            return False
        if len(unchanged) == len(leaves):
            return True
        # The changed leaves may be augmented versions of the loader's leaves, or may come from
        # another loader. The latter is impossible if no loader has yielded a batch after this one.
        no_other_batch = Epoch.handed_out == self._batches_handed_out
        return no_other_batch and _sizes(leaves) == _sizes(originals)


def _entries_of(batch: Any) -> Any:
    """Return the keys of a mapping, the length of a list, or None for other batches.

    If this value changes, the loop has added entries to the batch or removed some.
    """
    if isinstance(batch, Mapping):
        return tuple(batch)
    if isinstance(batch, list):
        return len(batch)
    return None


# --- leaves of a batch


def _leaves_with_rows(batch: Any, size: int) -> dict[str, Any]:
    """Return the leaves of a batch that may have one row per sample, keyed by path.

    All other leaves, such as class weights, are shared by all samples.

    Args:
        batch: The batch.
        size: The number of samples in the batch.
    """
    return {path: leaf for path, leaf in leaves_of(batch) if _may_have_rows(leaf, size)}


def _may_have_rows(leaf: Any, size: int) -> bool:
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        return size in leaf.shape
    return isinstance(leaf, (list, tuple)) and len(leaf) == size


def _sizes(leaves: Mapping[str, Any]) -> dict[str, int]:
    """Return the length of each leaf along its first dimension, keyed by path."""
    return {path: len(leaf) for path, leaf in leaves.items() if isinstance(leaf, Sized)}


# --- comparing leaves


def _is_any(leaf: Any, originals: Mapping[str, Any]) -> bool:
    """Return whether a leaf is the same object as one of the loader's leaves."""
    return any(leaf is original for original in originals.values())


def _equals_any(leaf: Any, originals: Mapping[str, Any]) -> bool:
    """Return whether a leaf has the same values as one of the loader's leaves."""
    return any(_has_equal_values(leaf, original) for original in originals.values())


def _has_equal_values(leaf: Any, original: Any) -> bool:
    """Return whether two leaves have equal values, regardless of their device and type."""
    if leaf is original:
        return True
    if isinstance(leaf, (list, tuple)) and isinstance(original, (list, tuple)):
        return list(leaf) == list(original)
    values = _as_tensor(leaf)
    original_values = _as_tensor(original)
    if values is None or original_values is None:
        return False
    return _tensors_are_equal(values, original_values)


def _tensors_are_equal(values: torch.Tensor, original: torch.Tensor) -> bool:
    """Return whether a tensor equals the original, even in another dtype or on another device."""
    if values.shape != original.shape or not torch.can_cast(original.dtype, values.dtype):
        return False
    # Comparing raises an error for some dtypes or if memory is short, which must not end the run.
    with contextlib.suppress(RuntimeError):
        values = values.to(original.device)
        original = original.to(values.dtype)
        both_are_nan = (values != values) & (original != original)
        return bool(((values == original) | both_are_nan).all())
    return False


def _varies(leaf: Any) -> bool:
    """Return whether a leaf contains at least two different values."""
    if isinstance(leaf, (list, tuple)):
        return any(item != leaf[0] for item in leaf)
    values = _as_tensor(leaf)
    return values is not None and bool((values != values.flatten()[0]).any())


def _as_tensor(leaf: Any) -> torch.Tensor | None:
    """Return a tensor or NumPy array as a plain tensor, or None if it cannot be compared.

    Subclasses such as DTensor are not compared, since that may need a collective, and the other
    ranks do not call this function.
    """
    if isinstance(leaf, np.ndarray):
        if leaf.dtype.kind not in _NUMPY_KINDS:
            return None
        leaf = torch.as_tensor(leaf)
    if not isinstance(leaf, torch.Tensor) or type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        return None
    if leaf.layout is not torch.strided or leaf.is_nested:
        return None
    return leaf.detach()
