"""The blocks and free lists of the simulated caching allocator, and how blocks are split off, joined and found.

The names of the functions of ``c10/cuda/CUDACachingAllocator.cpp`` that each follows stand beside it.

Does not: decide what to allocate or give back, or count bytes (``caching_allocator``).
"""

from __future__ import annotations

from bisect import bisect_left, insort

SHIFT = 64  # a key of the free list is (size << SHIFT) | address: one integer that sorts as std::set<Block*> does
# An expandable segment reserves addresses for 9/8 of the device's memory. Only the order of magnitude matters, so it
# is taken for a device of 1 TiB.
_ADDRESSES_BYTES = 9 << 37


class Block:
    """A part of a segment.

    Args:
        pool: Pool that it belongs to.
        address: Where it starts.
        size: In bytes.
        mapped: False for addresses of an expandable segment that have no memory.
    """

    __slots__ = ("address", "allocated", "born", "following", "mapped", "pool", "previous", "size")

    def __init__(self, pool: Pool, address: int, size: int, *, mapped: bool = True) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.mapped = mapped
        self.allocated = False
        self.born = 0
        self.previous: Block | None = None
        self.following: Block | None = None


class Pool:
    """The free blocks of one size class, best fit first (BlockPool)."""

    __slots__ = ("blocks", "calls", "handle_bytes", "is_small", "keys", "least_remainder", "next_address", "unmapped")

    def __init__(self, *, is_small: bool, least_remainder: int, handle_bytes: int, next_address: int) -> None:
        self.is_small = is_small
        self.least_remainder = least_remainder  # a smaller one is not split off
        self.handle_bytes = handle_bytes  # what an expandable segment grows by
        self.next_address = -(-next_address // handle_bytes) * handle_bytes
        self.keys: list[int] = []
        self.blocks: dict[int, Block] = {}
        self.unmapped: list[Block] = []  # by address
        self.calls = 0  # get_free_blocks_call_count

    def add(self, block: Block) -> None:
        """Make a block available (insert_into_blocks)."""
        key = (block.size << SHIFT) | block.address
        insort(self.keys, key)
        self.blocks[key] = block
        block.born = self.calls

    def remove(self, block: Block) -> None:
        """Make a block unavailable."""
        key = (block.size << SHIFT) | block.address
        del self.keys[bisect_left(self.keys, key)]
        del self.blocks[key]

    def free_blocks(self) -> list[Block]:
        """Return the available blocks, the smallest first, and the lowest of those of a size."""
        return [self.blocks[key] for key in self.keys]


def growable_bytes(block: Block) -> int:
    """Return what a free block could be grown to within its segment (expandable_size in get_free_block)."""
    following = block.following
    return block.size if following is None or following.mapped else block.size + following.size


def insert_between(block: Block, *, before: Block | None, after: Block | None) -> None:
    """Put a new block between two neighbours of a segment (Block::splice)."""
    block.previous, block.following = before, after
    if before is not None:
        before.following = block
    if after is not None:
        after.previous = block


def join_neighbours(block: Block) -> None:
    """Let a block, which is in no list, take in its free neighbours that are mapped as it is (try_merge_blocks)."""
    other = block.previous
    if other is not None and not other.allocated and other.mapped == block.mapped:
        _forget(other)
        block.address = other.address
        block.size += other.size
        block.previous = other.previous
        if other.previous is not None:
            other.previous.following = block
    other = block.following
    if other is not None and not other.allocated and other.mapped == block.mapped:
        _forget(other)
        block.size += other.size
        block.following = other.following
        if other.following is not None:
            other.following.previous = block


def _forget(block: Block) -> None:
    if block.mapped:
        block.pool.remove(block)
    else:
        block.pool.unmapped.remove(block)


def keep_unmapped(block: Block) -> None:
    """Note addresses without memory, in order."""
    insort(block.pool.unmapped, block, key=lambda other: other.address)


def find_addresses(pool: Pool, size: int) -> Block:
    """Return the lowest block from which free and unmapped ones do, else a new segment (find_expandable_block)."""
    for unmapped in pool.unmapped:
        first = unmapped
        if first.previous is not None and not first.previous.allocated:
            first = first.previous
        room, block = 0, first
        while room < size:
            room += block.size
            if block.following is None or block.following.allocated:
                break
            block = block.following
        if room >= size:
            return first
    length = -(-_ADDRESSES_BYTES // pool.handle_bytes) * pool.handle_bytes
    segment = Block(pool, pool.next_address, length, mapped=False)
    pool.next_address += length
    pool.unmapped.append(segment)
    return segment
