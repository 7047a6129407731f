"""Measure a model's inputs: their scale, and whether they contain NaN or Inf.

This module only takes measurements, in sampled steps. The rules interpret them.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from holdfast.learning.measurements import Measurements
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

    def measure_arguments(
        self, measurements: Measurements, tree: Any, *, examine: bool = True
    ) -> None:
        """Count a forward call, and check the tensors among its arguments for NaN and Inf.

        Args:
            measurements: The measurements of the step.
            tree: The arguments, as a nested structure.
            examine: Whether to also measure the scale of the largest tensor.
        """
        tensors = tensors_in(tree)
        is_examined = examine and bool(tensors)
        measurements.add(partial(self._note_call, is_examined=is_examined))
        # A tensor that requires a gradient was computed by a model, so it is not input data.
        data = [
            tensor.detach()
            for tensor in tensors
            if tensor.is_floating_point() and not tensor.requires_grad
        ]
        if not data:
            return
        # The maximum of a tensor that contains NaN is NaN.
        measurements.add(self._note_maxima, *[tensor.amax() for tensor in data])
        if examine:
            largest = max(data, key=Tensor.numel)
            measurements.add(self._note_scale, _scale_of(largest))

    def _note_call(self, *, is_examined: bool) -> None:
        self._observed.calls += 1
        self._observed.examined += is_examined

    def _note_maxima(self, *maxima: Tensor) -> None:
        # -Inf is allowed, because it is common in masks.
        self._observed.nonfinite += any(
            math.isnan(maximum) or maximum == math.inf for maximum in map(float, maxima)
        )

    def _note_scale(self, scale: Tensor) -> None:
        # Record a sample's largest magnitude, and its mean relative to its standard deviation.
        mean, spread, magnitude = scale.tolist()
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


def _scale_of(tensor: Tensor) -> Tensor:
    """Return the mean, standard deviation and largest magnitude of a sample, shape ``(3,)``."""
    sample = sample_of(tensor, SCALE_SAMPLE_ELEMENTS).double()
    return torch.stack([sample.mean(), sample.std(correction=0), sample.abs().max()])
