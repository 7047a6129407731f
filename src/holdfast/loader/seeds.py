"""Seeds that depend on nothing but (seed, epoch, index), and the counter-based hash that they and
the orders use.

So augmentation is the same whatever the worker count, the batch size, or the place where a run was
stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_GAMMA, _FIRST_FACTOR, _SECOND_FACTOR = map(
    np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_1, _27, _30, _31 = map(np.uint64, (1, 27, 30, 31))  # made once: a batch takes one call
_MASK = 2**64 - 1


def random_bits(counters: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Return outputs of the SplitMix64 generator that is seeded with the key, by their counters.

    Uint64, any shape.

    The constants are those of Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators" (2014), as published by Vigna. Each counter costs the same, whichever it is.
    """
    state = counters + _1
    state *= _GAMMA
    state += np.uint64(key & _MASK)
    state ^= state >> _30
    state *= _FIRST_FACTOR
    state ^= state >> _27
    state *= _SECOND_FACTOR
    state ^= state >> _31
    return state


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
    """The seeds of samples.

    Numbers of the generator of (seed, epoch), else `derive_seed` of all three.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch: int | None = None
        self._key = 0

    def of_sample(self, epoch: int, index: Any) -> int:
        """Return the seed of a sample in an epoch, from 0 to 2**63 - 1."""
        return self.of_samples(epoch, (index,))[0]

    def of_samples(self, epoch: int, indices: Sequence[Any]) -> list[int]:
        """Return the seeds of samples in an epoch."""
        if epoch != self._epoch:
            self._epoch, self._key = epoch, derive_seed(self._seed, epoch, "samples")
        usual = set(map(type, indices)) == {int}
        if not usual and any(
            not hasattr(index, "__index__") or getattr(index, "ndim", 0) for index in indices
        ):
            many = len(indices) > 1
            return [
                self.of_sample(epoch, each) if many else derive_seed(self._seed, epoch, each)
                for each in indices
            ]
        counters = np.array([int(index) & _MASK for index in indices], dtype=np.uint64)
        return (random_bits(counters, self._key) >> _1).tolist()  # type: ignore[no-any-return]
