"""Whether the other ranks come to make their guard.

Nobody speaks for a rank that has none yet. Where the ranks are connected by gloo, one that ends before is noticed
within a second by its closed connections; with other backends the timeout of the process group ends the wait. Each
rank watches its two neighbours, and all hear of what it notices.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch

from holdfast.guard.ranks.messages import Messages

# Plus the number of the guard. Collectives have tags of their own, and a script's sends and receives other numbers.
_TAG = 0x486F6C64
_HOW = "has ended, or has not come in time, before it made its guard"


def watch_arrival(group: Any, messages: Messages) -> None:
    """Let the neighbours know that this rank has come, and tell all ranks if one of them ends before it does."""
    if not _connects_by_gloo(group):
        return
    world_size = group.size()
    neighbours = {(messages.rank - 1) % world_size, (messages.rank + 1) % world_size} - {messages.rank}
    for neighbour in neighbours:
        try:
            # Begun here and not in the thread: what a group has begun is counted in each step.
            sent = group.send([torch.zeros(1)], neighbour, _TAG + messages.guard)
            received = group.recv([torch.zeros(1)], neighbour, _TAG + messages.guard)
        except RuntimeError:  # it has ended already
            messages.lose(neighbour, _HOW)
            return
        meet = partial(_meet, [received, sent], messages, neighbour)
        messages.start_alone(meet, f"holdfast-arrival-{neighbour}")


def _meet(works: list[Any], messages: Messages, neighbour: int) -> None:
    """Wait in a thread until a neighbour has come; what it sends says nothing."""
    try:
        for work in works:
            work.wait(timedelta(seconds=messages.timeout_seconds))
    except RuntimeError:
        messages.lose(neighbour, _HOW)


def _connects_by_gloo(group: Any) -> bool:
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return type(backend).__name__ == "ProcessGroupGloo"
