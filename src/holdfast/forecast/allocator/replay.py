"""Replaying a trace through the simulated caching allocator: how much it would reserve, and whether a cap stops it.

The fit test of a plan is "the replay succeeds under the memory that the device can give": a percentage on top of the
live bytes is wrong in both directions (measured 1.02 to 1.36 times on small models).

Does not: know a device (``devices``, ``fit``), or where traces come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holdfast.core.errors import PolicyError
from holdfast.forecast.allocator.blocks import Block
from holdfast.forecast.allocator.caching import MIN_BLOCK_BYTES, CachingAllocator, OutOfDeviceMemoryError

_MIB = 1 << 20
_SMALLEST_SPLIT_MIB = 20  # max_split_size_mb too small, must be >= 20 (parseMaxSplitSize)
_INTERVALS = 16  # of roundup_power2_divisions: from 1 MiB to 64 GiB, kRoundUpPowerOfTwoIntervals


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorOptions:
    """What ``PYTORCH_ALLOC_CONF`` would say; torch's defaults.

    Args:
        expandable_segments: Grow one segment for each pool instead of adding segments.
        roundup_power2_divisions: Requests are rounded up to such a part of the power of two below them; 0 for
            multiples of 512 bytes. One number for all sizes, or 16 for those from 1 MiB, 2 MiB … on.
        max_split_size_mb: Blocks of this size are not split; None for no such limit.
        max_non_split_rounding_mb: How much larger than a request such a block may be.
        large_segment_size_mb: What requests of 1 to 10 MiB are packed into.
        garbage_collection_threshold: Share of the allowed memory above which old blocks are given back; acts only
            where `set_per_process_memory_fraction` was called.

    Raises:
        PolicyError: torch would refuse it (H418).
    """

    expandable_segments: bool = False
    roundup_power2_divisions: int | tuple[int, ...] = 0
    max_split_size_mb: int | None = None
    max_non_split_rounding_mb: int = 20
    large_segment_size_mb: int = 20
    garbage_collection_threshold: float = 0.0

    def __post_init__(self) -> None:
        divisions = self._divisions()
        if len(divisions) != _INTERVALS or any(value < 0 or value & (value - 1) for value in divisions):
            _refuse("roundup_power2_divisions", self.roundup_power2_divisions, "0 or a power of 2, once or 16 times")
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            value = getattr(self, name)
            if value is not None and value < _SMALLEST_SPLIT_MIB:
                _refuse(name, value, f"at least {_SMALLEST_SPLIT_MIB}")
        if self.large_segment_size_mb < _SMALLEST_SPLIT_MIB // 2 or self.large_segment_size_mb % 2:
            _refuse("large_segment_size_mb", self.large_segment_size_mb, "an even number of at least 10")
        if not 0.0 <= self.garbage_collection_threshold < 1.0:
            _refuse("garbage_collection_threshold", self.garbage_collection_threshold, "within 0 and 1, without 1")

    def setting(self) -> str:
        """Return what ``PYTORCH_ALLOC_CONF`` has to be; empty for torch's defaults.

        Example:
            >>> AllocatorOptions(expandable_segments=True, max_split_size_mb=128).setting()
            'expandable_segments:True,max_split_size_mb:128'
        """
        parts = []
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value == type(self).__dataclass_fields__[name].default:
                continue
            if isinstance(value, tuple):
                value = "[" + ",".join(f"{1 << index}:{part}" for index, part in enumerate(value)) + "]"
            parts.append(f"{name}:{value}")
        return ",".join(parts)

    def make(
        self,
        *,
        cap_bytes: int | None = None,
        allowed_bytes: int | None = None,
        addresses: Iterator[int] | None = None,
        keep_log: bool = False,
    ) -> CachingAllocator:
        """Return an empty allocator that works so.

        Args:
            cap_bytes: What the driver can give; None for no limit.
            allowed_bytes: What `torch.cuda.set_per_process_memory_fraction` allows; None where it was not called.
            addresses: Of the segments, in order, where they are known.
            keep_log: Whether it notes what the driver was asked for.
        """
        return CachingAllocator(
            expandable_segments=self.expandable_segments,
            large_segment_bytes=self.large_segment_size_mb * _MIB,
            max_split_bytes=None if self.max_split_size_mb is None else self.max_split_size_mb * _MIB,
            max_non_split_rounding_bytes=self.max_non_split_rounding_mb * _MIB,
            garbage_collection_threshold=self.garbage_collection_threshold,
            cap_bytes=cap_bytes,
            allowed_bytes=allowed_bytes,
            addresses=addresses,
            keep_log=keep_log,
        )

    def _divisions(self) -> tuple[int, ...]:
        given = self.roundup_power2_divisions
        return given if isinstance(given, tuple) else (given,) * _INTERVALS


def _refuse(name: str, value: object, limit: str) -> None:
    raise PolicyError(
        f"{name}={value!r}",
        limit=f"torch takes {limit}",
        fix=f"change {name}, or leave it out for torch's default.",
        rule="H418",
    )


DEFAULT_ALLOCATOR = AllocatorOptions()
EXPANDABLE_ALLOCATOR = AllocatorOptions(expandable_segments=True)


def round_sizes(sizes: npt.NDArray[np.int64], options: AllocatorOptions = DEFAULT_ALLOCATOR) -> npt.NDArray[np.int64]:
    """Return what the allocator makes of requested sizes (round_size); 0 stays 0, since torch does not ask for it.

    Args:
        sizes: Shape ``(storages,)``, bytes.
        options: How it rounds.

    Example:
        >>> round_sizes(np.array([0, 1, 513, 1200 << 10])).tolist()
        [0, 512, 1024, 1228800]
        >>> round_sizes(np.array([1200 << 10]), AllocatorOptions(roundup_power2_divisions=4)).tolist()
        [1310720]
    """
    rounded = -(-sizes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
    if not any(options._divisions()):
        return rounded
    exponent = np.frexp(np.maximum(sizes, 1).astype(np.float64))[1].astype(np.int64) - 1  # of the power of 2 below
    table = np.array(options._divisions(), dtype=np.int64)
    divisions = table[np.clip(exponent - 20, 0, _INTERVALS - 1)]
    applies = (divisions > 1) & (sizes > MIN_BLOCK_BYTES * divisions)
    step = np.maximum((np.int64(1) << exponent) // np.maximum(divisions, 1), 1)
    return np.where(applies, -(-sizes // step) * step, rounded)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the allocator did with a trace.

    Args:
        peak_reserved_bytes: The most that it held from the driver (`torch.cuda.max_memory_reserved`).
        peak_allocated_bytes: The most that tensors had of it, with rounding (`torch.cuda.max_memory_allocated`).
        reserved_bytes: What it held at the end.
        allocated_bytes: What tensors had at the end.
        retries: How often it gave back all that was cached and asked again (``num_alloc_retries``); each is slow.
        failed_at: Index of the event that there was no memory for; None if the whole trace was played.
    """

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    allocated_bytes: int
    retries: int
    failed_at: int | None

    @property
    def failed(self) -> bool:
        """Whether memory ran out."""
        return self.failed_at is not None


def replay(
    events: npt.NDArray[np.int32],
    sizes: npt.NDArray[np.int64],
    *,
    allocator: AllocatorOptions = DEFAULT_ALLOCATOR,
    cap_bytes: int | None = None,
    allowed_bytes: int | None = None,
) -> Replay:
    """Play a trace through an empty allocator.

    Args:
        events: Shape ``(events,)``: ``s + 1`` allocates storage ``s``, ``-(s + 1)`` frees it.
        sizes: Shape ``(storages,)``, bytes as requested.
        allocator: How the allocator works.
        cap_bytes: What the driver can give; None for no limit.
        allowed_bytes: What `torch.cuda.set_per_process_memory_fraction` allows; None where it is not called.

    Raises:
        ValueError: A storage is freed that does not live, or allocated while it does.
    """
    rounded = round_sizes(sizes, allocator).tolist()
    simulated = allocator.make(cap_bytes=cap_bytes, allowed_bytes=allowed_bytes)
    allocate, free = simulated.allocate, simulated.free
    live: list[Block | None] = [None] * len(rounded)
    failed_at = None
    index = -1
    try:
        for index, event in enumerate(events.tolist()):
            if event > 0:
                size = rounded[event - 1]
                if live[event - 1] is not None:
                    raise ValueError(f"event {index} allocates storage {event - 1}, which lives")
                if size:
                    live[event - 1] = allocate(size)
            else:
                block = live[-event - 1]
                if block is not None:
                    live[-event - 1] = None
                    free(block)
                elif rounded[-event - 1]:
                    raise ValueError(f"event {index} frees storage {-event - 1}, which does not live")
    except OutOfDeviceMemoryError:
        failed_at = index
    return Replay(
        peak_reserved_bytes=simulated.peak_reserved_bytes,
        peak_allocated_bytes=simulated.peak_allocated_bytes,
        reserved_bytes=simulated.reserved_bytes,
        allocated_bytes=simulated.allocated_bytes,
        retries=simulated.retries,
        failed_at=failed_at,
    )
