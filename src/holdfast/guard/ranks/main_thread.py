"""Use the main thread's stack to find the script's collective in which the thread is waiting.

Collectives that the guard has started are ignored.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import NamedTuple

from torch import distributed

_COLLECTIVES = "/torch/distributed/distributed_c10d.py"
_WRAPPER = "/torch/nn/parallel/distributed.py"
# A rank returns from these collectives only after all ranks have entered them.
_SYNCHRONIZING = frozenset(
    {
        "barrier",
        "monitored_barrier",
        "all_reduce",
        "all_reduce_coalesced",
        "all_gather",
        "all_gather_object",
        "all_gather_into_tensor",
        "all_gather_single",
        "all_gather_coalesced",
        "all_to_all",
        "all_to_all_single",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
    }
)
# Some ranks, such as the sender, may return from these collectives before others have entered them.
_ONE_SIDED = frozenset(
    {
        "broadcast",
        "broadcast_object_list",
        "scatter",
        "scatter_object_list",
        "gather",
        "gather_object",
        "reduce",
    }
)


class Collective(NamedTuple):
    """A collective over all ranks in which the main thread is waiting.

    Attributes:
        name: The name of the function that the script called, or a description.
        synchronizes: Whether a rank returns from the collective only after all ranks have entered
            it.
    """

    name: str
    synchronizes: bool


def collective_of_main_thread() -> Collective | None:
    """Return the collective over all ranks in which the main thread is waiting, or None."""
    identity = threading.main_thread().ident
    frame = None if identity is None else sys._current_frames().get(identity)
    outermost = None
    while frame is not None:
        # Collectives may call other collectives: `all_gather_object` calls `all_gather`. Find the
        # outermost one, since that is the one that the script called.
        outermost = _collective_of(frame) or outermost
        frame = frame.f_back
    return outermost


def _collective_of(frame: FrameType) -> Collective | None:
    """Return the collective over all ranks that a stack frame is executing, or None."""
    name = frame.f_code.co_name
    file = frame.f_code.co_filename
    if name == "_sync_buffers" and file.endswith(_WRAPPER):
        description = "a forward pass of DistributedDataParallel, which broadcasts its buffers"
        return Collective(description, synchronizes=False)
    if name not in _SYNCHRONIZING | _ONE_SIDED:
        return None
    if not file.endswith(_COLLECTIVES) or not _is_over_all_ranks(frame):
        return None
    return Collective(name, synchronizes=name in _SYNCHRONIZING)


def _is_over_all_ranks(frame: FrameType) -> bool:
    """Return whether the argument `group` of a collective is None or contains all ranks."""
    group = frame.f_locals.get("group")
    if group is None:
        return True
    return (
        isinstance(group, distributed.ProcessGroup) and group.size() == distributed.get_world_size()
    )
