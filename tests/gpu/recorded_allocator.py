"""What torch recorded of its CUDA allocator, played through the simulator.

Where the two would part.

Record in a fresh process: ``torch.cuda.memory._record_memory_history()``, the training,
``torch.cuda.memory ._snapshot()``. One stream, no memory pools, no CUDA graphs and no
`empty_cache`: the simulator has none.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from holdfast.forecast.allocator.caching import Block, CachingAllocator, OutOfDeviceMemoryError
from holdfast.forecast.allocator.replay import round_sizes

_SEGMENT_ACTIONS = ("segment_alloc", "segment_free")


def first_difference(snapshot: Mapping[str, Any], *, cap_bytes: int | None = None) -> str:
    """Return where the segments that were asked for part from those of the simulator.

    Empty if they nowhere do.

    The snapshot is of ``torch.cuda.memory._snapshot()``, `cap_bytes` what the process was allowed.
    """
    entries = [
        entry for entry in snapshot["device_traces"][0] if entry["action"] != "free_requested"
    ]
    assert len({entry["stream"] for entry in entries if "stream" in entry}) < 2, (
        "the simulator has one stream"
    )
    # Which of equals is taken
    given = (entry["addr"] for entry in entries if entry["action"] == "segment_alloc")
    simulated = CachingAllocator(cap_bytes=cap_bytes, addresses=given)
    live: dict[int, Block] = {}
    wanted: list[tuple[str, int]] = []
    for entry in entries:
        if entry["action"] in _SEGMENT_ACTIONS:
            wanted.append((entry["action"], entry["size"]))
        elif entry["action"] == "free_completed":
            simulated.free(live.pop(entry["addr"]))
        elif entry["action"] in ("alloc", "oom"):
            try:
                block = simulated.allocate(int(round_sizes(np.array([entry["size"]]))[0]))
            except OutOfDeviceMemoryError:
                if entry["action"] == "alloc":
                    return "the simulator ran out of memory only"
                continue
            if entry["action"] == "oom":
                return "torch ran out of memory only"
            if block.address != entry["addr"]:
                return f"an allocation of {entry['size']} bytes lies elsewhere"
            live[entry["addr"]] = block
    for recorded, played in itertools.zip_longest(wanted, simulated.log):
        if recorded != played:
            return f"recorded: {recorded}; simulated: {played}"
    return ""
