"""Find what the mean of a loss may be taken over, and how to weight the parts of a batch.

A mean may be taken over samples, valid labels, the entries of a mask, and so on. This module finds
the candidates in a batch. ``split_check`` tries them to find the right one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from holdfast.core.containers import children_of
from holdfast.core.errors import BatchError

# The default `ignore_index` of torch, and two other common padding values.
_PADDINGS = (-100, -1, 0)
# A value that is at the end of at least this share of the rows may be a padding value, too.
_HALF = 0.5
Keys: TypeAlias = tuple[str | int, ...]
Kind: TypeAlias = Literal["samples", "labels", "mask", "total", "sum"]
_ORDER: tuple[Kind, ...] = ("samples", "labels", "mask", "total", "sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """What the mean of a loss is taken over, which determines the weights of a batch's parts.

    The kind is ``"samples"``, ``"labels"`` or ``"mask"`` (entries of a tensor that are not
    `ignored`), ``"total"`` (the sum of a tensor, such as lengths or weights), or ``"sum"``. The
    last kind means that the loss is a sum, so the losses of the parts are added.
    """

    kind: Kind
    # The path to the tensor in the batch.
    keys: Keys = ()
    # The value of entries that do not count.
    ignored: int = 0
    # The dimension along which the first entry does not count, as in next-token labels. -1 if all
    # entries count.
    shifted: int = -1

    def rank(self) -> int:
        """Return the position of this kind among all kinds, sorted from common to rare."""
        return _ORDER.index(self.kind)

    def __str__(self) -> str:
        leaf = "batch" + "".join(f"[{key!r}]" for key in self.keys)
        if self.shifted >= 0:
            leaf += " without the first of each row"
        return {
            "samples": "samples",
            "labels": f"valid labels of {leaf} (not {self.ignored})",
            "mask": f"entries of the mask {leaf} (not {self.ignored})",
            "total": f"sum of {leaf}",
            "sum": "a sum, not a mean",
        }[self.kind]

    def count(self, part: Any, samples: int) -> float | torch.Tensor:
        """Return the weight of a part: the number of its entries over which the mean is taken.

        For ``"total"``, the weight is the sum of the part's tensor. On an accelerator, the result
        is a tensor.

        Args:
            part: A part of the batch.
            samples: The number of samples in the part.
        """
        if self.kind in ("samples", "sum"):
            return samples if self.kind == "samples" else 1
        leaf: Any = _follow(part, self.keys)
        if not isinstance(leaf, torch.Tensor) or self.shifted >= leaf.ndim:
            raise BatchError(
                f"earlier batches showed that the loss is a mean over {self}, which this batch does"
                " not contain",
                limit="the weights of a batch's parts depend on what the mean is taken over",
                fix="return Loss(mean, items), which does not depend on the layout of the batch.",
                rule="H207",
            )
        if self.shifted >= 0:
            leaf = leaf.narrow(self.shifted, 1, max(0, leaf.shape[self.shifted] - 1))
        counted = (
            leaf.detach().sum(dtype=torch.float64)
            if self.kind == "total"
            else (leaf != self.ignored).sum()
        )
        return float(counted) if counted.device.type == "cpu" else counted


SAMPLES = Weighting(kind="samples")


def find_weightings(batch: Any, size: int) -> list[Weighting]:
    """Return the candidates for what the mean of a loss is taken over, most common first.

    This synchronizes with the device once for each integer tensor and each mask.

    Args:
        batch: The batch.
        size: The number of samples in the batch.
    """
    candidates = [SAMPLES, Weighting(kind="sum")]
    for keys, leaf in _nodes(batch, ()):
        is_image = leaf.is_floating_point() and leaf.ndim > 2
        if _is_plain(leaf) and size in leaf.shape and not is_image:
            candidates += _of_tensor(keys, leaf.detach(), size)
    return sorted(candidates, key=Weighting.rank)


def _is_plain(leaf: torch.Tensor) -> bool:
    return (
        not leaf.is_nested
        and leaf.layout is torch.strided
        and not leaf.is_complex()
        and leaf.numel() > 0
    )


def _of_tensor(keys: Keys, leaf: torch.Tensor, size: int) -> list[Weighting]:
    """Return the weightings for which a tensor of the batch may provide the counts.

    Args:
        keys: The path to the tensor in the batch.
        leaf: The tensor.
        size: The number of samples in the batch.
    """
    shifts = _possible_shifts(leaf, size)
    masks = _entries("mask", keys, (0, 1), shifts)
    if leaf.dtype == torch.bool:
        return masks
    values = _read_values(leaf)
    if values.are_zeros_and_ones:
        return masks
    candidates = []
    if not leaf.is_floating_point():
        candidates += _entries("labels", keys, values.paddings, shifts)
    # Numbers such as the lengths or the weights of samples, which are never negative.
    may_be_counts = leaf.is_floating_point() or leaf.ndim == 1
    if may_be_counts and values.least >= 0:
        candidates.append(Weighting(kind="total", keys=keys))
    return candidates


def _possible_shifts(leaf: torch.Tensor, size: int) -> list[int]:
    """Return the possible values of `Weighting.shifted` for a tensor."""
    shifts = [-1]
    if leaf.ndim == 2:
        # The tensor may contain next-token labels along the dimension that is not the batch.
        shifts.append(1 if leaf.shape[0] == size else 0)
    return shifts


@dataclass(frozen=True, slots=True, kw_only=True)
class _Values:
    """What the values of a tensor show about its meaning."""

    # The smallest value.
    least: float
    # Whether there are no other values than 0 and 1.
    are_zeros_and_ones: bool
    # The integers that may be padding. Empty for a floating-point tensor.
    paddings: list[int]


def _read_values(leaf: torch.Tensor) -> _Values:
    """Examine the values of a tensor. This synchronizes with the device once."""
    facts = [leaf.min(), ((leaf != 0) & (leaf != 1)).any()]
    if not leaf.is_floating_point():
        facts += [(leaf == padding).any() for padding in _PADDINGS]
        facts += _row_ends(leaf)
    least, has_other_values, *others = torch.stack(
        [fact.to(torch.float64) for fact in facts]
    ).tolist()
    is_present = others[: len(_PADDINGS)]
    row_ends = others[len(_PADDINGS) :]
    paddings = [padding for padding, present in zip(_PADDINGS, is_present, strict=False) if present]
    paddings += [
        int(value)
        for value, share in zip(row_ends[::2], row_ends[1::2], strict=True)
        if share >= _HALF
    ]
    return _Values(
        least=least,
        are_zeros_and_ones=not has_other_values,
        paddings=list(dict.fromkeys(paddings)),
    )


def _row_ends(leaf: torch.Tensor) -> list[torch.Tensor]:
    """Return the most frequent value at the end of a row, and its share of the rows.

    There is one such pair for each dimension along which the rows may be. A tensor with one
    dimension has no rows.
    """
    if leaf.ndim < 2:
        return []
    facts = []
    for dimension in range(leaf.ndim):
        ends = leaf.select(dimension, -1).flatten()
        most_frequent = ends.mode().values
        facts += [most_frequent, (ends == most_frequent).to(torch.float64).mean()]
    return facts


def _entries(
    kind: Kind, keys: Keys, ignored: Iterable[int], shifts: Iterable[int]
) -> list[Weighting]:
    return [
        Weighting(kind=kind, keys=keys, ignored=value, shifted=shifted)
        for value in ignored
        for shifted in shifts
    ]


def shares(weighting: Weighting, parts: Sequence[tuple[Any, int]]) -> tuple[float, ...] | None:
    """Return each part's share of the total weight, or None if the total is 0."""
    try:
        counts = [float(weighting.count(part, samples)) for part, samples in parts]
    except BatchError:
        return None
    total = 1.0 if weighting.kind == "sum" else sum(counts)
    return tuple(count / total for count in counts) if total > 0 else None


def with_an_empty_one(
    weighting: Weighting, parts: Sequence[tuple[Any, int]], max_parts: int
) -> list[int]:
    """Choose some parts, the last of which has weight 0, and return their positions.

    Args:
        weighting: What the mean of the loss is taken over.
        parts: The parts, with the number of samples in each.
        max_parts: The maximum number of positions to return.

    Returns:
        The positions, or an empty list if no part has weight 0.
    """
    weights = shares(weighting, parts) or ()
    if 0.0 not in weights:
        return []
    others = [position for position, weight in enumerate(weights) if weight]
    # Leave one position for the part with weight 0.
    return [*others[: max_parts - 1], weights.index(0.0)]


def disagreement(weightings: Sequence[Weighting], parts: Sequence[tuple[Any, int]]) -> float:
    """Return the largest difference between the weights that two weightings give to a part.

    The result is between 0 and 1. Sums are left out, since they always differ from means.
    """
    all_weights = [shares(weighting, parts) for weighting in weightings if weighting.kind != "sum"]
    by_part = zip(*(weights for weights in all_weights if weights is not None), strict=True)
    return max((max(weights) - min(weights) for weights in by_part), default=0.0)


def _nodes(node: Any, keys: Keys) -> Iterator[tuple[Keys, torch.Tensor]]:
    """Yield the tensors of a batch with their paths."""
    if isinstance(node, torch.Tensor):
        yield keys, node
        return
    for key, child in (children_of(node) or {}).items():
        if isinstance(key, (str, int)):
            yield from _nodes(child, (*keys, key))


def _follow(node: Any, keys: Keys) -> Any:
    for key in keys:
        node = (children_of(node) or {}).get(key)
    return node
