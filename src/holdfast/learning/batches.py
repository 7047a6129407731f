"""What a model is fed with and what it answers: fingerprints, scale, constant inputs, outputs without difference.

Only measures, in sampled steps; what a number means is judged by the rules in ``diagnose``.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from holdfast.learning.flow import median, sample_of

_MOST_TENSORS = 8
_KEPT = 400


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the first tensors of any structure that hold something."""
    found = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.numel()]
    return [t for t in found if not (t.is_sparse or t.is_meta or t.is_nested)][:_MOST_TENSORS]


def fingerprint(tensor: Tensor) -> int:
    """Return a checksum of the shape and of at most 4096 elements, equal for equal contents; one host sync."""
    raw = sample_of(tensor).cpu().contiguous()
    return zlib.crc32(raw.view(torch.uint8).numpy().tobytes(), zlib.crc32(str(tuple(tensor.shape)).encode()))


class Inputs:
    """What one model was given and gave back, over the observed steps."""

    def __init__(self) -> None:
        self.calls = 0
        self._counts: Counter[str] = Counter()
        self._prints: list[tuple[int, bool, bool]] = []  # of what, new from a loader, no step left out before it
        self._step, self._follows = 0, False
        self._batch = self._largest_batch = 0
        self._scales: list[float] = []
        self._offsets: list[float] = []
        self._varied = False
        self._first_of_step = True

    def begin_step(self, number: int) -> None:
        """Start a step: only its first batch is compared with those of others, since a step may use one twice.

        Args:
            number: Of the step, also counting those that are not observed; the same again for another attempt.
        """
        if number != self._step:
            self._first_of_step, self._follows, self._step = True, number == self._step + 1, number

    def given(self, tree: Any, *, loaded: bool = True) -> None:
        """Add the arguments of a forward call in training.

        Args:
            tree: The arguments.
            loaded: Whether a loader has handed out a batch since the last step.
        """
        found = tensors_in(tree)
        self.calls += 1
        self._varied = False
        if not found:
            return
        largest = max(found, key=Tensor.numel)
        self._batch = largest.shape[0] if largest.dim() else 0
        self._largest_batch = max(self._largest_batch, self._batch)
        if self._first_of_step:
            self._prints.append((hash(tuple(fingerprint(tensor) for tensor in found)), loaded, self._follows))
            del self._prints[:-_KEPT]
            self._first_of_step = False
        rows = [t for t in found if t.dim() >= 1 and t.shape[0] == self._batch > 1]
        self._varied = any(not _rows_equal(t) for t in rows)
        self._counts["constant"] += bool(rows) and not self._varied and all(t.dim() >= 2 for t in rows)
        self._look_at(found)

    def _look_at(self, found: list[Tensor]) -> None:
        real = [t.detach() for t in found if t.is_floating_point() and not t.requires_grad]
        if not real:
            return
        seen = [sample_of(t).double() for t in real]
        numbers = torch.stack([torch.stack([x.mean(), x.std(correction=0), x.abs().max()]) for x in seen]).tolist()
        # Minus infinity is what masks are made of; NaN and plus infinity are not.
        bad = any(not math.isfinite(most) and _nonfinite(t) for (_, _, most), t in zip(numbers, real, strict=True))
        self._counts["nonfinite"] += bad
        wide = max(range(len(real)), key=lambda i: real[i].numel())
        mean, spread, most = numbers[wide]
        self._counts["flat"] += spread == 0
        _append(self._scales, most)
        _append(self._offsets, abs(mean) / spread if spread > 0 else math.inf)

    def answered(self, tree: Any) -> None:
        """Add what the forward call returned."""
        found = [t.detach() for t in tensors_in(tree) if t.is_floating_point()]
        if not (found and self._varied):
            return
        answers = [t for t in found if t.dim() >= 1 and t.shape[0] == self._batch > 1]
        if answers:
            self._counts["answers"] += 1
            self._counts["same_answers"] += all(_rows_equal(t, 1e-6) for t in answers)

    def facts(self) -> dict[str, Any]:
        """Return what was seen, as plain data."""
        prints = [seen for seen, _, _ in self._prints]
        last: int | None = None
        compared: list[bool] = []  # a batch of a loader with that before it, where no step between was left out
        for seen, loaded, follows in self._prints:
            last = last if follows else None
            if loaded:
                compared += [] if last is None else [seen == last]
                last = seen
        return {
            "calls": self.calls,
            "batch": self._batch,
            "largest_batch": self._largest_batch,
            "different": len(set(prints)),
            "fingerprints": len(prints),
            "longest_repeat": max((len(list(run)) for _, run in groupby(prints)), default=0),
            "compared_pairs": len(compared),
            "repeated_pairs": sum(compared),
            "constant": self._counts["constant"],
            "flat": self._counts["flat"],
            "nonfinite": self._counts["nonfinite"],
            "largest": median(self._scales),
            "offset": median(self._offsets),
            "answers": self._counts["answers"],
            "same_answers": self._counts["same_answers"],
        }


def _append(values: list[float], value: float) -> None:
    values.append(value)
    del values[:-_KEPT]


def _nonfinite(tensor: Tensor) -> bool:
    return bool((tensor.isnan() | (tensor == math.inf)).any())


def _rows_equal(tensor: Tensor, relative: float = 0.0) -> bool:
    rows = tensor.detach()[:64].reshape(min(64, tensor.shape[0]), -1)[:, :_KEPT]
    if relative == 0.0:
        return bool((rows == rows[:1]).all())
    rows = rows.float()
    return bool((rows - rows[:1]).abs().max() <= relative * (rows.abs().max() + 1e-12))
