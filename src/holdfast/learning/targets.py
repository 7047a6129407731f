"""Learn from a loss's targets: the loss of the best constant prediction, and shuffling.

A model that does no better than the best constant has learnt nothing from its inputs.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TypeAlias

import torch
from torch import Tensor

from holdfast.learning.loss_functions import BINARY_LOSSES, CLASS_LOSSES
from holdfast.learning.measures import append_newest, median

# How many labels of a batch are counted.
MAX_LABELS = 65_536
# Targets with more columns than this share one mean; otherwise each column has its own.
MAX_COLUMNS = 4096
# Keeps the logarithm of a mean target finite.
EPSILON = 1e-12
# How many batches are needed to trust the mean deviation from the batch's median.
MIN_DEVIATIONS = 10


class ConstantClassShares:
    """For class labels: predict the share of each class. Its loss is the entropy of the labels."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def takes(self, target: Tensor) -> bool:
        """Return whether targets are class labels; class probabilities have no known constant."""
        return not (target.is_floating_point() or target.dtype.is_complex)

    def add(self, labels: list[int]) -> float | None:
        """Count the labels of a batch; return their loss under the shares counted so far."""
        counts = Counter(labels)
        if not counts:
            return None
        self._counts.update(counts)
        total = self._counts.total()
        log_likelihood = sum(
            count * math.log(self._counts[label] / total) for label, count in counts.items()
        )
        return -log_likelihood / counts.total()

    def loss(self) -> float | None:
        """Return the entropy of all labels."""
        total = self._counts.total()
        if total == 0:
            return None
        shares = [count / total for count in self._counts.values()]
        return -sum(share * math.log(share) for share in shares)


class ConstantMean:
    """For squared errors: predict the mean of each column. Its loss is the variance."""

    def __init__(self) -> None:
        self._moments = Moments()

    def takes(self, target: Tensor) -> bool:
        """Return whether targets are real numbers."""
        return not target.dtype.is_complex

    def add(self, target: Tensor) -> float | None:
        """Add targets; return the mean squared distance from the mean so far."""
        columns = self._moments.add(target)
        if columns is None:
            return None
        return float((columns - self._moments.mean()).square().mean())

    def loss(self) -> float | None:
        """Return the variance of all targets."""
        if not self._moments.known:
            return None
        return float(self._moments.variance().mean())

    def mean_square(self) -> float | None:
        """Return the loss of predicting 0."""
        if not self._moments.known:
            return None
        return float(self._moments.mean_square().mean())


class ConstantProbability:
    """For binary targets: predict the mean of each column. Its loss is the binary entropy."""

    def __init__(self) -> None:
        self._moments = Moments()

    def takes(self, target: Tensor) -> bool:
        """Return whether targets are real numbers."""
        return not target.dtype.is_complex

    def add(self, target: Tensor) -> float | None:
        """Add targets; return their loss under the mean so far."""
        columns = self._moments.add(target)
        if columns is None:
            return None
        return self._cross_entropy(columns)

    def loss(self) -> float | None:
        """Return the binary entropy of the mean of all targets."""
        if not self._moments.known:
            return None
        return self._cross_entropy(self._moments.mean())

    def _cross_entropy(self, targets: Tensor) -> float:
        probability = self._moments.mean().clamp(EPSILON, 1 - EPSILON)
        likelihood = targets * probability.log() + (1 - targets) * (1 - probability).log()
        return -float(likelihood.mean())


class ConstantMedian:
    """For absolute errors: predict the median of each batch, by column."""

    def __init__(self) -> None:
        self._deviations: list[float] = []

    def takes(self, target: Tensor) -> bool:
        """Return whether targets are real numbers."""
        return not target.dtype.is_complex

    def add(self, target: Tensor) -> None:
        """Add the mean deviation of a batch from its own median, which no constant could beat."""
        columns = columns_of(target)
        if columns.shape[1] > MAX_COLUMNS:
            columns = columns.reshape(-1, 1)
        self._deviations.append(float((columns - columns.median(0).values).abs().mean()))

    def loss(self) -> float | None:
        """Return the mean deviation over all batches."""
        if len(self._deviations) < MIN_DEVIATIONS:
            return None
        return sum(self._deviations) / len(self._deviations)


BestConstant: TypeAlias = ConstantClassShares | ConstantMean | ConstantProbability | ConstantMedian


def best_constant_for(function: str) -> BestConstant | None:
    """Return the best-constant estimator for a loss function, or None if none is known."""
    if function in CLASS_LOSSES:
        return ConstantClassShares()
    if function in BINARY_LOSSES:
        return ConstantProbability()
    if function == "mse_loss":
        return ConstantMean()
    if function == "l1_loss":
        return ConstantMedian()
    return None


class Moments:
    """Running mean and mean square of targets, by column."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._squares: Tensor | None = None
        self._rows = 0
        self._fits = True

    @property
    def known(self) -> bool:
        """Whether there were enough targets, all with the same number of columns."""
        return self._fits and self._rows >= 2

    def add(self, target: Tensor) -> Tensor | None:
        """Add targets; return them as ``(rows, columns)``, or None if the width has changed."""
        columns = columns_of(target)
        other_width = self._sums is not None and columns.shape[1] != self._sums.shape[0]
        if columns.shape[1] > MAX_COLUMNS or other_width:
            columns = columns.reshape(-1, 1)
        sums = columns.sum(0)
        if self._sums is None or self._squares is None:
            self._sums = torch.zeros_like(sums)
            self._squares = torch.zeros_like(sums)
        if sums.shape != self._sums.shape:
            self._fits = False
            return None
        self._sums = self._sums + sums
        self._squares = self._squares + columns.square().sum(0)
        self._rows += columns.shape[0]
        return columns

    def mean(self) -> Tensor:
        """Return the mean of each column."""
        assert self._sums is not None
        return self._sums / self._rows

    def mean_square(self) -> Tensor:
        """Return the mean square of each column."""
        assert self._squares is not None
        return self._squares / self._rows

    def variance(self) -> Tensor:
        """Return the variance of each column."""
        return self.mean_square() - self.mean().square()


class LabelMix:
    """How many distinct labels batches hold, and how many shuffled data would give."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()
        self._sizes: list[int] = []
        self._different: list[int] = []

    def add(self, labels: list[float] | list[int]) -> None:
        """Add the labels of a batch."""
        self._counts.update(labels)
        append_newest(self._sizes, len(labels))
        append_newest(self._different, len(set(labels)))

    @property
    def batches(self) -> int:
        """How many batches are remembered."""
        return len(self._sizes)

    def mean_different(self) -> float | None:
        """Return the mean number of distinct labels in a batch."""
        if not self._different:
            return None
        return sum(self._different) / len(self._different)

    def expected_different(self) -> float | None:
        """Return the expected number of distinct labels in a shuffled batch of the usual size."""
        total = self._counts.total()
        if total == 0:
            return None
        size = median(self._sizes)
        shares = [count / total for count in self._counts.values()]
        return float(sum(1 - (1 - share) ** size for share in shares))


def labels_in(target: Tensor, ignore_index: int) -> list[int]:
    """Return the class labels of a batch, without those that the loss ignores; one host sync."""
    labels: list[int] = target.detach().reshape(-1)[:MAX_LABELS].tolist()
    return [label for label in labels if label != ignore_index]


def binary_labels_in(target: Tensor) -> list[float] | None:
    """Return targets as labels, or None if any is neither 0 nor 1; one host sync."""
    labels: list[float] = target.detach().reshape(-1)[:MAX_LABELS].tolist()
    if all(label in (0, 1) for label in labels):
        return labels
    return None


def columns_of(target: Tensor) -> Tensor:
    """Return targets as float64 on the CPU, shape ``(rows, columns)``."""
    values = target.detach()
    rows = values.shape[0] if values.dim() else 1
    return values.reshape(rows, -1).double().cpu()
