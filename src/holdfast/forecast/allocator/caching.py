"""A simulator of CUDA's native caching allocator, for one stream: pools, segments, best fit, splitting, coalescing.

Follows ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.11 to 2.13 step by step; the name of the function there
stands beside each rule. It hands out numbers, never memory, and takes sizes that are rounded already.

Not simulated: several streams, memory pools of the user, CUDA graphs, the settings of ``PYTORCH_ALLOC_CONF`` other
than ``expandable_segments``, and which addresses `cudaMalloc` gives (only ties depend on them).
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
_SHIFT = 64  # a key of the free list is (size << _SHIFT) | address: one integer that sorts as std::set<Block*> does
# An expandable segment reserves addresses for 9/8 of the device's memory. Only the order of magnitude matters, so it
# is taken for a device of 1 TiB.
_ADDRESSES_BYTES = 9 << 37


class OutOfDeviceMemoryError(Exception):
    """No memory is left, also after all that is cached was given back: torch raises OutOfMemoryError here."""


class Block:
    """A part of a segment; without `mapped`, addresses of an expandable segment that have no memory."""

    __slots__ = ("address", "allocated", "following", "mapped", "pool", "previous", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.mapped = mapped
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
        """Let this block, which is in no list, take in its free neighbours that are mapped as it is."""
        # try_merge_blocks
        for other in (self.previous, self.following):
            if other is None or other.allocated or other.mapped != self.mapped:
                continue
            if other.mapped:
                other.pool.remove(other)
            else:
                other.pool.unmapped.remove(other)
            self.address = min(self.address, other.address)
            self.size += other.size
            before = other.previous if other is self.previous else self.previous
            after = other.following if other is self.following else self.following
            self.insert_between(before, after)


class Pool:
    """The free blocks of one size class, best fit first (BlockPool)."""

    __slots__ = ("blocks", "handle_bytes", "is_small", "keys", "least_remainder", "next_address", "unmapped")

    def __init__(self, *, is_small: bool, least_remainder: int, handle_bytes: int, next_address: int) -> None:
        self.is_small = is_small
        self.least_remainder = least_remainder  # a smaller one is not split off
        self.handle_bytes = handle_bytes  # what an expandable segment grows by
        self.next_address = -(-next_address // handle_bytes) * handle_bytes
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[Block] = []  # by address

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

    def keep_unmapped(self, block: Block) -> None:
        """Note addresses without memory, in order."""
        insort(self.unmapped, block, key=lambda other: other.address)

    def find_addresses(self, size: int) -> Block:
        """Return the lowest block from which free and unmapped ones suffice, else a new segment."""
        # find_expandable_block
        for unmapped in self.unmapped:
            first = unmapped
            if first.previous is not None and not first.previous.allocated:
                first = first.previous
            available, block = 0, first
            while available < size:
                available += block.size
                if block.following is None or block.following.allocated:
                    break
                block = block.following
            if available >= size:
                return first
        length = -(-_ADDRESSES_BYTES // self.handle_bytes) * self.handle_bytes
        segment = Block(self, self.next_address, length, mapped=False)
        self.next_address += length
        self.unmapped.append(segment)
        return segment


class CachingAllocator:
    """What the caching allocator of one device would do, of which the driver can give `cap_bytes`.

    `addresses` are those of the segments in order, where they are known from a recording.
    """

    def __init__(
        self,
        *,
        expandable_segments: bool = False,
        cap_bytes: int | None = None,
        addresses: Iterator[int] | None = None,
    ) -> None:
        self._small = Pool(
            is_small=True,
            least_remainder=MIN_BLOCK_BYTES,
            handle_bytes=SMALL_SEGMENT_BYTES,
            next_address=1 << 44,
        )
        self._large = Pool(
            is_small=False,
            least_remainder=MIN_BLOCK_BYTES if expandable_segments else SMALL_BYTES + 1,
            handle_bytes=LARGE_SEGMENT_BYTES,
            next_address=1 << 54,
        )
        self._expandable = expandable_segments
        self._cap = _UNLIMITED if cap_bytes is None else cap_bytes
        self._addresses = iter(()) if addresses is None else addresses
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.retries = 0
        self.log: list[tuple[str, int]] = []  # what the driver was asked for: action as in torch's traces, bytes

    def allocate(self, size: int) -> Block:
        """Return a block for a request, rounded as `replay.round_sizes` does (malloc, alloc_found_block).

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
        """Give back what is free as a whole segment, or as whole handles of one (release_cached_blocks)."""
        for pool in (self._large, self._small):
            for block in [pool.blocks[key] for key in pool.keys]:
                if self._expandable:
                    self._unmap(block)
                elif block.previous is None and block.following is None:
                    pool.remove(block)
                    self._count(-block.size, "segment_free")

    def _find_free(self, pool: Pool, size: int) -> Block | None:
        # get_free_block
        keys, blocks = pool.keys, pool.blocks
        index = bisect_left(keys, size << _SHIFT)
        if index == len(keys):
            return None
        if self._expandable:
            # A block at the end of the mapped part counts with all that it can grow to, so that it is taken last.
            growable = _growable_bytes(blocks[keys[index]])
            while index + 1 < len(keys) and (next_growable := _growable_bytes(blocks[keys[index + 1]])) < growable:
                index, growable = index + 1, next_growable
        return blocks.pop(keys.pop(index))

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
        if self._expandable:
            return self._map_enough(pool, size)
        segment = pool.handle_bytes
        if not pool.is_small and size >= MIN_LARGE_BYTES:
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

    def _map_enough(self, pool: Pool, size: int) -> Block | None:
        # try_allocate_expandable_block: a list of free and unmapped blocks becomes one free block
        candidate = pool.find_addresses(size)
        if not candidate.mapped and not self._map(candidate, min(candidate.size, size)):
            return None
        while candidate.size < size:
            following = candidate.following
            assert following is not None
            if not self._map(following, min(size - candidate.size, following.size)):
                return None
            candidate = following
        pool.remove(candidate)
        return candidate

    def _map(self, block: Block, size: int) -> bool:
        # map_block: all the handles that are needed, or none
        pool = block.pool
        mapped = -(-size // pool.handle_bytes) * pool.handle_bytes
        if self.reserved_bytes + mapped > self._cap:
            return False
        pool.unmapped.remove(block)
        block.mapped = True
        if mapped < block.size:
            rest = Block(pool, block.address + mapped, block.size - mapped, mapped=False)
            rest.insert_between(block, block.following)
            block.size = mapped
            pool.keep_unmapped(rest)
        block.join_neighbours()
        pool.add(block)
        self._count(mapped, "segment_map")
        return True

    def _unmap(self, block: Block) -> None:
        # unmap_block: the handles that lie in the block as a whole
        pool = block.pool
        begin = -(-block.address // pool.handle_bytes) * pool.handle_bytes
        end = (block.address + block.size) // pool.handle_bytes * pool.handle_bytes
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            head = Block(pool, block.address, begin - block.address)
            head.insert_between(block.previous, block)
            pool.add(head)
        if end < block.address + block.size:
            tail = Block(pool, end, block.address + block.size - end)
            tail.insert_between(block, block.following)
            pool.add(tail)
        block.address, block.size, block.mapped = begin, end - begin, False
        block.join_neighbours()
        if block.previous is not None or block.following is not None:  # else the segment is gone as a whole
            pool.keep_unmapped(block)
        self._count(begin - end, "segment_unmap")


def _growable_bytes(block: Block) -> int:
    """Return what a free block could be grown to within its segment (expandable_size in get_free_block)."""
    following = block.following
    return block.size if following is None or following.mapped else block.size + following.size
