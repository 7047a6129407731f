"""Data sets of the loader's tests: samples that a function reads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch


class Samples:
    """So many samples, as a function reads them; by default each is its index."""

    def __init__(self, length: int, read: Callable[[Any], Any] = int) -> None:
        self.length = length
        self.read = read

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        return self.read(index)


def noise(index: int) -> tuple[int, float, float, float]:
    """Return an index with a draw from each of the three generators."""
    return index, random.random(), float(np.random.rand()), float(torch.rand(()))


def items(batches: Iterable[torch.Tensor]) -> list[Any]:
    """Return the items of batches that are tensors."""
    return [item for batch in batches for item in batch.tolist()]
