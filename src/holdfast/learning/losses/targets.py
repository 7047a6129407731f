"""Measure the targets of a loss: the loss of the best constant prediction, and the mix of labels.

A model that is no better than the best constant prediction has learned nothing from its inputs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from holdfast.learning.losses.loss_functions import BINARY_LOSSES, CLASS_LOSSES
from holdfast.learning.measures import append_newest, median

# Maximum number of labels counted per batch.
MAX_LABELS = 65_536
# Maximum number of columns that each have their own mean. With more columns, all targets share one.
MAX_COLUMNS = 4096
# Lower bound that keeps the logarithm of a mean target finite.
EPSILON = 1e-12
# Minimum number of batches for a reliable mean deviation from the batch median.
MIN_DEVIATIONS = 10


class ConstantClassShares:
    """The best constant prediction for class labels: the share of each class among all labels."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()

    def add(self, labels: list[int]) -> float | None:
        """Add a batch's labels, and return the loss of predicting the current shares for it."""
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
        """Return the loss on all labels, which is the entropy of the class shares."""
        total = self._counts.total()
        if total == 0:
            return None
        shares = [count / total for count in self._counts.values()]
        return -sum(share * math.log(share) for share in shares)


class ConstantMean:
    """The best constant prediction for squared errors and binary targets: each column's mean.

    Its loss can be computed from the mean and the mean square of the targets.

    Args:
        loss_of: `squared_error` or `binary_cross_entropy`.
    """

    def __init__(self, loss_of: MeanLoss) -> None:
        self._loss_of = loss_of
        # The sum of each column over all batches. Empty before the first batch.
        self._sum = torch.zeros(0, device="cpu")
        self._sum_of_squares = torch.zeros(0, device="cpu")
        self._rows = 0
        # False once a batch had a different number of columns.
        self._has_one_width = True

    def measure(self, target: Tensor) -> Tensor:
        """Return each column's number of rows, sum, and sum of squares, shape ``(3, columns)``."""
        columns = columns_of(target)
        sums = columns.sum(0)
        return torch.stack([torch.full_like(sums, len(columns)), sums, columns.square().sum(0)])

    def add(self, measured: Tensor) -> float | None:
        """Add a batch's targets, and return the loss of predicting the current mean for it.

        Returns None if the number of columns has changed.

        Args:
            measured: What `measure` has returned, as a CPU tensor.
        """
        rows = int(measured[0, 0])
        sums, sums_of_squares = measured[1:]
        if self._rows == 0:
            self._sum = torch.zeros_like(sums)
            self._sum_of_squares = torch.zeros_like(sums)
        if len(sums) != len(self._sum):
            self._has_one_width = False
            return None
        self._sum += sums
        self._sum_of_squares += sums_of_squares
        self._rows += rows
        prediction = self._sum / self._rows
        return float(self._loss_of(prediction, sums / rows, sums_of_squares / rows).mean())

    def loss(self) -> float | None:
        """Return the loss on all targets, or None if it is unknown."""
        if not self._is_known:
            return None
        mean = self._sum / self._rows
        mean_square = self._sum_of_squares / self._rows
        return float(self._loss_of(mean, mean, mean_square).mean())

    def mean_square(self) -> float | None:
        """Return the mean square of all targets, which is the squared error of predicting 0."""
        if not self._is_known:
            return None
        return float((self._sum_of_squares / self._rows).mean())

    @property
    def _is_known(self) -> bool:
        return self._has_one_width and self._rows >= 2


# Takes a constant prediction, and the mean and the mean square of the targets, each with one value
# per column. Returns the loss of each column.
MeanLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def squared_error(prediction: Tensor, mean: Tensor, mean_square: Tensor) -> Tensor:
    """Return the mean of ``(target - prediction)**2`` in each column."""
    return mean_square - 2 * prediction * mean + prediction.square()


def binary_cross_entropy(prediction: Tensor, mean: Tensor, mean_square: Tensor) -> Tensor:
    """Return the mean binary cross entropy of each column, which is linear in the targets."""
    del mean_square
    probability = prediction.clamp(EPSILON, 1 - EPSILON)
    return -(mean * probability.log() + (1 - mean) * (1 - probability).log())


class ConstantMedian:
    """The best constant prediction for absolute errors: each column's median within a batch."""

    def __init__(self) -> None:
        self._deviations: list[float] = []

    def measure(self, target: Tensor) -> Tensor:
        """Return the mean deviation from the median: the lowest loss of any constant."""
        columns = columns_of(target)
        return (columns - columns.median(0).values).abs().mean()

    def add(self, measured: Tensor) -> None:
        """Add a batch's mean deviation, which `measure` has returned, as a CPU tensor."""
        self._deviations.append(float(measured))

    def loss(self) -> float | None:
        """Return the mean deviation over all batches, or None if there are too few of them."""
        if len(self._deviations) < MIN_DEVIATIONS:
            return None
        return sum(self._deviations) / len(self._deviations)


BestConstant: TypeAlias = ConstantClassShares | ConstantMean | ConstantMedian


def best_constant_for(function: str) -> BestConstant | None:
    """Return an estimator of a loss function's best constant prediction, or None without one."""
    if function in CLASS_LOSSES:
        return ConstantClassShares()
    if function in BINARY_LOSSES:
        return ConstantMean(binary_cross_entropy)
    if function == "mse_loss":
        return ConstantMean(squared_error)
    if function == "l1_loss":
        return ConstantMedian()
    return None


class LabelMix:
    """Compares the number of distinct labels per batch with that expected for shuffled data."""

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
        """Number of remembered batches."""
        return len(self._sizes)

    def mean_different(self) -> float | None:
        """Return the mean number of distinct labels per batch."""
        if not self._different:
            return None
        return sum(self._different) / len(self._different)

    def expected_different(self) -> float | None:
        """Return the expected number of distinct labels in a shuffled batch of median size."""
        total = self._counts.total()
        if total == 0:
            return None
        size = median(self._sizes)
        shares = [count / total for count in self._counts.values()]
        return float(sum(1 - (1 - share) ** size for share in shares))


def labels_of(target: Tensor) -> Tensor:
    """Return a copy of the labels of a batch, but of at most `MAX_LABELS`, shape ``(n,)``."""
    return target.detach().reshape(-1)[:MAX_LABELS].clone()


def columns_of(target: Tensor) -> Tensor:
    """Return targets as an fp64 tensor, shape ``(rows, columns)``.

    Targets with more than `MAX_COLUMNS` columns are flattened to a single column.
    """
    values = target.detach().double()
    rows = values.shape[0] if values.dim() else 1
    columns = values.reshape(rows, -1)
    if columns.shape[1] > MAX_COLUMNS:
        return columns.reshape(-1, 1)
    return columns
