"""Replaying a trace through the simulated caching allocator.

How much it would reserve, and whether a cap stops it.

The fit test of a plan is "the replay succeeds under the memory that the device can give": a
percentage on top of the live bytes is wrong in both directions (measured 1.02 to 1.36 times on
small models).
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
from holdfast.forecast.trace.events import live_bytes

Events = npt.NDArray[np.int32]  # shape ``(events,)``: s + 1 allocates storage s, -(s + 1) frees it
Sizes = npt.NDArray[np.int64]  # shape ``(storages,)``, bytes as requested


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the allocator did with a trace.

    Args:
        peak_reserved_bytes: The most that it held from the driver
            (`torch.cuda.max_memory_reserved`).
        peak_allocated_bytes: The most that tensors had of it, with rounding
            (`torch.cuda.max_memory_allocated`).
        retries: How often it gave back all that was cached and asked again (``num_alloc_retries``);
            each is slow.
        failed_at: Index of the event that there was no memory for; None if the whole trace was
            played.
    """

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    retries: int
    failed_at: int | None


def round_sizes(sizes: Sizes) -> Sizes:
    """Return what the allocator makes of requested sizes (round_size).

    0 stays 0, since torch does not ask for it.

    Example:
        >>> round_sizes(np.array([0, 1, 513, 1200 << 10])).tolist()
        [0, 512, 1024, 1228800]
    """
    return -(-sizes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES


def replay(events: Events, sizes: Sizes, *, cap_bytes: int | None = None) -> Replay:
    """Play a trace through an empty allocator, which can get `cap_bytes` of the driver.

    ValueError if a storage is freed that does not live, or allocated while it does.
    """
    rounded = round_sizes(sizes).tolist()
    simulated = CachingAllocator(cap_bytes=cap_bytes)
    allocate, free = simulated.allocate, simulated.free
    live: list[Block | None] = [None] * len(rounded)
    failed_at = None
    index = -1
    try:
        for index, event in enumerate(events.tolist()):
            if event > 0:
                size = rounded[event - 1]
                if live[event - 1] is not None:
                    raise ValueError(f"event {index} allocates storage {event - 1}, which is alive")
                if size:
                    live[event - 1] = allocate(size)
            else:
                block = live[-event - 1]
                if block is not None:
                    live[-event - 1] = None
                    free(block)
                elif rounded[-event - 1]:
                    raise ValueError(
                        f"event {index} frees storage {-event - 1}, which does not live"
                    )
    except OutOfDeviceMemoryError:
        failed_at = index
    return Replay(
        peak_reserved_bytes=simulated.peak_reserved_bytes,
        peak_allocated_bytes=simulated.peak_allocated_bytes,
        retries=simulated.retries,
        failed_at=failed_at,
    )


def smallest_cap_bytes(events: Events, sizes: Sizes, *, step_bytes: int = 32 << 20) -> int:
    """Return a cap that suffices while `step_bytes` less does not.

    What a device would have to give.

    Whether a cap suffices is not strictly monotone (a retry changes the order of the free blocks),
    so it need not be the smallest of all.
    """
    enough = replay(events, sizes).peak_reserved_bytes
    short = int(live_bytes(events, sizes, MIN_BLOCK_BYTES).max(initial=0)) - 1
    while enough - short > step_bytes:
        middle = (enough + short) // 2
        if replay(events, sizes, cap_bytes=middle).failed_at is not None:
            short = middle
        else:
            enough = middle
    return enough
