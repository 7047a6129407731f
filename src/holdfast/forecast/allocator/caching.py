"""Simulate CUDA's native caching allocator, for one stream.

It follows ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.11 to 2.13 step by step: pools,
segments, best fit, splitting and coalescing. Docstrings name the functions there. It hands out
numbers, never memory, and expects sizes that are already rounded. Not simulated: several streams,
user memory pools, CUDA graphs, the settings of ``PYTORCH_ALLOC_CONF``, and the addresses returned
by `cudaMalloc`, which only break ties.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

# The constants below are those of c10/core/AllocatorConfig.h of torch 2.13.
# Every block is a multiple of this (kMinBlockSize).
MIN_BLOCK_BYTES = 512
# The largest request of the small pool (kSmallSize).
SMALL_BYTES = 1 << 20
# The segments of the small pool (kSmallBuffer).
SMALL_SEGMENT_BYTES = 2 << 20
# The segments into which requests of 1 to 10 MiB are packed (kLargeBuffer).
LARGE_SEGMENT_BYTES = 20 << 20
# Requests of at least this size get their own segment (kMinLargeAlloc).
MIN_LARGE_BYTES = 10 << 20
# The size of such a segment is a multiple of this (kRoundLarge).
ROUND_LARGE_BYTES = 2 << 20

_UNLIMITED = 1 << 62
# A key of the free list is (size << _SHIFT) | address: one integer that sorts like torch's
# std::set<Block*> does, by size and then by address.
_SHIFT = 64
# The first addresses of the two pools. Only their order matters.
_FIRST_SMALL_ADDRESS = 1 << 44
_FIRST_LARGE_ADDRESS = 1 << 54


class OutOfDeviceMemoryError(Exception):
    """No memory is left, even after the whole cache was released.

    torch raises its OutOfMemoryError here.
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

    @property
    def is_whole_segment(self) -> bool:
        """Whether the segment has no other block."""
        return self.previous is None and self.following is None

    def insert_between(self, before: Block | None, after: Block | None) -> None:
        """Insert this block between two neighbors in a segment (Block::splice)."""
        self.previous = before
        self.following = after
        if before is not None:
            before.following = self
        if after is not None:
            after.previous = self

    def merge_free_neighbors(self) -> None:
        """Merge free neighbors into this block, which is in no free list (try_merge_blocks)."""
        for neighbor in (self.previous, self.following):
            if neighbor is None or neighbor.allocated:
                continue
            neighbor.pool.remove(neighbor)
            self.address = min(self.address, neighbor.address)
            self.size += neighbor.size
            if neighbor is self.previous:
                self.insert_between(neighbor.previous, self.following)
            else:
                self.insert_between(self.previous, neighbor.following)


class Pool:
    """The free blocks of one size class, sorted for best fit (BlockPool).

    Args:
        least_remainder: The smallest remainder of a block that is split off.
        segment_bytes: The size of a segment, except for the largest requests.
        next_address: The address of the next segment.
    """

    __slots__ = ("blocks", "keys", "least_remainder", "next_address", "segment_bytes")

    def __init__(self, *, least_remainder: int, segment_bytes: int, next_address: int) -> None:
        self.least_remainder = least_remainder
        self.segment_bytes = segment_bytes
        self.next_address = next_address
        # The keys of the free blocks in ascending order, and the blocks by key.
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

    def take_best_fit(self, size: int) -> Block | None:
        """Take the smallest block that is large enough, or return None (get_free_block)."""
        index = bisect_left(self.keys, size << _SHIFT)
        if index == len(self.keys):
            return None
        return self.blocks.pop(self.keys.pop(index))


class CachingAllocator:
    """The caching allocator of one device.

    Args:
        cap_bytes: The memory that the driver can provide; None for no limit.
        addresses: The addresses of the segments in order, if they are known from a recording.

    Attributes:
        log: The requests to the driver: the action, named as in torch's own traces, and bytes.
    """

    def __init__(
        self, *, cap_bytes: int | None = None, addresses: Iterator[int] | None = None
    ) -> None:
        self._small = Pool(
            least_remainder=MIN_BLOCK_BYTES,
            segment_bytes=SMALL_SEGMENT_BYTES,
            next_address=_FIRST_SMALL_ADDRESS,
        )
        self._large = Pool(
            least_remainder=SMALL_BYTES + 1,
            segment_bytes=LARGE_SEGMENT_BYTES,
            next_address=_FIRST_LARGE_ADDRESS,
        )
        self._cap_bytes = _UNLIMITED if cap_bytes is None else cap_bytes
        self._addresses = iter(()) if addresses is None else addresses
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self.allocated_bytes = 0
        self.peak_allocated_bytes = 0
        self.retries = 0
        self.log: list[tuple[str, int]] = []

    def allocate(self, size: int) -> Block:
        """Return a block for a request (malloc, alloc_found_block).

        Args:
            size: Bytes, rounded as `replay.round_sizes` does.

        Raises:
            OutOfDeviceMemoryError: If no memory is left, even after the cache was released.
        """
        pool = self._small if size <= SMALL_BYTES else self._large
        block = pool.take_best_fit(size)
        if block is None:
            block = self._new_segment(pool, size)
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
        """Take a block back, and merge it with its free neighbors (free_block)."""
        assert block.allocated
        self.allocated_bytes -= block.size
        block.allocated = False
        block.merge_free_neighbors()
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Release all segments that are entirely free (release_cached_blocks)."""
        for pool in (self._large, self._small):
            for block in [pool.blocks[key] for key in pool.keys]:
                if block.is_whole_segment:
                    pool.remove(block)
                    self._count(-block.size, "segment_free")

    def _new_segment(self, pool: Pool, size: int) -> Block:
        """Return the block of a new segment, after releasing the cache if necessary (malloc)."""
        block = self._ask_driver(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._ask_driver(pool, size)
        if block is None:
            raise OutOfDeviceMemoryError
        return block

    def _ask_driver(self, pool: Pool, size: int) -> Block | None:
        """Return a new segment, or None if memory ran out (alloc_block, get_allocation_size)."""
        segment_bytes = pool.segment_bytes
        if size >= MIN_LARGE_BYTES:
            segment_bytes = -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        if self.reserved_bytes + segment_bytes > self._cap_bytes:
            return None
        address = next(self._addresses, None)
        if address is None:
            address = pool.next_address
            pool.next_address += segment_bytes
        self._count(segment_bytes, "segment_alloc")
        return Block(pool, address, segment_bytes)

    def _count(self, size: int, action: str) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.log.append((action, abs(size)))
