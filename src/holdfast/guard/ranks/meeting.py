"""Whether the main thread of this process waits in a collective of the script's own, in which all ranks must meet."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from torch import distributed

# None of these is over for one rank before all have begun it. A broadcast may be, for the rank that sends.
_MEETINGS = frozenset({
    "barrier", "monitored_barrier", "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_object",
    "all_gather_into_tensor", "all_gather_single", "all_gather_coalesced", "all_to_all", "all_to_all_single",
    "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single",
})  # fmt: skip


def meeting_of_all() -> str | None:
    """Return the name of the collective over all ranks that the main thread is in, as the script calls it."""
    identity = threading.main_thread().ident
    frame = None if identity is None else sys._current_frames().get(identity)
    while frame is not None and not _is_meeting(frame):
        frame = frame.f_back
    name = None
    # Such as `all_gather_object`, which calls `all_gather`.
    while frame is not None and "/torch/distributed/" in frame.f_code.co_filename:
        if _is_meeting(frame):
            name = frame.f_code.co_name
        frame = frame.f_back
    return name


def _is_meeting(frame: FrameType) -> bool:
    code = frame.f_code
    if code.co_name not in _MEETINGS or not code.co_filename.endswith("/torch/distributed/distributed_c10d.py"):
        return False
    group = frame.f_locals.get("group")
    return group is None or (
        isinstance(group, distributed.ProcessGroup) and group.size() == distributed.get_world_size()
    )
