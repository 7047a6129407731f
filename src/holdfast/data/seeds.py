"""Seeds that depend on nothing but (seed, epoch, index).

So augmentation is the same whatever the worker count, the batch size, or the place where a run was stopped.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from holdfast.data.random_state import isolated, seed_cpu


def derive_seed(*parts: object) -> int:
    """Return a seed from 0 to 2**63 - 1 that depends on all parts, the same on every machine.

    Example:
        >>> derive_seed(0, 3, 17) == derive_seed(0, 3, 17) != derive_seed(0, 3, 18)
        True
    """
    text = "/".join(_plain(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _plain(part: object) -> str:
    # numpy's and torch's integers print differently from python's, and must seed alike.
    return str(int(part)) if hasattr(part, "__index__") else repr(part)


class SeededDataset(Dataset[Any]):
    """A map-style dataset that seeds python, numpy and torch before each sample.

    Keys are ``(epoch, index)``. In the main process the random state is put back after each fetch, so that
    loading and training draw from different streams, as they do with workers.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[tuple[int, Any]]) -> list[Any]:
        if get_worker_info() is not None:
            return self._fetch(keys)
        with isolated():
            return self._fetch(keys)

    def _fetch(self, keys: list[tuple[int, Any]]) -> list[Any]:
        # Not through the dataset's own __getitems__ (torch's Subset has one): a sample's random numbers would
        # depend on the batch that it is in.
        samples = []
        for epoch, index in keys:
            seed_cpu(derive_seed(self.seed, epoch, index))
            samples.append(self.dataset[index])
        return samples


def shuffled(length: int, seed: int, epoch: int) -> list[int]:
    """Return the order of an epoch: a permutation of ``range(length)`` that depends on (seed, epoch) only."""
    generator = torch.Generator().manual_seed(derive_seed(seed, epoch, "order"))
    order: list[int] = torch.randperm(length, generator=generator).tolist()
    return order
