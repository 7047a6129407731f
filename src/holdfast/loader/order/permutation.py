"""A keyed bijection of ``range(n)`` with random access: the middle of 50 million costs what the beginning costs.

Only integers modulo 2**64 and a stable sort are used: the values are the same for every numpy and every machine,
which the positions in checkpoints rely on. Statistically random, not secret: no cryptography.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from numpy.typing import NDArray

from holdfast.loader.seeds import random_bits

_SORTED_UP_TO = 4096
# Below it the range is shuffled by sorting hashes, which makes all orders equally likely; a Feistel network on so
# few values repeats itself. 4096 sorted hashes cost as much as 4096 values of the network, and 32 KiB.
_ROUNDS = 8
# Four rounds of random functions are a pseudorandom permutation in both directions (Luby, Rackoff 1988); more are
# for the small halves, which are 6 bits at 4096. NIST SP 800-38G takes 8 (FF3) and 10 (FF1).


def permuted(positions: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    """Return what is at some positions of a shuffled ``range(n)``, ``1 <= n <= 2**62``; shape ``(k,)``, int64.

    Above 4096 this is a Feistel network on pairs of digits (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002): the value is ``left * base + right``, and each round adds a hash of one digit to the other. The
    pairs are at most ``sqrt(n)`` more than the values, and the few that are too large go through again. `key` says
    which of the permutations, modulo 2**64.
    """
    assert 1 <= n <= 2**62, n
    assert not len(positions) or (positions.min() >= 0 and positions.max() < n), "a position outside of the range"
    if n <= _SORTED_UP_TO:
        return _sorted_hashes(n, key)[positions]
    values = _network(positions.astype(np.uint64), n, key)
    while len(again := np.flatnonzero(values >= np.uint64(n))):
        values[again] = _network(values[again], n, key)
    return values.astype(np.int64)


@functools.lru_cache(maxsize=64)  # 2 MiB at most; batches are asked for one after another
def _sorted_hashes(n: int, key: int) -> NDArray[np.int64]:
    return np.argsort(random_bits(np.arange(n, dtype=np.uint64), key), kind="stable").astype(np.int64)


def _network(values: NDArray[np.uint64], n: int, key: int) -> NDArray[np.uint64]:
    """Return a permutation of ``range(bases[0] * bases[1])``, the smallest such range of near squares above n."""
    base = math.isqrt(n - 1) + 1
    bases = (np.uint64(-(-n // base)), np.uint64(base))
    left = values // bases[1]
    digits = [left, values - left * bases[1]]
    for number, round_key in enumerate(random_bits(np.arange(_ROUNDS, dtype=np.uint64), key).tolist()):
        side = number % 2
        added = random_bits(digits[1 - side], round_key) >> np.uint64(2)  # so that the sum does not overflow
        total = digits[side] + added
        digits[side] = total - total // bases[side] * bases[side]  # numpy divides faster than it takes remainders
    pairs: NDArray[np.uint64] = digits[0] * bases[1] + digits[1]
    return pairs
