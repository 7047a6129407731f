"""Batches of SpeechBrain's: how a ``PaddedBatch`` is cut, and how what came of its parts is put together again."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

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


def joined(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Put together what ``compute_forward`` returned for the parts of a batch: tensors along their first dimension.

    Lists with one entry for each sample, such as names or decoded words, are put one after the other.

    Args:
        parts: Tuples, lists, dicts and tensors, of one structure.
        sizes: Samples of each part.

    Returns:
        The same structure; what has no such dimension is that of the last part.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, dict):
        return {key: joined([part[key] for part in parts], sizes) for key in first}
    if isinstance(first, (list, tuple)) and not hasattr(first, "_fields"):
        lengths = [len(part) for part in parts]
        if lengths == list(sizes) and (len(set(lengths)) > 1 or not any(map(_holds_tensors, parts))):
            return type(first)(entry for part in parts for entry in part)
        if len(set(lengths)) > 1:
            return parts[-1]
        return type(first)(joined(list(each), sizes) for each in zip(*parts, strict=True))
    fits = all(isinstance(part, torch.Tensor) and part.ndim for part in parts)
    if fits and all(len(part) == size for part, size in zip(parts, sizes, strict=True)):
        return torch.cat(list(parts))
    return parts[-1]


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, torch.Tensor)


def detached(value: Any) -> Any:
    """Return tensors in tuples, lists and dicts without their graph."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: detached(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(detached(each) for each in value)
    return value
