"""A simulator of CUDA's native caching allocator, for one stream.

Pools, segments, best fit, splitting, coalescing.

Follows ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.11 to 2.13 step by step; the name of the
function there stands beside each rule. It hands out numbers, never memory, and takes sizes that are
rounded already.

Not simulated: several streams, memory pools of the user, CUDA graphs, the settings of
    ``PYTORCH_ALLOC_CONF``, and
which addresses `cudaMalloc` gives (only ties depend on them).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

# c10/core/AllocatorConfig.h of torch 2.13
MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = 1 << 20  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT_BYTES = 2 << 20  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 << 20  # kLargeBuffer: what requests of 1 to 10 MiB are packed into
MIN_LARGE_BYTES = 10 << 20  # kMinLargeAlloc: requests below it take a segment of the large size
ROUND_LARGE_BYTES = 2 << 20  # kRoundLarge
_UNLIMITED = 1 << 62
# A key of the free list is (size << _SHIFT) | address: one integer that sorts as std::set<Block*>
# does
_SHIFT = 64


class OutOfDeviceMemoryError(Exception):
    """No memory is left, also after all that is cached was given back.

    Torch raises OutOfMemoryError here.
    """


class Block:
    """A part of a segment."""

    __slots__ = ("address", "allocated", "following", "pool", "previous", "size")

    def __init__(self, pool: Pool, address: int, size: int) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.allocated = False
        self.previous: Block | None = None
        self.following: Block | None = None

    def insert_between(self, before: Block | None, after: Block | None) -> None:
        """Put this block between two neighbours of a segment (Block::splice)."""
        self.previous, self.following = before, after
        if before is not None:
            before.following = self
        if after is not None:
            after.previous = self

    def join_neighbours(self) -> None:
        """Let this block, which is in no list, take in its free neighbours."""
        # try_merge_blocks
        for other in (self.previous, self.following):
            if other is None or other.allocated:
                continue
            other.pool.remove(other)
            self.address = min(self.address, other.address)
            self.size += other.size
            before = other.previous if other is self.previous else self.previous
            after = other.following if other is self.following else self.following
            self.insert_between(before, after)


class Pool:
    """The free blocks of one size class, best fit first (BlockPool)."""

    __slots__ = ("blocks", "keys", "least_remainder", "next_address", "segment_bytes")

    def __init__(self, *, least_remainder: int, segment_bytes: int, next_address: int) -> None:
        self.least_remainder = least_remainder  # a smaller one is not split off
        self.segment_bytes = segment_bytes  # of all requests but the largest
        self.next_address = next_address
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Make a block available (insert_into_blocks)."""
        key = (block.size << _SHIFT) | block.address
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Make a block unavailable."""
        key = (block.size << _SHIFT) | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]


class CachingAllocator:
    """What the caching allocator of one device would do, of which the driver can give `cap_bytes`.

    `addresses` are those of the segments in order, where they are known from a recording.
    """

    def __init__(
        self, *, cap_bytes: int | None = None, addresses: Iterator[int] | None = None
    ) -> None:
        self._small = Pool(
            least_remainder=MIN_BLOCK_BYTES, segment_bytes=SMALL_SEGMENT_BYTES, next_address=1 << 44
        )
        self._large = Pool(
            least_remainder=SMALL_BYTES + 1, segment_bytes=LARGE_SEGMENT_BYTES, next_address=1 << 54
        )
        self._cap = _UNLIMITED if cap_bytes is None else cap_bytes
        self._addresses = iter(()) if addresses is None else addresses
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.retries = 0
        # What the driver was asked for: action as in torch's traces, bytes
        self.log: list[tuple[str, int]] = []

    def allocate(self, size: int) -> Block:
        """Return a block for a request, rounded as `replay.round_sizes` does (malloc,
        alloc_found_block).

        OutOfDeviceMemoryError if no memory is left, also after all that is cached was given back.
        """
        pool = self._small if size <= SMALL_BYTES else self._large
        block = self._find_free(pool, size) or self._grow(pool, size)
        remaining = block.size - size
        if remaining >= pool.least_remainder:
            rest = Block(pool, block.address + size, remaining)
            rest.insert_between(block, block.following)
            block.size = size
            pool.add(rest)
        block.allocated = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back and join it with free neighbours (free_block, try_merge_blocks)."""
        assert block.allocated
        self.allocated_bytes -= block.size
        block.allocated = False
        block.join_neighbours()
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Give back what is free as a whole segment (release_cached_blocks)."""
        for pool in (self._large, self._small):
            for block in [pool.blocks[key] for key in pool.keys]:
                if block.previous is None and block.following is None:
                    pool.remove(block)
                    self._count(-block.size, "segment_free")

    def _find_free(self, pool: Pool, size: int) -> Block | None:
        # get_free_block
        index = bisect_left(pool.keys, size << _SHIFT)
        return None if index == len(pool.keys) else pool.blocks.pop(pool.keys.pop(index))

    def _grow(self, pool: Pool, size: int) -> Block:
        # malloc: try; give back all, try; out of memory
        block = self._ask_driver(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._ask_driver(pool, size)
        if block is None:
            raise OutOfDeviceMemoryError
        return block

    def _ask_driver(self, pool: Pool, size: int) -> Block | None:
        # alloc_block, get_allocation_size
        segment = pool.segment_bytes
        if size >= MIN_LARGE_BYTES:
            segment = -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        if self.reserved_bytes + segment > self._cap:
            return None
        address = next(self._addresses, None)
        if address is None:
            address, pool.next_address = pool.next_address, pool.next_address + segment
        self._count(segment, "segment_alloc")
        return Block(pool, address, segment)

    def _count(self, size: int, action: str) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.log.append((action, abs(size)))
