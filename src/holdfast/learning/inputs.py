"""Measure a model's inputs: their scale, and whether they contain NaN or Inf.

This module only takes measurements, in sampled steps. The rules interpret them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from holdfast.learning.measures import append_newest, median_or_none, sample_of
from holdfast.learning.observations import ObservedInput

# Maximum number of tensors examined per batch.
MAX_TENSORS = 8
# Number of elements of a batch from which its scale is measured.
SCALE_SAMPLE_ELEMENTS = 1024


def tensors_in(tree: Any) -> list[Tensor]:
    """Return up to `MAX_TENSORS` dense tensors that are not empty from a nested structure."""
    # Most calls pass only tensors, so there is no nested structure to flatten.
    only_tensors = type(tree) is tuple and all(type(leaf) is Tensor for leaf in tree)
    leaves = tree if only_tensors else pytree.tree_leaves(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
    dense = [
        tensor for tensor in tensors if not (tensor.is_sparse or tensor.is_meta or tensor.is_nested)
    ]
    return dense[:MAX_TENSORS]


class InputObserver:
    """Observes the inputs of one model in sampled steps."""

    def __init__(self) -> None:
        self._observed = ObservedInput()
        self._magnitudes: list[float] = []
        self._offsets: list[float] = []

    def note_arguments(self, tree: Any, *, examine: bool = True) -> None:
        """Count a forward call, and check the tensors among its arguments for NaN and Inf.

        Args:
            tree: The arguments, as a nested structure.
            examine: Whether to also record the scale of the largest tensor.
        """
        self._observed.calls += 1
        tensors = tensors_in(tree)
        if not tensors:
            return
        # A tensor that requires a gradient was computed by a model, so it is not input data.
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
        # Record a sample's largest magnitude, and its mean relative to its standard deviation.
        statistics = torch.stack([sample.mean(), sample.std(correction=0), sample.abs().max()])
        mean, spread, magnitude = statistics.tolist()
        append_newest(self._magnitudes, magnitude)
        if spread == 0:
            self._observed.flat += 1
            append_newest(self._offsets, math.inf)
        else:
            append_newest(self._offsets, abs(mean) / spread)

    def observations(self) -> ObservedInput:
        """Return all observations of the model's inputs, with updated medians."""
        self._observed.largest = median_or_none(self._magnitudes)
        self._observed.offset = median_or_none(self._offsets)
        return self._observed


def _has_nan_or_plus_infinity(tensor: Tensor) -> bool:
    """Return whether a tensor contains NaN or +Inf. -Inf is allowed, as it is common in masks."""
    # Computing the sum is cheap. Check each element only if the sum is not finite.
    if math.isfinite(float(tensor.sum())):
        return False
    return bool((tensor.isnan() | (tensor == math.inf)).any())
