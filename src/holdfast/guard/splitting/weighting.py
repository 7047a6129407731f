"""What the mean of a bare loss may be over.

Candidates found in the batch, and how much of each a part holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from holdfast.core.containers import children_of
from holdfast.core.errors import BatchError

# torch's ignore_index; -1 and 0 are the other common paddings. A value at half of all row ends is
# looked at too.
_PADDINGS = (-100, -1, 0)
_HALF = 0.5
Keys: TypeAlias = tuple[str | int, ...]
Kind: TypeAlias = Literal["samples", "labels", "mask", "total", "sum"]
_ORDER: tuple[Kind, ...] = ("samples", "labels", "mask", "total", "sum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighting:
    """One thing that a mean may be over.

    ``"samples"``; ``"labels"`` or ``"mask"``: entries of a tensor that are not `ignored`;
    ``"total"``: the sum of a tensor, such as lengths or weights; ``"sum"``: the loss is a sum, so
    parts are added as they are.
    """

    kind: Kind
    keys: Keys = ()  # way to the tensor in the batch
    ignored: int = 0  # entry that does not count
    # Dimension whose first entries do not count either, as of labels for the next token; -1: none
    shifted: int = -1

    def rank(self) -> int:
        """Return the place of its kind among the kinds, the most usual first."""
        return _ORDER.index(self.kind)

    def __str__(self) -> str:
        leaf = "batch" + "".join(f"[{key!r}]" for key in self.keys)
        leaf += " without the first of each row" if self.shifted >= 0 else ""
        return {
            "samples": "samples",
            "labels": f"valid labels of {leaf} (not {self.ignored})",
            "mask": f"entries of the mask {leaf} (not {self.ignored})",
            "total": f"sum of {leaf}",
            "sum": "a sum, not a mean",
        }[self.kind]

    def count(self, part: Any, samples: int) -> float | torch.Tensor:
        """Return how much of it a part holds; on a device as a tensor, without a sync."""
        if self.kind in ("samples", "sum"):
            return samples if self.kind == "samples" else 1
        leaf: Any = _follow(part, self.keys)
        if not isinstance(leaf, torch.Tensor) or self.shifted >= leaf.ndim:
            raise BatchError(
                f"the loss was found to be a mean over {self}, which this batch does not hold",
                limit="parts of a batch are weighted by what the mean is over",
                fix="return Loss(mean, items), which does not depend on the form of the batch.",
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
    """Return what the mean of a loss may be over, the most usual first.

    Cost: for a tensor of integers or a mask on a device, one host sync.
    """
    found = [SAMPLES, Weighting(kind="sum")]
    for keys, node in _nodes(batch, ()):
        if (
            _is_plain(node)
            and size in node.shape
            and not (node.is_floating_point() and node.ndim > 2)
        ):
            found += _of_tensor(keys, node.detach(), size)
    return sorted(found, key=Weighting.rank)


def _is_plain(leaf: torch.Tensor) -> bool:
    return (
        not leaf.is_nested
        and leaf.layout is torch.strided
        and not leaf.is_complex()
        and leaf.numel() > 0
    )


def _of_tensor(keys: Keys, leaf: torch.Tensor, size: int) -> list[Weighting]:
    shifts = [-1] if leaf.ndim != 2 else [-1, 1 if leaf.shape[0] == size else 0]
    if leaf.dtype == torch.bool:
        return _entries("mask", keys, (0, 1), shifts)
    facts = [leaf.min(), ((leaf != 0) & (leaf != 1)).any()]
    if leaf.is_floating_point():
        least, more_than_mask = torch.stack([fact.to(torch.float64) for fact in facts]).tolist()
        if not more_than_mask:
            return _entries("mask", keys, (0, 1), shifts)
        return [Weighting(kind="total", keys=keys)] if least >= 0 else []
    facts += [(leaf == padding).any() for padding in _PADDINGS]
    for dimension in range(leaf.ndim if leaf.ndim > 1 else 0):
        ends = leaf.select(dimension, -1).flatten()
        most = ends.mode().values
        facts += [most, (ends == most).to(torch.float64).mean()]
    least, more_than_mask, *others = torch.stack(
        [fact.to(torch.float64) for fact in facts]
    ).tolist()
    if not more_than_mask:
        return _entries("mask", keys, (0, 1), shifts)
    ignored = [padding for padding, there in zip(_PADDINGS, others, strict=False) if there]
    row_ends = others[len(_PADDINGS) :]
    ignored += [
        int(value)
        for value, share in zip(row_ends[::2], row_ends[1::2], strict=True)
        if share >= _HALF
    ]
    lengths = [Weighting(kind="total", keys=keys)] if least >= 0 and leaf.ndim == 1 else []
    return _entries("labels", keys, dict.fromkeys(ignored), shifts) + lengths


def _entries(
    kind: Kind, keys: Keys, ignored: Iterable[int], shifts: Iterable[int]
) -> list[Weighting]:
    return [
        Weighting(kind=kind, keys=keys, ignored=value, shifted=shifted)
        for value in ignored
        for shifted in shifts
    ]


def shares(weighting: Weighting, parts: Sequence[tuple[Any, int]]) -> tuple[float, ...] | None:
    """Return the weight of each part.

    None where the parts hold nothing of it, or not the tensor.
    """
    try:
        counts = [float(weighting.count(part, samples)) for part, samples in parts]
    except BatchError:
        return None
    total = 1.0 if weighting.kind == "sum" else sum(counts)
    return tuple(count / total for count in counts) if total > 0 else None


def with_an_empty_one(
    weighting: Weighting, parts: Sequence[tuple[Any, int]], most: int
) -> list[int]:
    """Return the numbers of at most so many parts, the last of which holds nothing of this.

    None if all hold some.
    """
    weights = shares(weighting, parts) or ()
    if 0.0 not in weights:
        return []
    return [
        *[number for number, weight in enumerate(weights) if weight][: most - 1],
        weights.index(0.0),
    ]


def disagreement(weightings: Sequence[Weighting], parts: Sequence[tuple[Any, int]]) -> float:
    """Return how far weightings differ in the weight of any part: 0 to 1.

    A sum always differs, and is left out.
    """
    found = [shares(weighting, parts) for weighting in weightings if weighting.kind != "sum"]
    columns = zip(*(weights for weights in found if weights is not None), strict=True)
    return max((max(column) - min(column) for column in columns), default=0.0)


def _nodes(node: Any, keys: Keys) -> Iterator[tuple[Keys, torch.Tensor]]:
    """Yield the tensors of a batch with the way to them."""
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
