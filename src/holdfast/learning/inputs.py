"""What a model is fed with and what it answers.

Fingerprints, scale, constant inputs, outputs without difference.

Only measures, in sampled steps; rules judge what a number means.
"""

from __future__ import annotations

import math
import zlib
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from holdfast.learning.facts import InputFacts
from holdfast.learning.measures import append_newest, median, spread_of

_MOST_TENSORS = 8
_KEPT = 400


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the first tensors of any structure that hold something."""
    # The usual arguments
    plain = type(tree) is tuple and all(type(leaf) is Tensor for leaf in tree)
    found = [
        t
        for t in (tree if plain else pytree.tree_leaves(tree))
        if isinstance(t, Tensor) and t.numel()
    ]
    return [t for t in found if not (t.is_sparse or t.is_meta or t.is_nested)][:_MOST_TENSORS]


def fingerprint(tensor: Tensor) -> int:
    """Return a checksum of the shape and of at most 4096 elements, equal for equal contents.

    One host sync.
    """
    raw = spread_of(tensor).cpu().contiguous()
    return zlib.crc32(
        raw.view(torch.uint8).numpy().tobytes(), zlib.crc32(str(tuple(tensor.shape)).encode())
    )


class InputObserver:
    """What one model was given and gave back, over the observed steps."""

    def __init__(self) -> None:
        self._facts = InputFacts()
        self._prints: list[int] = []
        self._step, self._first_of_step = 0, True
        self._scales: list[float] = []
        self._offsets: list[float] = []
        self._varied = False

    def begin_step(self, number: int) -> None:
        """Start a step: only its first batch is compared with those of others, since a step may use
        one twice.

        Another attempt has the same number again.
        """
        if number != self._step:
            self._first_of_step, self._step = True, number

    def note_arguments(self, tree: Any, *, closely: bool = True) -> None:
        """Add the arguments of a call in training; `closely`: their values too."""
        facts, found = self._facts, tensors_in(tree)
        facts.calls += 1
        self._varied = False
        if not found:
            return
        largest = max(found, key=Tensor.numel)
        facts.batch = largest.shape[0] if largest.dim() else 0
        facts.largest_batch = max(facts.largest_batch, facts.batch)
        if self._first_of_step:
            append_newest(self._prints, hash(tuple(fingerprint(tensor) for tensor in found)))
            self._first_of_step = False
        real = [t.detach() for t in found if t.is_floating_point() and not t.requires_grad]
        # Minus infinity is what masks are made of; NaN and plus infinity are not.
        facts.nonfinite += any(
            not math.isfinite(float(t.sum())) and bool((t.isnan() | (t == math.inf)).any())
            for t in real
        )
        if not closely:
            return
        facts.examined += 1
        rows = [t for t in found if t.dim() >= 1 and t.shape[0] == facts.batch > 1]
        self._varied = any(not _rows_equal(t) for t in rows)
        facts.constant += bool(rows) and not self._varied and all(t.dim() >= 2 for t in rows)
        if real:
            self._note_scale(spread_of(max(real, key=Tensor.numel), 1024).double())

    def _note_scale(self, sample: Tensor) -> None:
        mean, spread, most = torch.stack(
            [sample.mean(), sample.std(correction=0), sample.abs().max()]
        ).tolist()
        self._facts.flat += spread == 0
        append_newest(self._scales, most)
        append_newest(self._offsets, abs(mean) / spread if spread > 0 else math.inf)

    def note_answer(self, tree: Any) -> None:
        """Add what the forward call returned."""
        answers = [
            t.detach()
            for t in tensors_in(tree)
            if t.is_floating_point() and t.dim() >= 1 and t.shape[0] == self._facts.batch > 1
        ]
        if self._varied and answers:
            self._facts.answers += 1
            self._facts.same_answers += all(_rows_equal(t, 1e-6) for t in answers)

    def facts(self, *, windows: bool = True) -> InputFacts:
        """Return what was seen; without `windows` only what was counted."""
        facts, prints = self._facts, self._prints
        if not windows:
            return facts
        facts.fingerprints, facts.different = len(prints), len(set(prints))
        facts.longest_repeat = max((len(list(run)) for _, run in groupby(prints)), default=0)
        facts.largest, facts.offset = median(self._scales), median(self._offsets)
        return facts


def _rows_equal(tensor: Tensor, relative: float = 0.0) -> bool:
    rows = tensor.detach()[:64].reshape(min(64, tensor.shape[0]), -1)[:, :_KEPT]
    if relative == 0.0:
        return torch.equal(rows[0], rows[-1]) and bool((rows == rows[:1]).all())
    rows = rows.float()
    return bool((rows - rows[:1]).abs().max() <= relative * (rows.abs().max() + 1e-12))
