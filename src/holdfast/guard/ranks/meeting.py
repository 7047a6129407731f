"""Whether the main thread of this process waits in a collective that the script has called, and not in the guard."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import NamedTuple

from torch import distributed

_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
_WRAPPER = "/torch/nn/parallel/distributed.py"
# None of these is over for one rank before all have begun it.
_OF_ALL = frozenset({
    "barrier", "monitored_barrier", "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_object",
    "all_gather_into_tensor", "all_gather_single", "all_gather_coalesced", "all_to_all", "all_to_all_single",
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single",
})  # fmt: skip
# These may be over for some ranks, as for the one that sends, while others have not come to them.
_OF_SOME = frozenset({
    "broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "gather", "gather_object", "reduce",
})  # fmt: skip


class Meeting(NamedTuple):
    """A collective over all ranks."""

    name: str  # as the script calls it
    of_all: bool  # whether it is over for no rank before all have begun it


def meeting_of_main_thread() -> Meeting | None:
    """Return the collective over all ranks that the main thread is in, or None."""
    identity = threading.main_thread().ident
    frame = None if identity is None else sys._current_frames().get(identity)
    found = None
    while frame is not None:
        found = _meeting_of(frame) or found  # the outermost: `all_gather_object` calls `all_gather`
        frame = frame.f_back
    return found


def _meeting_of(frame: FrameType) -> Meeting | None:
    name, file = frame.f_code.co_name, frame.f_code.co_filename
    if name == "_sync_buffers" and file.endswith(_WRAPPER):
        return Meeting("a forward pass of DistributedDataParallel, which sends its buffers to all", of_all=False)
    if name not in _OF_ALL | _OF_SOME or not file.endswith(_COLLECTIVES) or not _is_of_world(frame):
        return None
    return Meeting(name, of_all=name in _OF_ALL)


def _is_of_world(frame: FrameType) -> bool:
    group = frame.f_locals.get("group")
    if group is None:
        return True
    return isinstance(group, distributed.ProcessGroup) and group.size() == distributed.get_world_size()
