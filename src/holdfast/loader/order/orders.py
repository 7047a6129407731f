"""Orders: which sample is at which position of an epoch.

An order is a function of (seed, epoch) that can be asked for any stretch of positions and makes no
more of the epoch than the blocks it touches. So a run resumes in the middle of any data set at
once, and with whatever number of workers, batch size or number of ranks.

What an order returns for a seed is part of what a saved position means: a change is a new version
in its identity.
"""

from __future__ import annotations

import functools
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from holdfast.core.errors import LoaderError
from holdfast.loader.seeds import derive_seed, random_bits

# Positions; from here on the cost of a call no longer shows in the cost of a position
_BLOCK = 4096
_LARGEST_GROUP, _LARGEST_WINDOW = 256, 8192
# Measured with 100,000 log-normal lengths (speech of 0.5 to 17 s, sigma 0.6): of batches of 32, 0.6
# % is padding, of batches of 48 5 % (they span groups), shuffled 62 %. A window of 4096 has 1.1 %
# and 5 %; groups of 128 have 9 % at 48, groups of 512 3 %, but lengths then rise over twice as many
# batches.
_LEAST_WINDOWS = 4  # with one window for all samples, the same ones would meet in each epoch
_CHUNK = 2**20  # numbers that are digested at a time, so that no second copy of all is made


class Order(ABC):
    """Which sample is at which position of an epoch.

    Args:
        length: Positions of an epoch.
    """

    _kind: ClassVar[str]
    _block_size: int = _BLOCK
    # The two blocks made last: a step that looks ahead over the end of one comes back to it.
    _newest: tuple[tuple[tuple[int, int, int], NDArray[np.int64]], ...] = ()

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        """Return the positions of an epoch."""
        return self._length

    @final
    def count(self, epoch: int) -> int:
        """Return the positions of an epoch, which are as many in each."""
        del epoch
        return len(self)

    def identity(self) -> dict[str, Any]:
        """Return, as JSON values, what must be equal for a position to mean the same sample.

        No seed, no sizes.
        """
        return {"kind": self._kind, "version": 1, "length": len(self)}

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of epoch 0 with seed 0: what a loader that knows no orders takes."""
        for first in range(0, len(self), self._block_size):
            yield from self.indices(0, 0, first, first + self._block_size)

    @abstractmethod
    def _block(self, seed: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what is at the positions of one block.

        Those between two multiples of the block's size.
        """

    @final
    def indices(self, seed: int, epoch: int, start: int, stop: int) -> list[int]:
        """Return the indices of the samples at the positions from `start` to `stop` of an epoch, as
        in a slice.

        The cost grows with the positions asked for, not with the epoch.
        """
        start, stop, _ = slice(start, stop).indices(len(self))
        found: list[int] = []
        while start < stop:
            number, offset = divmod(start, self._block_size)
            values = self._block_of(seed, epoch, number)[offset : offset + stop - start]
            found += values.tolist()
            start += len(values)
        return found

    def _block_of(self, seed: int, epoch: int, number: int) -> NDArray[np.int64]:
        asked = (seed, epoch, number)
        for made, values in self._newest:
            if made == asked:
                return values
        first = number * self._block_size
        values = self._block(
            seed, epoch, np.arange(first, min(first + self._block_size, len(self)), dtype=np.int64)
        )
        self._newest = ((asked, values), *self._newest[:1])
        return values


@final
class Sequential(Order):
    """The samples as they lie in the data set.

    Args:
        length: Samples in the data set.
    """

    _kind = "sequential"

    def _block(self, seed: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:  # noqa: ARG002
        return positions


@final
class Shuffled(Order):
    """Each sample once an epoch, at random places that are others in each epoch.

    Args:
        length: Samples in the data set.
    """

    _kind = "shuffled"

    def _block(self, seed: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return permuted(positions, self._length, derive_seed(seed, epoch, "shuffled"))


@final
class LengthBucketed(Order):
    """Each sample once an epoch, at random places, but with neighbours of about the same length.

    The epoch is shuffled and cut into windows; each window is sorted by length and cut into groups,
    whose order is random again. So batches need little padding, and lengths do not rise over more
    than one group. Neither depends on the batch size: batches that divide the group never span two
    of them.

    Args:
        lengths: One per sample, finite and at least 0, in any unit; shape ``(samples,)``.
        window: Positions among which samples are sorted. More need less padding; with fewer,
            samples meet others in each epoch. By default a quarter of the samples, but at most
            8192.
        group: Positions that stay sorted. With a multiple of the batch size that divides the window
            no batch spans two groups; otherwise at least four times the batch size keeps the
            padding low. By default 256, and a smaller power of two where the window has not two
            such groups.

    Raises:
        LoaderError: H605 for lengths or sizes that cannot be used.
    """

    _kind = "length_bucketed"

    def __init__(
        self, lengths: ArrayLike, *, window: int | None = None, group: int | None = None
    ) -> None:
        self.lengths = _numbers(lengths)
        super().__init__(len(self.lengths))
        if min(1 if size is None else size for size in (window, group)) < 1:
            what = f"window={window} and group={group} positions"
            raise _unusable(
                what, "they have at least 1", "leave them out, or pass sizes such as 8192 and 256."
            )
        span = min(_LARGEST_WINDOW, len(self) // _LEAST_WINDOWS) if window is None else window
        self._group = group or min(_LARGEST_GROUP, 2 ** max(0, (span // 2).bit_length() - 1))
        self._block_size = window or max(1, span // self._group) * self._group

    def identity(self) -> dict[str, Any]:
        """Return the kind, the sizes, and a digest of the lengths."""
        sizes = {"window": self._block_size, "group": self._group}
        return {**super().identity(), **sizes, "lengths": self._digest}

    @functools.cached_property
    def _digest(self) -> str:
        return _digest(self.lengths)

    def _block(self, seed: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        shuffled = permuted(positions, len(self), derive_seed(seed, epoch, "length_bucketed"))
        by_length = shuffled[np.argsort(self.lengths[shuffled], kind="stable")]
        starts = np.arange(0, len(by_length), self._group)
        key = derive_seed(seed, epoch, "length_bucketed", int(positions[0]))
        groups = permuted(np.arange(len(starts)), len(starts), key)
        return np.concatenate([by_length[first : first + self._group] for first in starts[groups]])


def _numbers(lengths: ArrayLike) -> NDArray[Any]:
    """Return a copy of plain numbers, so that nobody can change the order while it is in use."""
    array = np.asarray(lengths).copy()
    fix = "pass a list or array with one number per sample."
    if array.ndim != 1 or (array.size and array.dtype.kind not in "biuf"):
        raise _unusable(
            f"lengths of shape {array.shape} and type {array.dtype}", "there is one per sample", fix
        )
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(wrong):
        raise _unusable(
            f"lengths[{wrong[0]}]={array[wrong[0]]}", "they have to be finite and at least 0", fix
        )
    return array


def _unusable(what: str, limit: str, fix: str) -> LoaderError:
    return LoaderError(what, limit=limit, fix=fix, rule="H605")


def _digest(numbers: NDArray[Any]) -> str:
    """Return a digest of the values, whatever type they are stored in."""
    digest = hashlib.blake2b(digest_size=8)
    for first in range(0, len(numbers), _CHUNK):
        digest.update(numbers[first : first + _CHUNK].astype("<f8").tobytes())
    return digest.hexdigest()


# --- a keyed bijection of range(n) with random access
# ----------------------------------------------------

# Only integers modulo 2**64 and a stable sort are used: the values are the same for every numpy and
# every machine, which the positions in checkpoints rely on. Statistically random, not secret: no
# cryptography.
_SORTED_UP_TO = 4096
# Below it the range is shuffled by sorting hashes, which makes all orders equally likely; a Feistel
# network on so few values repeats itself. 4096 sorted hashes cost as much as 4096 values of the
# network, and 32 KiB.
_ROUNDS = 8
# Four rounds of random functions are a pseudorandom permutation in both directions (Luby, Rackoff
# 1988); more are for the small halves, which are 6 bits at 4096. NIST SP 800-38G takes 8 (FF3) and
# 10 (FF1).


def permuted(positions: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    """Return what is at some positions of a shuffled ``range(n)``, ``1 <= n <= 2**62``.

    Shape ``(k,)``, int64.

    Above 4096 this is a Feistel network on pairs of digits (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002): the value is ``left * base + right``, and each round adds a
    hash of one digit to the other. The pairs are at most ``sqrt(n)`` more than the values, and the
    few that are too large go through again. `key` says which of the permutations, modulo 2**64.
    """
    assert 1 <= n <= 2**62, n
    assert not len(positions) or (positions.min() >= 0 and positions.max() < n), (
        "a position outside of the range"
    )
    if n <= _SORTED_UP_TO:
        return _sorted_hashes(n, key)[positions]
    values = _network(positions.astype(np.uint64), n, key)
    while len(again := np.flatnonzero(values >= np.uint64(n))):
        values[again] = _network(values[again], n, key)
    return values.astype(np.int64)


@functools.lru_cache(maxsize=64)  # 2 MiB at most; batches are asked for one after another
def _sorted_hashes(n: int, key: int) -> NDArray[np.int64]:
    return np.argsort(random_bits(np.arange(n, dtype=np.uint64), key), kind="stable").astype(
        np.int64
    )


def _network(values: NDArray[np.uint64], n: int, key: int) -> NDArray[np.uint64]:
    """Return a permutation of ``range(bases[0] * bases[1])``, the smallest such range of near
    squares above n.
    """
    base = math.isqrt(n - 1) + 1
    bases = (np.uint64(-(-n // base)), np.uint64(base))
    left = values // bases[1]
    digits = [left, values - left * bases[1]]
    for number, round_key in enumerate(
        random_bits(np.arange(_ROUNDS, dtype=np.uint64), key).tolist()
    ):
        side = number % 2
        # So that the sum does not overflow
        added = random_bits(digits[1 - side], round_key) >> np.uint64(2)
        total = digits[side] + added
        # Numpy divides faster than it takes remainders
        digits[side] = total - total // bases[side] * bases[side]
    pairs: NDArray[np.uint64] = digits[0] * bases[1] + digits[1]
    return pairs
