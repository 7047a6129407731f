"""Replay a trace with the simulated caching allocator.

A plan fits a device if the replay succeeds within the device's memory. Adding a fixed percentage to
the live bytes would not be accurate enough: on small models, reserved memory was 1.02 to 1.36 times
the live bytes, so any percentage is too high for some jobs and too low for others.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.forecast.allocator.caching import (
    MIN_BLOCK_BYTES,
    Block,
    CachingAllocator,
    OutOfDeviceMemoryError,
)
from holdfast.forecast.trace.events import is_allocation, live_bytes, storage_of

# Shape (events,): allocations and frees, encoded as in `Trace.events`.
Events = npt.NDArray[np.int32]
# Shape (storages,): the requested bytes of each storage, before rounding.
Sizes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The result of replaying a trace.

    Args:
        peak_reserved_bytes: The peak of reserved memory (`torch.cuda.max_memory_reserved`).
        peak_allocated_bytes: The peak of allocated memory, in rounded block sizes
            (`torch.cuda.max_memory_allocated`).
        retries: How often the allocator released its whole cache and tried an allocation again
            (``num_alloc_retries``). A retry is slow on a real device.
        failed_at: The index of the event whose allocation failed, or None if all allocations
            succeeded.
    """

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    retries: int
    failed_at: int | None


def round_sizes(sizes: Sizes) -> Sizes:
    """Round requested sizes up to block sizes, as torch's ``round_size`` does.

    A size of 0 stays 0, because torch allocates no block for an empty tensor.

    Example:
        >>> round_sizes(np.array([0, 1, 513, 1200 << 10])).tolist()
        [0, 512, 1024, 1228800]
    """
    return -(-sizes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def replay(events: Events, sizes: Sizes, *, cap_bytes: int | None = None) -> ReplayResult:
    """Replay a trace, starting with an empty allocator.

    Args:
        events: Allocations and frees, encoded as in `Trace.events`.
        sizes: The requested size of each storage in bytes.
        cap_bytes: How many bytes the driver can provide, or None for no limit.

    Raises:
        ValueError: If an event allocates a storage that is alive, or frees one that is not.
    """
    allocator = CachingAllocator(cap_bytes=cap_bytes)
    failed_at = _replay_events(events, round_sizes(sizes).tolist(), allocator)
    return ReplayResult(
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        retries=allocator.retries,
        failed_at=failed_at,
    )


def _replay_events(events: Events, sizes: list[int], allocator: CachingAllocator) -> int | None:
    """Replay events up to the first allocation that fails.

    Returns:
        The index of the event whose allocation failed, or None if all allocations succeeded.
    """
    # The block of each live storage. A storage of 0 bytes has no block.
    live: list[Block | None] = [None] * len(sizes)
    storages = storage_of(events).tolist()
    allocates = is_allocation(events).tolist()
    for index, storage in enumerate(storages):
        size = sizes[storage]
        block = live[storage]
        if allocates[index]:
            if block is not None:
                raise ValueError(f"event {index} allocates storage {storage}, which is alive")
            if size:
                try:
                    live[storage] = allocator.allocate(size)
                except OutOfDeviceMemoryError:
                    return index
        elif block is not None:
            live[storage] = None
            allocator.free(block)
        elif size:
            raise ValueError(f"event {index} frees storage {storage}, which is not alive")
    return None


def smallest_cap_bytes(events: Events, sizes: Sizes, *, step_bytes: int = 32 << 20) -> int:
    """Return how many bytes the driver must provide so that a trace can be replayed.

    The result is found by bisection: it is a sufficient cap, and a cap that is at most `step_bytes`
    smaller fails. It is not always the smallest sufficient cap. Releasing the cache changes the
    order of the free blocks, so a larger cap may fail where a smaller one succeeds.
    """
    sufficient = replay(events, sizes).peak_reserved_bytes
    # A cap below the peak of the live bytes is never sufficient.
    insufficient = int(live_bytes(events, sizes, MIN_BLOCK_BYTES).max(initial=0)) - 1
    while sufficient - insufficient > step_bytes:
        middle = (sufficient + insufficient) // 2
        if replay(events, sizes, cap_bytes=middle).failed_at is None:
            sufficient = middle
        else:
            insufficient = middle
    return sufficient
