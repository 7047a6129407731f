"""Batches of SpeechBrain's: how a ``PaddedBatch`` is cut, and how what came of its parts is put together again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from holdfast.loader.splitting import Split


def is_padded(batch: Any) -> bool:
    """Return whether this is a ``PaddedBatch``, whose parts are attributes."""
    return hasattr(batch, "at_position") and hasattr(batch, "batchsize")


def split_of(batch: Any) -> Split:
    """Return how a batch of SpeechBrain's is cut."""
    return cut_padded if is_padded(batch) else 0


def samples_in(batch: Any) -> int:
    """Return the samples of a ``PaddedBatch`` or of the first tensor of another batch."""
    if is_padded(batch):
        return len(batch)
    first = batch[0] if isinstance(batch, (list, tuple)) else batch
    return len(first) if hasattr(first, "__len__") else 1


def cut_padded(batch: Any, size: int) -> list[Any]:
    """Cut a ``PaddedBatch`` into parts of so many samples; padding and relative lengths stay as they are."""
    name = next(name for name in vars(batch) if name.endswith("__keys"))  # private, as its length is
    length = name.removesuffix("keys") + "length"
    parts = []
    for start in range(0, len(batch), size):
        part = copy.copy(batch)
        for key in vars(batch)[name]:
            setattr(part, key, _cut(batch[key], slice(start, start + size)))
        setattr(part, length, min(size, len(batch) - start))
        parts.append(part)
    return parts


def _cut(value: Any, where: slice) -> Any:
    if not hasattr(value, "lengths"):
        return value[where]
    return type(value)(value.data[where], value.lengths[where])  # PaddedData


def detached(value: Any) -> Any:
    """Return tensors in tuples, lists and dicts without their graph."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, value)


def joined(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Put together what ``compute_forward`` returned for the parts of a batch.

    Args:
        parts: Tuples, lists, dicts and tensors, of one structure.
        sizes: Samples of each part.

    Returns:
        The same structure: tensors joined along their first dimension, lists with an entry for each sample, such as
        decoded words, one after the other. What has no such dimension is that of the last part.
    """

    def flattened(part: Any, size: int) -> tuple[list[Any], Any]:
        return tree_flatten(part, lambda value: isinstance(value, list) and len(value) == size and _is_plain(value))

    if len(parts) == 1:
        return parts[0]
    leaves, structures = zip(*map(flattened, parts, sizes), strict=True)
    if any(structure != structures[0] for structure in structures):
        return parts[-1]
    return tree_unflatten([_join(each, sizes) for each in zip(*leaves, strict=True)], structures[0])


def _join(leaves: Sequence[Any], sizes: Sequence[int]) -> Any:
    if isinstance(leaves[0], list):
        return [entry for leaf in leaves for entry in leaf]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim]
    fits = [len(tensor) for tensor in tensors] == list(sizes)
    return torch.cat(tensors) if fits else leaves[-1]


def _is_plain(value: Any) -> bool:
    return not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
