"""Compute the seed of each sample from (seed, epoch, index) alone.

Random augmentation therefore does not depend on the number of workers, the batch size, or where a
run was interrupted. `order.orders` shuffles with the same functions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

# The constants of SplitMix64. They are NumPy objects, because converting them in each call of
# `random_bits` would take a noticeable share of the call's time.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)
_FIRST_SHIFT = np.uint64(30)
_SECOND_SHIFT = np.uint64(27)
_THIRD_SHIFT = np.uint64(31)

_MASK_64_BITS = 2**64 - 1


def random_bits(counters: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Return the outputs of the SplitMix64 generator at the given positions in its sequence.

    The cost does not depend on the values of the counters. The generator is described in Steele,
    Lea and Flood, "Fast splittable pseudorandom number generators" (2014). The constants are those
    published by Vigna.

    Args:
        counters: Positions in the sequence, uint64, of any shape.
        key: The seed of the generator, modulo 2**64.

    Returns:
        The outputs, uint64, in the shape of `counters`.
    """
    state = counters + _ONE
    state *= _GAMMA
    state += np.uint64(key & _MASK_64_BITS)
    state ^= state >> _FIRST_SHIFT
    state *= _FIRST_FACTOR
    state ^= state >> _SECOND_SHIFT
    state *= _SECOND_FACTOR
    state ^= state >> _THIRD_SHIFT
    return state


def derive_seed(*parts: object) -> int:
    """Derive a seed between 0 and 2**63 - 1 from the given values, the same on every machine.

    Example:
        >>> derive_seed(0, 3, 17) == derive_seed(0, 3, 17) != derive_seed(0, 3, 18)
        True
    """
    text = "/".join(_as_text(part) for part in parts)
    # The digest has 64 bits, of which the seed uses 63.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _as_text(part: object) -> str:
    """Convert a value to text. Equal integers from Python, NumPy and torch give the same text."""
    if getattr(part, "ndim", 0):
        # The `repr` of a long array omits most of its numbers.
        return repr(part.tolist())  # type: ignore[attr-defined]
    if hasattr(part, "__index__"):
        return str(int(part))
    return repr(part)


class SampleSeeds:
    """Computes the seeds of samples from (seed, epoch, index).

    For integer indices, the seeds are outputs of one SplitMix64 generator per (seed, epoch), which
    are fast to compute. For other indices, `derive_seed` computes the seed from all three values.

    Args:
        seed: Seed of the loader.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        # `_key` is the seed of the SplitMix64 generator for this epoch.
        self._epoch: int | None = None
        self._key = 0

    def of_sample(self, epoch: int, index: Any) -> int:
        """Return the seed of a sample in an epoch, from 0 to 2**63 - 1."""
        return self.of_samples(epoch, (index,))[0]

    def of_samples(self, epoch: int, indices: Sequence[Any]) -> list[int]:
        """Return the seeds of several samples in an epoch, in the order of `indices`."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._key = derive_seed(self._seed, epoch, "samples")
        # In the usual case, all indices are of type int. This is checked without a Python loop.
        are_plain_integers = set(map(type, indices)) == {int}
        if are_plain_integers or all(_is_integer(index) for index in indices):
            return self._of_integers(indices)
        seeds: list[int] = []
        for index in indices:
            if _is_integer(index):
                seeds += self._of_integers([index])
            else:
                seeds.append(derive_seed(self._seed, epoch, index))
        return seeds

    def _of_integers(self, indices: Sequence[Any]) -> list[int]:
        # The outputs have 64 bits, of which the seeds use 63.
        counters = np.array([int(index) & _MASK_64_BITS for index in indices], dtype=np.uint64)
        return (random_bits(counters, self._key) >> _ONE).tolist()  # type: ignore[no-any-return]


def _is_integer(index: Any) -> bool:
    return hasattr(index, "__index__") and not getattr(index, "ndim", 0)
