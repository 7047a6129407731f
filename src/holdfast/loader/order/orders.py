"""Orders, which determine the sample at each position of an epoch.

An order is a function of (seed, epoch). It can return the indices for any range of positions, and
only the blocks of positions that overlap the range are computed. A run can therefore resume
instantly in the middle of any dataset, with any batch size and any number of workers or ranks.

A saved position is only valid for the order with which it was saved. If you change the indices that
an order returns for a seed, increase the version in `Order.identity`.
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

# Number of positions that are computed at a time. The number is large enough that the fixed cost of
# a call is negligible.
_BLOCK_POSITIONS = 4096

# Largest default sizes for `LengthBucketed`. They were chosen by measuring the padding for 100,000
# log-normal lengths (speech of 0.5 to 17 s, sigma 0.6). Plain shuffling leads to 62% padding. With
# these sizes, the padding is 0.6% in batches of 32, and 5% in batches of 48, some of which span two
# groups. With a window of 4096, the padding is 1.1% and 5%. In batches of 48, groups of 128 lead to
# 9% padding and groups of 512 to 3%, but with groups of 512, lengths increase over twice as many
# consecutive batches.
_LARGEST_GROUP = 256
_LARGEST_WINDOW = 8192

# By default, the samples are divided into at least this many windows. With a single window, the
# same samples would be neighbors in every epoch.
_MIN_WINDOWS = 4

# Number of values that are digested at a time, so that the whole array is never copied at once.
_DIGEST_CHUNK = 2**20


class Order(ABC):
    """Determines the sample at each position of an epoch.

    Args:
        length: Number of positions in an epoch.
    """

    _kind: ClassVar[str]
    _block_size: int = _BLOCK_POSITIONS
    # The last two computed blocks, with their arguments. Two are cached, because the spares of a
    # batch may be in the next block while the next batch is still in the current block.
    _newest_blocks: tuple[tuple[tuple[int, int, int], NDArray[np.int64]], ...] = ()

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        """Return the number of positions in an epoch."""
        return self._length

    @final
    def count(self, epoch: int) -> int:
        """Return the number of positions in an epoch, which is the same for every epoch."""
        del epoch
        return len(self)

    def identity(self) -> dict[str, Any]:
        """Return the properties of the order that must match when a saved position is loaded.

        The seed and the batch size are not included.
        """
        return {"kind": self._kind, "version": 1, "length": len(self)}

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of epoch 0 with seed 0, for loaders that use the order as a sampler."""
        for first in range(0, len(self), self._block_size):
            yield from self.indices(0, 0, first, first + self._block_size)

    @abstractmethod
    def _block(self, seed: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices at the positions of one block.

        Args:
            seed: Seed of the loader.
            epoch: Number of the epoch.
            positions: All positions of the block, int64, 1-D. A block begins at a multiple of the
                block size.
        """

    @final
    def indices(self, seed: int, epoch: int, start: int, stop: int) -> list[int]:
        """Return the dataset indices at the positions from `start` to `stop` in an epoch.

        `start` and `stop` work as in a slice. The cost depends on the number of positions
        requested, not on the length of the epoch.
        """
        start, stop, _ = slice(start, stop).indices(len(self))
        indices: list[int] = []
        position = start
        while position < stop:
            number, offset = divmod(position, self._block_size)
            block = self._numbered_block(seed, epoch, number)
            part = block[offset : offset + stop - position]
            indices += part.tolist()
            position += len(part)
        return indices

    def _numbered_block(self, seed: int, epoch: int, number: int) -> NDArray[np.int64]:
        key = (seed, epoch, number)
        for block_key, block in self._newest_blocks:
            if block_key == key:
                return block
        first = number * self._block_size
        end = min(first + self._block_size, len(self))
        block = self._block(seed, epoch, np.arange(first, end, dtype=np.int64))
        self._newest_blocks = ((key, block), *self._newest_blocks[:1])
        return block


@final
class Sequential(Order):
    """An order with each sample once per epoch, in the order of the dataset.

    Args:
        length: Number of samples in the dataset.
    """

    _kind = "sequential"

    def _block(self, seed: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:  # noqa: ARG002
        return positions


@final
class Shuffled(Order):
    """An order with each sample once per epoch, shuffled differently in every epoch.

    Args:
        length: Number of samples in the dataset.
    """

    _kind = "shuffled"

    def _block(self, seed: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return permuted(positions, self._length, derive_seed(seed, epoch, "shuffled"))


@final
class LengthBucketed(Order):
    """An order with each sample once per epoch, shuffled so that neighbors have similar lengths.

    The epoch is shuffled and divided into windows. Each window is sorted by length and divided into
    groups, and the groups in each window are shuffled. Batches therefore need little padding, and
    lengths increase steadily only within a group. The order does not depend on the batch size. If
    the group size is a multiple of the batch size, no batch spans two groups.

    Args:
        lengths: The length of each sample in any unit, finite and at least 0, shape ``(samples,)``.
        window: Number of positions that are sorted together. A larger window needs less padding.
            With a smaller window, the neighbors of a sample vary more from epoch to epoch. Default:
            a quarter of the samples, but at most 8192.
        group: Number of consecutive positions that stay sorted. If `group` is a multiple of the
            batch size and divides the window, no batch spans two groups. Otherwise, use at least
            four times the batch size to keep padding low. Default: 256, or a smaller power of two
            if two groups of 256 do not fit into the window.

    Raises:
        LoaderError: H605 for invalid lengths or sizes.
    """

    _kind = "length_bucketed"

    def __init__(
        self, lengths: ArrayLike, *, window: int | None = None, group: int | None = None
    ) -> None:
        self.lengths = _numbers(lengths)
        super().__init__(len(self.lengths))
        for size in (window, group):
            if size is not None and size < 1:
                raise _unusable(
                    f"window={window}, group={group}",
                    limit="both sizes must be at least 1",
                    fix="omit both, or pass sizes such as window=8192 and group=256.",
                )
        largest_window = window
        if largest_window is None:
            largest_window = min(_LARGEST_WINDOW, len(self) // _MIN_WINDOWS)
        self._group = group or _choose_group(largest_window)
        self._block_size = window or _whole_groups(largest_window, self._group)

    def identity(self) -> dict[str, Any]:
        """Return the properties of the order, including its sizes and a digest of the lengths."""
        sizes = {"window": self._block_size, "group": self._group}
        return {**super().identity(), **sizes, "lengths": self._digest}

    @functools.cached_property
    def _digest(self) -> str:
        return _digest(self.lengths)

    def _block(self, seed: int, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        # A block is a window.
        shuffled = permuted(positions, len(self), derive_seed(seed, epoch, "length_bucketed"))
        by_length = shuffled[np.argsort(self.lengths[shuffled], kind="stable")]
        group_starts = np.arange(0, len(by_length), self._group)
        # Each window has its own key, so that the groups of each window are shuffled differently.
        key = derive_seed(seed, epoch, "length_bucketed", int(positions[0]))
        group_order = permuted(np.arange(len(group_starts)), len(group_starts), key)
        groups = [by_length[start : start + self._group] for start in group_starts[group_order]]
        return np.concatenate(groups)


def _choose_group(window: int) -> int:
    """Return the largest group size, a power of two up to 256, that fits twice into a window."""
    largest_power = 1 << max(0, (window // 2).bit_length() - 1)
    return min(_LARGEST_GROUP, largest_power)


def _whole_groups(window: int, group: int) -> int:
    """Round a window down to a multiple of the group size, but to at least one group."""
    return max(1, window // group) * group


def _numbers(lengths: ArrayLike) -> NDArray[Any]:
    """Check the lengths and return a copy of them as an array.

    The order keeps the copy, so that later changes to `lengths` do not affect it.

    Raises:
        LoaderError: H605 for invalid lengths.
    """
    array = np.asarray(lengths).copy()
    fix = "pass a list or array with one number per sample."
    # Booleans, integers and floats.
    is_numeric = array.dtype.kind in "biuf"
    if array.ndim != 1 or (array.size and not is_numeric):
        raise _unusable(
            f"lengths has shape {array.shape} and type {array.dtype}",
            limit="lengths must contain one number per sample",
            fix=fix,
        )
    is_usable = np.isfinite(array) & (array >= 0)
    unusable_places = np.flatnonzero(~is_usable)
    if len(unusable_places):
        place = unusable_places[0]
        raise _unusable(
            f"lengths[{place}]={array[place]}",
            limit="lengths must be finite and at least 0",
            fix=fix,
        )
    return array


def _unusable(what: str, *, limit: str, fix: str) -> LoaderError:
    return LoaderError(what, limit=limit, fix=fix, rule="H605")


def _digest(numbers: NDArray[Any]) -> str:
    """Return a digest of the values that does not depend on their numeric type."""
    digest = hashlib.blake2b(digest_size=8)
    for first in range(0, len(numbers), _DIGEST_CHUNK):
        digest.update(numbers[first : first + _DIGEST_CHUNK].astype("<f8").tobytes())
    return digest.hexdigest()


# --- a keyed permutation of range(n) with random access -------------------------------------------

# The permutation only uses integers modulo 2**64 and a stable sort, so it is the same on every
# machine and with every version of NumPy. The positions saved in checkpoints are only valid because
# of this. The permutation is statistically random, but not cryptographically secure.

# Up to this length, the range is shuffled by sorting hashes, which makes all orders equally likely.
# With so few values, a Feistel network would produce similar orders repeatedly. Sorting 4096 hashes
# takes as long as computing 4096 values with the network, and needs 32 KiB.
_SORTED_UP_TO = 4096

# Four rounds of random functions already form a strong pseudorandom permutation (Luby and Rackoff,
# 1988). More rounds are used here, because digits may have as few as 6 bits (for lengths just above
# 4096). NIST SP 800-38G uses 8 rounds (FF3) and 10 rounds (FF1).
_ROUNDS = 8


def permuted(positions: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    """Return the values at the given positions of a shuffled ``range(n)``.

    For n above 4096, the values come from a Feistel network on pairs of digits (Black and Rogaway,
    "Ciphers with arbitrary finite domains", 2002). A value is ``left * base + right``, and each
    round adds a hash of one digit to the other digit. There are at most ``sqrt(n)`` more pairs than
    values. The few results that are too large are passed through the network again.

    Args:
        positions: Shape ``(k,)``, int64, from 0 to ``n - 1``.
        n: Length of the range, from 1 to ``2**62``.
        key: Selects the permutation. Used modulo 2**64.

    Returns:
        The values, shape ``(k,)``, int64.
    """
    assert 1 <= n <= 2**62, n
    if len(positions):
        assert positions.min() >= 0, "a position is negative"
        assert positions.max() < n, "a position is too large"
    if n <= _SORTED_UP_TO:
        return _sorted_hashes(n, key)[positions]
    values = _network(positions.astype(np.uint64), n, key)
    while True:
        too_large = np.flatnonzero(values >= np.uint64(n))
        if len(too_large) == 0:
            return values.astype(np.int64)
        values[too_large] = _network(values[too_large], n, key)


# The result is cached, because consecutive calls are usually for the same epoch. The cache takes at
# most 2 MiB.
@functools.lru_cache(maxsize=64)
def _sorted_hashes(n: int, key: int) -> NDArray[np.int64]:
    hashes = random_bits(np.arange(n, dtype=np.uint64), key)
    return np.argsort(hashes, kind="stable").astype(np.int64)


def _network(values: NDArray[np.uint64], n: int, key: int) -> NDArray[np.uint64]:
    """Pass values through the Feistel network, which permutes a range slightly larger than `n`.

    The range is ``range(left_base * right_base)``, where the two bases are as equal as possible.
    """
    # Both square root and quotient are rounded up.
    right_base = math.isqrt(n - 1) + 1
    left_base = -(-n // right_base)
    bases = (np.uint64(left_base), np.uint64(right_base))
    left = values // bases[1]
    digits = [left, values - left * bases[1]]
    round_keys = random_bits(np.arange(_ROUNDS, dtype=np.uint64), key).tolist()
    for number, round_key in enumerate(round_keys):
        side = number % 2
        # Two bits are dropped to keep the sum from overflowing.
        added = random_bits(digits[1 - side], round_key) >> np.uint64(2)
        total = digits[side] + added
        # The next line computes ``total % bases[side]``. NumPy divides faster than it computes
        # remainders.
        digits[side] = total - total // bases[side] * bases[side]
    pairs: NDArray[np.uint64] = digits[0] * bases[1] + digits[1]
    return pairs
