"""Detect a rank that ends before it has created its guard.

Such a rank cannot report its own exit. With the gloo backend, its neighbors notice within a second
that their connections to it are closed. With other backends, the other ranks wait until the process
group times out. Each rank watches its two neighbors and informs all ranks if it loses one of them.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from holdfast.guard.ranks.messages import Messages

# The tag of a message is this value plus the guard's number. The value is arbitrary ("Hold" in
# ASCII) and unlikely to collide with the tags of the script's own messages or of collectives.
_TAG = 0x486F6C64
_REASON = "has ended or timed out before it created its guard"


def connect_ranks(group: Any) -> Messages:
    """Connect this rank to the others, and monitor whether its neighbors create their guards.

    Args:
        group: The model's process group.

    Returns:
        The connection of this rank to the other ranks.
    """
    messages = Messages(distributed.get_rank(), distributed.get_world_size())
    _watch_neighbors(group, messages)
    return messages


def _watch_neighbors(group: Any, messages: Messages) -> None:
    """Tell the neighbors that this rank has created its guard, and watch for lost neighbors.

    Args:
        group: The process group. Only gloo groups are watched.
        messages: The connection to the other ranks.
    """
    if not _connects_by_gloo(group):
        return
    world_size = group.size()
    previous_rank = (messages.rank - 1) % world_size
    next_rank = (messages.rank + 1) % world_size
    for neighbor in {previous_rank, next_rank} - {messages.rank}:
        try:
            # Start both transfers here rather than in the thread, where they would disturb the
            # count of a step's collectives.
            sent = group.send([torch.zeros(1)], neighbor, _TAG + messages.guard)
            received = group.recv([torch.zeros(1)], neighbor, _TAG + messages.guard)
        except RuntimeError:
            # The neighbor has already exited.
            messages.lose(neighbor, _REASON)
            return
        wait = partial(_wait_for_neighbor, [received, sent], messages, neighbor)
        messages.start_thread_without_store(wait, f"holdfast-arrival-{neighbor}")


def _wait_for_neighbor(works: list[Any], messages: Messages, neighbor: int) -> None:
    """Wait until messages have been exchanged with a neighbor, or report the neighbor as lost.

    This runs in a thread of its own. The content of the messages does not matter.

    Args:
        works: The pending transfers to and from the neighbor.
        messages: The connection to the other ranks.
        neighbor: The rank of the neighbor.
    """
    try:
        for work in works:
            work.wait(timedelta(seconds=messages.timeout_seconds))
    except RuntimeError:
        messages.lose(neighbor, _REASON)


def _connects_by_gloo(group: Any) -> bool:
    """Return whether a process group uses the gloo backend for CPU tensors."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return type(backend).__name__ == "ProcessGroupGloo"
