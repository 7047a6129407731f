"""Notice a rank that ends before it has created its guard.

Such a rank cannot report its own end. If the ranks are connected by gloo, its closed connections
reveal it within a second; with other backends the others wait until the timeout of the process
group. Each rank watches its two neighbors and tells all ranks if one of them is lost.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from holdfast.guard.ranks.messages import Messages

# The tag of a message is this plus the number of the guard. It is an arbitrary number ("Hold" in
# ASCII), so that the script's own messages have other tags. Collectives use other tags as well.
_TAG = 0x486F6C64
_REASON = "has ended or timed out before it created its guard"


def connect_ranks(group: Any) -> Messages:
    """Connect this rank to the others, and watch whether its neighbors create their guards.

    Args:
        group: The process group of the model.
    """
    messages = Messages(distributed.get_rank(), distributed.get_world_size())
    _watch_neighbors(group, messages)
    return messages


def _watch_neighbors(group: Any, messages: Messages) -> None:
    """Tell the neighbors that this rank creates its guard; tell all ranks if a neighbor is lost.

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
            # Started here rather than in the thread, where it would disturb the count of a step's
            # collectives.
            sent = group.send([torch.zeros(1)], neighbor, _TAG + messages.guard)
            received = group.recv([torch.zeros(1)], neighbor, _TAG + messages.guard)
        except RuntimeError:
            # The neighbor has already ended.
            messages.lose(neighbor, _REASON)
            return
        wait = partial(_wait_for_neighbor, [received, sent], messages, neighbor)
        messages.start_thread_without_store(wait, f"holdfast-arrival-{neighbor}")


def _wait_for_neighbor(works: list[Any], messages: Messages, neighbor: int) -> None:
    """Wait in a thread until a neighbor has sent its message, whose content does not matter."""
    try:
        for work in works:
            work.wait(timedelta(seconds=messages.timeout_seconds))
    except RuntimeError:
        messages.lose(neighbor, _REASON)


def _connects_by_gloo(group: Any) -> bool:
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return type(backend).__name__ == "ProcessGroupGloo"
