"""Measure a model's inputs: their scale, and NaN or Inf in them.

This module only measures, in sampled steps; the rules judge what a number means.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from holdfast.learning.measures import append_newest, median_or_none, sample_of
from holdfast.learning.observations import ObservedInput

# How many tensors of a batch are examined.
MAX_TENSORS = 8
# How many elements of a batch its scale is measured from.
SCALE_SAMPLE_ELEMENTS = 1024


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the first non-empty, dense tensors in a nested structure of arguments."""
    # Most calls pass only tensors, so no search is needed.
    only_tensors = type(tree) is tuple and all(type(leaf) is Tensor for leaf in tree)
    leaves = tree if only_tensors else pytree.tree_leaves(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
    dense = [
        tensor for tensor in tensors if not (tensor.is_sparse or tensor.is_meta or tensor.is_nested)
    ]
    return dense[:MAX_TENSORS]


class InputObserver:
    """The inputs of one model in the sampled steps."""

    def __init__(self) -> None:
        self._observed = ObservedInput()
        self._magnitudes: list[float] = []
        self._offsets: list[float] = []

    def note_arguments(self, tree: Any, *, examine: bool = True) -> None:
        """Record the arguments of a training call and, if they are examined, their scale."""
        self._observed.calls += 1
        tensors = tensors_in(tree)
        if not tensors:
            return
        # A tensor that requires a gradient was computed by a model, so it is not data.
        data = [
            tensor.detach()
            for tensor in tensors
            if tensor.is_floating_point() and not tensor.requires_grad
        ]
        self._observed.nonfinite += any(_has_nan_or_plus_infinity(tensor) for tensor in data)
        if not examine:
            return
        self._observed.examined += 1
        if data:
            largest = max(data, key=Tensor.numel)
            self._note_scale(sample_of(largest, SCALE_SAMPLE_ELEMENTS).double())

    def _note_scale(self, sample: Tensor) -> None:
        statistics = torch.stack([sample.mean(), sample.std(correction=0), sample.abs().max()])
        mean, spread, magnitude = statistics.tolist()
        append_newest(self._magnitudes, magnitude)
        if spread == 0:
            self._observed.flat += 1
            append_newest(self._offsets, math.inf)
        else:
            append_newest(self._offsets, abs(mean) / spread)

    def observations(self) -> ObservedInput:
        """Return what was observed, with all medians up to date."""
        self._observed.largest = median_or_none(self._magnitudes)
        self._observed.offset = median_or_none(self._offsets)
        return self._observed


def _has_nan_or_plus_infinity(tensor: Tensor) -> bool:
    """Return whether data holds NaN or plus infinity; minus infinity is common in masks."""
    # A sum is one cheap pass. Elements are compared only if the sum is not finite.
    if math.isfinite(float(tensor.sum())):
        return False
    return bool((tensor.isnan() | (tensor == math.inf)).any())
