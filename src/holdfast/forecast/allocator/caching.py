"""A simulator of CUDA's native caching allocator, for one stream: pools, segments, best fit, splitting, coalescing.

Follows ``c10/cuda/CUDACachingAllocator.cpp`` of torch 2.11 to 2.13 step by step; the name of the function there
stands beside each rule. It hands out numbers, never memory, and takes sizes that are rounded already.

Does not: replay traces (``allocator``), read recorded ones (``recorded_traces``), or know a device. Not simulated:
several streams, memory pools of the user, CUDA graphs, and which addresses `cudaMalloc` gives (only ties depend on
them).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from holdfast.forecast.allocator.blocks import (
    SHIFT,
    Block,
    Pool,
    find_addresses,
    growable_bytes,
    insert_between,
    join_neighbours,
    keep_unmapped,
)

# c10/core/AllocatorConfig.h of torch 2.13
MIN_BLOCK_BYTES = 512  # kMinBlockSize
SMALL_BYTES = 1 << 20  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT_BYTES = 2 << 20  # kSmallBuffer
MIN_LARGE_BYTES = 10 << 20  # kMinLargeAlloc: requests below it take a segment of the large size
ROUND_LARGE_BYTES = 2 << 20  # kRoundLarge
_UNLIMITED = 1 << 62


class OutOfDeviceMemoryError(Exception):
    """No memory is left, also after all that is cached was given back: torch raises OutOfMemoryError here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentEvent:
    """The allocator asked the driver for memory, or gave some back.

    Args:
        action: As torch's traces name it: ``segment_alloc``, ``segment_free``, ``segment_map`` or ``segment_unmap``.
        size_bytes: How much.
        address: Where.
    """

    action: str
    size_bytes: int
    address: int


class CachingAllocator:
    """What the caching allocator of one device would do.

    Args:
        expandable_segments: Grow one segment for each pool instead of adding segments.
        large_segment_bytes: What requests of 1 to 10 MiB are packed into.
        max_split_bytes: Blocks of this size are not split; None for no such limit.
        max_non_split_rounding_bytes: How much larger than a request such a block may be.
        garbage_collection_threshold: Share of `allowed_bytes` above which old blocks are given back; 0 for never.
        cap_bytes: What the driver can give; None for no limit.
        allowed_bytes: What `torch.cuda.set_per_process_memory_fraction` allows; None where it was not called.
        addresses: Of the segments, in order, where they are known from a recording.
        keep_log: Note in `log` what the driver was asked for.
    """

    def __init__(
        self,
        *,
        expandable_segments: bool = False,
        large_segment_bytes: int = 20 << 20,
        max_split_bytes: int | None = None,
        max_non_split_rounding_bytes: int = 20 << 20,
        garbage_collection_threshold: float = 0.0,
        cap_bytes: int | None = None,
        allowed_bytes: int | None = None,
        addresses: Iterator[int] | None = None,
        keep_log: bool = False,
    ) -> None:
        least = MIN_BLOCK_BYTES if expandable_segments else SMALL_BYTES + 1
        self._small = Pool(
            is_small=True, least_remainder=MIN_BLOCK_BYTES, handle_bytes=SMALL_SEGMENT_BYTES, next_address=1 << 44
        )
        self._large = Pool(
            is_small=False, least_remainder=least, handle_bytes=large_segment_bytes, next_address=1 << 54
        )
        self._expandable = expandable_segments
        self._max_split = _UNLIMITED if max_split_bytes is None else max_split_bytes
        self._rounding = max_non_split_rounding_bytes
        self._cap = _UNLIMITED if cap_bytes is None else cap_bytes
        self._allowed = _UNLIMITED if allowed_bytes is None else allowed_bytes
        # Collecting needs a limit to take the share of: malloc() asks allowed_memory_maximum.has_value().
        self._gc_bytes = (
            int(garbage_collection_threshold * allowed_bytes)
            if allowed_bytes is not None and garbage_collection_threshold > 0.0
            else None
        )
        self._plain = not expandable_segments and max_split_bytes is None and self._gc_bytes is None
        self._addresses = iter(()) if addresses is None else addresses
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.retries = 0
        self.log: list[SegmentEvent] | None = [] if keep_log else None

    def allocate(self, size: int) -> Block:
        """Return a block for a request (malloc, alloc_found_block).

        Args:
            size: In bytes, more than 0, rounded as `allocator.round_sizes` does.

        Raises:
            OutOfDeviceMemoryError: There is no room, also after all that is cached was given back.
        """
        pool = self._small if size <= SMALL_BYTES else self._large
        block: Block | None = None
        if self._plain:
            keys = pool.keys
            index = bisect_left(keys, size << SHIFT)
            if index < len(keys):
                block = pool.blocks.pop(keys.pop(index))
        else:
            block = self._find_free(pool, size)
        if block is None:
            block = self._grow(pool, size)
        remaining = block.size - size
        if remaining >= pool.least_remainder and (pool.is_small or self._expandable or size < self._max_split):
            rest = Block(pool, block.address + size, remaining)
            following = rest.following = block.following
            if following is not None:
                following.previous = rest
            rest.previous = block
            block.following = rest
            block.size = size
            pool.add(rest)
        block.allocated = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back and join it with free neighbours (free_block, try_merge_blocks).

        Args:
            block: What `allocate` returned; not to be used again.
        """
        assert block.allocated
        self.allocated_bytes -= block.size
        block.allocated = False
        join_neighbours(block)
        block.pool.add(block)

    def adopt(self, address: int, size: int, allocated: Iterable[tuple[int, int]]) -> dict[int, Block]:
        """Take over a segment that was there before, and return its allocated blocks by address.

        Args:
            address: Where it starts.
            size: In bytes.
            allocated: Address and size of its allocated blocks, in order; the rest of it is free.
        """
        assert not self._expandable
        pool = self._small if size == SMALL_SEGMENT_BYTES else self._large
        end, last = address, None
        found: dict[int, Block] = {}
        for start, length in (*allocated, (address + size, 0)):
            for at, room, taken in ((end, start - end, False), (start, length, True)):
                if room:
                    block = Block(pool, at, room)
                    insert_between(block, before=last, after=None)
                    block.allocated, last = taken, block
                    self.allocated_bytes += room * taken
                    if taken:
                        found[at] = block
                    else:
                        pool.add(block)
            end = start + length
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return found

    def empty_cache(self) -> None:
        """Give back what is free as a whole segment, or as whole handles of one (release_cached_blocks)."""
        for pool in (self._large, self._small):
            for block in pool.free_blocks():
                if self._expandable:
                    self._unmap(block)
                elif block.previous is None and block.following is None:
                    self._release(block)

    def _find_free(self, pool: Pool, size: int) -> Block | None:
        # get_free_block
        pool.calls += 1
        keys, blocks = pool.keys, pool.blocks
        index = bisect_left(keys, size << SHIFT)
        if index == len(keys):
            return None
        block = blocks[keys[index]]
        if self._expandable:
            # A block at the end of the mapped part counts with all that it can grow to, so that it is taken last.
            while index + 1 < len(keys) and growable_bytes(further := blocks[keys[index + 1]]) < growable_bytes(
                block
            ):
                block, index = further, index + 1
        if size < self._max_split <= block.size:
            return None
        if size >= self._max_split and block.size >= size + self._rounding:
            return None
        pool.remove(block)
        return block

    def _grow(self, pool: Pool, size: int) -> Block:
        # malloc: collect garbage, try; give back enough, try; give back all, try; out of memory.
        if self._gc_bytes is not None:
            self._collect_garbage(self._gc_bytes)
        block = self._ask_driver(pool, size)
        if block is None and self._release_enough(pool, size):
            block = self._ask_driver(pool, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._ask_driver(pool, size)
        if block is None:
            raise OutOfDeviceMemoryError
        return block

    def _ask_driver(self, pool: Pool, size: int) -> Block | None:
        # alloc_block; the allowed sum is compared with a whole segment also where less would be mapped
        segment = self._segment_bytes(pool, size)
        if self.reserved_bytes + segment > self._allowed:
            return None
        if self._expandable:
            return self._map_enough(pool, size)
        if self.reserved_bytes + segment > self._cap:
            return None
        address = next(self._addresses, None)
        if address is None:
            address, pool.next_address = pool.next_address, pool.next_address + segment
        self._count(segment, "segment_alloc", address)
        return Block(pool, address, segment)

    def _segment_bytes(self, pool: Pool, size: int) -> int:
        # get_allocation_size
        if pool.is_small:
            return SMALL_SEGMENT_BYTES
        if size < MIN_LARGE_BYTES:
            return self._large.handle_bytes
        return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES

    def _count(self, size: int, action: str, address: int) -> None:
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        if self.log is not None:
            self.log.append(SegmentEvent(action=action, size_bytes=abs(size), address=address))

    def _release(self, block: Block) -> None:
        # release_block
        assert block.previous is None
        assert block.following is None
        block.pool.remove(block)
        self._count(-block.size, "segment_free", block.address)

    def _release_enough(self, pool: Pool, size: int) -> bool:
        # release_available_cached_blocks: one unsplit block that is large enough, else several, the largest first
        if self._max_split == _UNLIMITED:
            return False
        wanted = max(size, self._max_split)
        free = pool.free_blocks()
        index = bisect_left(pool.keys, wanted << SHIFT)
        if index < len(free) and not self._expandable:
            self._release(free[index])
            return True
        released = 0
        for block in reversed(free[:index]):
            if released >= wanted or block.size < self._max_split:
                break
            if not self._expandable:
                released += block.size
                self._release(block)
        return released >= wanted

    def _collect_garbage(self, threshold_bytes: int) -> None:
        # garbage_collect_cached_blocks: whole segments that were not used for longer than the average
        if self.reserved_bytes <= threshold_bytes:
            return
        target = self.reserved_bytes - threshold_bytes
        calls = self._large.calls
        unsplit = [block for block in self._large.free_blocks() if block.previous is None and block.following is None]
        age = sum(calls - block.born for block in unsplit)
        reclaimed, count, found = 0, len(unsplit), True
        while reclaimed < target and found and count > 0:
            found, oldest = False, age / count
            for block in list(unsplit):
                if not self._expandable and calls - block.born >= oldest:
                    found = True
                    reclaimed += block.size
                    age -= calls - block.born
                    count -= 1
                    unsplit.remove(block)
                    self._release(block)

    def _map_enough(self, pool: Pool, size: int) -> Block | None:
        # try_allocate_expandable_block: a list of free and unmapped blocks becomes one free block
        candidate = find_addresses(pool, size)
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
        address = block.address
        pool.unmapped.remove(block)
        block.mapped = True
        if mapped < block.size:
            rest = Block(pool, block.address + mapped, block.size - mapped, mapped=False)
            insert_between(rest, before=block, after=block.following)
            block.size = mapped
            keep_unmapped(rest)
        join_neighbours(block)
        pool.add(block)
        self._count(mapped, "segment_map", address)
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
            insert_between(head, before=block.previous, after=block)
            pool.add(head)
        if end < block.address + block.size:
            tail = Block(pool, end, block.address + block.size - end)
            insert_between(tail, before=block, after=block.following)
            pool.add(tail)
        block.address, block.size, block.mapped = begin, end - begin, False
        join_neighbours(block)
        if block.previous is not None or block.following is not None:  # else the segment is gone as a whole
            keep_unmapped(block)
        self._count(begin - end, "segment_unmap", begin)
