"""What torch recorded of its CUDA allocator, and where the simulator would have done something else.

Record with ``torch.cuda.memory._record_memory_history()``, the training, ``torch.cuda.memory._snapshot()``. What was
on the device before is found from the segments in the snapshot, by undoing the recording. One stream, no memory pools
and no CUDA graphs: the simulator has none.

Does not: simulate (``caching_allocator``), or import torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holdfast.forecast.allocator.blocks import Block
from holdfast.forecast.allocator.caching import (
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    CachingAllocator,
    OutOfDeviceMemoryError,
)
from holdfast.forecast.allocator.replay import DEFAULT_ALLOCATOR, AllocatorOptions, round_sizes

_SEGMENT_ACTIONS = frozenset({"segment_alloc", "segment_free", "segment_map", "segment_unmap"})
_MAPPING = frozenset({"segment_map", "segment_unmap"})
_GIVING_BACK = frozenset({"segment_free", "segment_unmap"})
_SIGN = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The driver gave memory to the allocator, or got some back.

    Args:
        action: ``segment_alloc``, ``segment_free``, ``segment_map`` or ``segment_unmap``.
        size_bytes: How much.
        at: Events before it.
        address: Where, in a recording; 0 in a simulation.
    """

    action: str
    size_bytes: int
    at: int
    address: int = 0

    def __str__(self) -> str:
        return f"{self.action} of {self.size_bytes} bytes after {self.at} events"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSegment:
    """What the allocator held from the driver when the recording began.

    Args:
        address: Where it starts.
        size_bytes: How much.
        allocated: Address and size of the blocks that were in use.
    """

    address: int
    size_bytes: int
    allocated: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedTrace:
    """What one device was asked for, in order.

    Args:
        events: Shape ``(events,)``, as `allocator.replay` takes them if nothing was there before; each allocation has
            a storage of its own, and so has what was there before and is freed.
        sizes: Shape ``(storages,)``, bytes as requested.
        addresses: Shape ``(storages,)``, where each was put.
        refused: Storages that torch raised an out-of-memory error for.
        segments: What the driver was asked for.
        found: What was there before.
    """

    events: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.int64]
    refused: frozenset[int]
    segments: tuple[Segment, ...]
    found: tuple[FoundSegment, ...] = ()

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that the allocator held from the driver."""
        before = sum(segment.size_bytes for segment in self.found)
        changes = (_SIGN[segment.action] * segment.size_bytes for segment in self.segments)
        return max(itertools.accumulate(changes, initial=before))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far a recording and its simulation agree.

    Args:
        segments: What the driver was asked for in the recording, a count.
        agreeing: How many of them come first in the simulation too, at the same event, with the same size.
        first_difference: What differs then; empty if nothing does.
        moved: Allocations that the simulator put elsewhere; None for expandable segments, whose addresses it invents.
        recorded_peak_bytes: The most that torch held from the driver.
        simulated_peak_bytes: The same of the simulator.
    """

    segments: int
    agreeing: int
    first_difference: str
    moved: int | None
    recorded_peak_bytes: int
    simulated_peak_bytes: int

    @property
    def identical(self) -> bool:
        """Whether the sequence of segments is the same, to its end."""
        return not self.first_difference


def from_snapshot(snapshot: Mapping[str, Any], *, device: int = 0) -> RecordedTrace:
    """Read what ``torch.cuda.memory._snapshot()`` returned.

    Args:
        snapshot: It; ``device_traces`` and ``segments`` are read.
        device: Index of the device.

    Raises:
        ValueError: The snapshot does not tell what was there before, an expandable segment was, or several streams or
            memory pools were used.
    """
    entries = [entry for entry in snapshot["device_traces"][device] if entry["action"] != "free_requested"]
    _check_simple(entries)
    events: list[int] = []
    storages: list[tuple[int, int]] = []  # size, address
    refused: set[int] = set()
    segments: list[Segment] = []
    live: dict[int, int] = {}
    before: dict[int, int] = {}
    for entry in entries:
        action, size, address = entry["action"], entry["size"], entry.get("addr", 0)
        if action in _SEGMENT_ACTIONS:
            segments.append(Segment(action=action, size_bytes=size, at=len(events), address=address))
        elif action in ("alloc", "oom"):
            if action == "oom":
                refused.add(len(storages))
            else:
                live[address] = len(storages)
            storages.append((size, address))
            events.append(len(storages))
        elif action == "free_completed":
            storage = live.pop(address, None)
            if storage is None:
                storage = len(storages)
                storages.append((size, address))
                before[address] = size
            events.append(-storage - 1)
    return RecordedTrace(
        events=np.array(events, dtype=np.int32),
        sizes=np.array([size for size, _ in storages], dtype=np.int64),
        addresses=np.array([address for _, address in storages], dtype=np.int64),
        refused=frozenset(refused),
        segments=tuple(segments),
        found=_found_before(snapshot.get("segments", ()), device, entries, before),
    )


def compare(
    recorded: RecordedTrace,
    *,
    allocator: AllocatorOptions = DEFAULT_ALLOCATOR,
    allowed_bytes: int | None = None,
) -> Comparison:
    """Play a recording through the simulator and find where the two part.

    Segments of ``segment_alloc`` get the recorded addresses, since which block is taken among equals depends on them.

    Args:
        recorded: From `from_snapshot`.
        allocator: What ``PYTORCH_ALLOC_CONF`` was.
        allowed_bytes: What `set_per_process_memory_fraction` allowed (fraction times `total_memory`). Without it,
            memory is given back where the recording does it, as for ``torch.cuda.empty_cache()``; with it, the
            simulator has to find out by itself.
    """
    given = (segment.address for segment in recorded.segments if segment.action == "segment_alloc")
    simulated = allocator.make(
        allowed_bytes=allowed_bytes,
        addresses=None if allocator.expandable_segments else given,
        keep_log=True,
    )
    before: dict[int, Block] = {}
    for found in recorded.found:
        before |= simulated.adopt(found.address, found.size_bytes, found.allocated)
    releases = {segment.at for segment in recorded.segments if segment.action in _GIVING_BACK}
    moved, refusal = 0, ""
    produced: list[Segment] = []
    rounded = round_sizes(recorded.sizes, allocator).tolist()
    for at, block, refusal in _played(
        recorded, simulated, rounded, before, releases if allowed_bytes is None else set()
    ):
        if block is not None:
            moved += int(block[1].address != recorded.addresses[block[0]])
        assert simulated.log is not None
        produced += [Segment(action=done.action, size_bytes=done.size_bytes, at=at) for done in simulated.log]
        simulated.log.clear()
        if refusal:
            break
    agreeing, difference = _parting(recorded.segments, produced)
    return Comparison(
        segments=len(recorded.segments),
        agreeing=agreeing,
        first_difference=refusal or difference,
        moved=None if allocator.expandable_segments else moved,
        recorded_peak_bytes=recorded.peak_reserved_bytes,
        simulated_peak_bytes=simulated.peak_reserved_bytes,
    )


def _check_simple(entries: list[Mapping[str, Any]]) -> None:
    streams = {entry["stream"] for entry in entries if "stream" in entry}
    if len(streams) > 1:
        raise ValueError(f"{len(streams)} streams were recorded; the simulator has one")
    pools = {tuple(entry[key]) for entry in entries for key in ("pool_id", "segment_pool_id") if key in entry}
    if pools - {(0, 0)}:
        raise ValueError("memory pools or CUDA graphs were recorded; the simulator has none")


def _found_before(
    segments: Iterable[Mapping[str, Any]], device: int, entries: list[Mapping[str, Any]], freed: Mapping[int, int]
) -> tuple[FoundSegment, ...]:
    """Undo the recording, from the segments at its end to those at its beginning.

    Args:
        segments: Of the snapshot.
        device: Of the recording.
        entries: The recording.
        freed: Requested sizes by address, of what was there before and was freed.
    """
    last = [segment for segment in segments if segment["device"] == device]
    growth = sum(_SIGN[entry["action"]] * entry["size"] for entry in entries if entry["action"] in _MAPPING)
    if sum(segment["total_size"] for segment in last if segment.get("is_expandable")) != growth and last:
        raise ValueError("an expandable segment was there before the recording began: begin earlier")
    held = {segment["address"]: segment["total_size"] for segment in last if not segment.get("is_expandable")}
    in_use = {address: size for segment in last for address, size in _blocks_in_use(segment)}
    for entry in reversed(entries):
        if entry["action"] == "segment_alloc":
            held.pop(entry["addr"], None)
        elif entry["action"] == "segment_free":
            held[entry["addr"]] = entry["size"]
        elif entry["action"] == "alloc":
            in_use.pop(entry["addr"], None)
    in_use |= {address: -(-size // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES for address, size in freed.items()}
    found = tuple(_filled(address, size, in_use) for address, size in sorted(held.items()))
    if sum(len(segment.allocated) for segment in found) < len(freed):
        raise ValueError("the snapshot does not tell what was there before the recording began: begin earlier")
    return found


def _blocks_in_use(segment: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    address = segment["address"]
    for block in segment["blocks"]:
        if block["state"] != "inactive":
            yield address, block["size"]
        address += block["size"]


def _filled(address: int, size: int, in_use: Mapping[int, int]) -> FoundSegment:
    """Return a segment with the blocks that are in it."""
    starts = sorted(at for at in in_use if address <= at < address + size)
    allocated = []
    for at, following in itertools.pairwise((*starts, address + size)):
        room, length = following - at, in_use[at]
        # A remainder of 1 MiB or less is never split off in the large pool: what looks like one is part of the block.
        whole = size != SMALL_SEGMENT_BYTES and room - length <= SMALL_BYTES
        allocated.append((at, room if whole else length))
    return FoundSegment(address=address, size_bytes=size, allocated=tuple(allocated))


def _played(
    recorded: RecordedTrace,
    simulated: CachingAllocator,
    rounded: list[int],
    before: dict[int, Block],
    releases: set[int],
) -> Iterator[tuple[int, tuple[int, Block] | None, str]]:
    """Yield, for each event, its index, what was allocated, and how it was refused other than recorded."""
    live: dict[int, Block] = {}
    for at, event in enumerate(recorded.events.tolist()):
        if at in releases:
            simulated.empty_cache()
        storage = abs(event) - 1
        if event < 0:
            simulated.free(live.pop(storage) if storage in live else before[int(recorded.addresses[storage])])
            yield at, None, ""
            continue
        try:
            live[storage] = simulated.allocate(rounded[storage])
        except OutOfDeviceMemoryError:
            wrong = "" if storage in recorded.refused else f"event {at} ran out of memory in the simulation only"
            yield at, None, wrong
        else:
            if storage in recorded.refused:
                yield at, None, f"event {at} ran out of memory in the recording only"
            else:
                yield at, (storage, live[storage]), ""
    if len(recorded.events) in releases:
        simulated.empty_cache()
        yield len(recorded.events), None, ""


def _parting(recorded: Iterable[Segment], simulated: Iterable[Segment]) -> tuple[int, str]:
    for index, (left, right) in enumerate(itertools.zip_longest(recorded, simulated)):
        if (
            left is None
            or right is None
            or (left.action, left.size_bytes, left.at)
            != (
                right.action,
                right.size_bytes,
                right.at,
            )
        ):
            return index, f"recorded: {left or 'nothing'}; simulated: {right or 'nothing'}"
    return len(tuple(recorded)), ""
