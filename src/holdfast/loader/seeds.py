"""Seeds that depend on nothing but (seed, epoch, index).

So augmentation is the same whatever the worker count, the batch size, or the place where a run was stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.loader.order.permutation import FIRST_FACTOR, GAMMA, MASK, SECOND_FACTOR, random_bits

_MANY = 32  # for fewer, arrays take longer than Python's numbers


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
    if getattr(part, "ndim", 0):  # many at once, of which only some would be printed
        return repr(part.tolist())  # type: ignore[attr-defined]
    return str(int(part)) if hasattr(part, "__index__") else repr(part)


class SampleSeeds:
    """The seeds of samples: for a number, that output of the SplitMix64 generator that (seed, epoch) seeds.

    For other indices `derive_seed` of all three.

    Args:
        seed: Of the loader.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch: int | None = None
        self._key = 0

    def of(self, epoch: int, index: Any) -> int:
        """Return the seed of a sample in an epoch, from 0 to 2**63 - 1."""
        return self.all(epoch, (index,))[0]

    def all(self, epoch: int, indices: Sequence[Any]) -> list[int]:
        """Return the seeds of samples in an epoch."""
        if epoch != self._epoch:
            self._epoch, self._key = epoch, derive_seed(self._seed, epoch, "samples")
        key, seeds = self._key, []
        if len(indices) >= _MANY and set(map(type, indices)) == {int} and 0 <= min(indices) <= max(indices) <= MASK:
            bits = random_bits(np.array(indices, dtype=np.uint64), key)
            return (bits >> np.uint64(1)).tolist()  # type: ignore[no-any-return]
        for index in indices:
            if type(index) is not int:
                if getattr(index, "ndim", 0) or not hasattr(index, "__index__"):
                    seeds.append(derive_seed(self._seed, epoch, index))
                    continue
                index = int(index)
            state = (key + (index + 1) * GAMMA) & MASK  # as `random_bits`
            state = (state ^ state >> 30) * FIRST_FACTOR & MASK
            state = (state ^ state >> 27) * SECOND_FACTOR & MASK
            seeds.append((state ^ state >> 31) >> 1)
        return seeds
