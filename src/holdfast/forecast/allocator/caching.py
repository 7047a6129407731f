"""Simulate torch's native CUDA caching allocator for one stream.

The simulation follows ``c10/cuda/CUDACachingAllocator.cpp`` in torch 2.11 to 2.13 step by step:
pools, segments, best fit, splitting and coalescing. Docstrings in this module name the matching C++
functions in parentheses. The simulated allocator hands out addresses but no memory, and expects
sizes that are already rounded.

The simulation does not cover multiple streams, user memory pools, CUDA graphs,
``PYTORCH_ALLOC_CONF`` settings, or the addresses that `cudaMalloc` returns. Those addresses matter
only for choosing between free blocks of the same size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

# The constants below come from c10/core/AllocatorConfig.h of torch 2.13.
# Block sizes are multiples of this number (kMinBlockSize).
MIN_BLOCK_BYTES = 512
# Requests of up to this size are served from the small pool (kSmallSize).
SMALL_BYTES = 1 << 20
# The segment size of the small pool (kSmallBuffer).
SMALL_SEGMENT_BYTES = 2 << 20
# The size of the segments that requests of 1 to 10 MiB share (kLargeBuffer).
LARGE_SEGMENT_BYTES = 20 << 20
# Requests of at least this size get their own segment (kMinLargeAlloc).
MIN_LARGE_BYTES = 10 << 20
# The size of such a segment is rounded up to a multiple of this number (kRoundLarge).
ROUND_LARGE_BYTES = 2 << 20

_UNLIMITED = 1 << 62
# The keys of free blocks are (size << _SHIFT) | address. These integers sort by size and then by
# address, like the blocks in torch's std::set<Block*>.
_SHIFT = 64
# The first addresses of the two pools. They are arbitrary: only the order of addresses matters.
_FIRST_SMALL_ADDRESS = 1 << 44
_FIRST_LARGE_ADDRESS = 1 << 54


class OutOfDeviceMemoryError(Exception):
    """Raised if a request fails even after all cached segments were released.

    In this situation, torch raises an OutOfMemoryError.
    """


class Block:
    """A contiguous part of a segment, either allocated or free."""

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
        """Whether this block is the only one in its segment."""
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
        """Merge free neighbors into this block, which must not be in a pool (try_merge_blocks)."""
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
    """The free blocks in one of the two pools, small or large, sorted for best fit (BlockPool).

    Args:
        least_remainder: A block is split if at least this many bytes would be left over.
        segment_bytes: The size of a segment, except for requests of `MIN_LARGE_BYTES` or more.
        next_address: The address of the next segment that is allocated.
    """

    __slots__ = ("blocks", "keys", "least_remainder", "next_address", "segment_bytes")

    def __init__(self, *, least_remainder: int, segment_bytes: int, next_address: int) -> None:
        self.least_remainder = least_remainder
        self.segment_bytes = segment_bytes
        self.next_address = next_address
        # The keys of the free blocks, in ascending order.
        self.keys: list[int] = []
        # The free blocks, by key.
        self.blocks: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Add a free block (insert_into_blocks)."""
        key = (block.size << _SHIFT) | block.address
        insort(self.keys, key)
        self.blocks[key] = block

    def remove(self, block: Block) -> None:
        """Remove a free block that is about to be merged or released."""
        key = (block.size << _SHIFT) | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]

    def take_best_fit(self, size: int) -> Block | None:
        """Remove and return the smallest free block that is large enough (get_free_block).

        Returns:
            None if no free block is large enough.
        """
        index = bisect_left(self.keys, size << _SHIFT)
        if index == len(self.keys):
            return None
        return self.blocks.pop(self.keys.pop(index))


class CachingAllocator:
    """The caching allocator of one device.

    Args:
        cap_bytes: How many bytes the driver can provide, or None for no limit.
        addresses: The addresses of the segments in the order in which they are allocated, if they
            are known from a recording.

    Attributes:
        log: The allocations and frees of segments, in order. Each entry consists of the action,
            named as in torch's memory snapshots, and the size in bytes.
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
        """Allocate a block (malloc, alloc_found_block).

        Args:
            size: The size in bytes, rounded by `replay.round_sizes`.

        Raises:
            OutOfDeviceMemoryError: If there is not enough memory even after releasing the cache.
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
        """Free a block and merge it with its free neighbors (free_block)."""
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
                    self._log_segment(-block.size, "segment_free")

    def _new_segment(self, pool: Pool, size: int) -> Block:
        """Allocate a segment, releasing the cache if necessary, and return its block (malloc)."""
        block = self._ask_driver(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._ask_driver(pool, size)
        if block is None:
            raise OutOfDeviceMemoryError
        return block

    def _ask_driver(self, pool: Pool, size: int) -> Block | None:
        """Return the block of a new segment, or None if the driver has too little memory left.

        The matching C++ functions are alloc_block and get_allocation_size.
        """
        segment_bytes = pool.segment_bytes
        if size >= MIN_LARGE_BYTES:
            segment_bytes = -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
        if self.reserved_bytes + segment_bytes > self._cap_bytes:
            return None
        address = next(self._addresses, None)
        if address is None:
            address = pool.next_address
            pool.next_address += segment_bytes
        self._log_segment(segment_bytes, "segment_alloc")
        return Block(pool, address, segment_bytes)

    def _log_segment(self, size: int, action: str) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.log.append((action, abs(size)))
