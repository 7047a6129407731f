"""Notice a rank that ends before it has made its guard.

Such a rank cannot report its own end. If the ranks are connected by gloo, its closed connections
show it within a second; with other backends the wait lasts until the timeout of the process group.
Each rank watches its two neighbours and tells all ranks if one of them is lost.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch

from holdfast.guard.ranks.messages import Messages

# The tag of the messages, plus the number of the guard: an arbitrary number ("Hold" in ASCII), so
# that the messages are not confused with sends of the script. Collectives use other tags.
_TAG = 0x486F6C64
_REASON = "has ended, or has not come in time, before it made its guard"


def watch_arrival(group: Any, messages: Messages) -> None:
    """Tell the neighbours that this rank makes its guard, and tell all ranks if a neighbour ends
    before it does.

    Args:
        group: The process group. Only gloo groups are watched.
        messages: The connection to the other ranks.
    """
    if not _connects_by_gloo(group):
        return
    world_size = group.size()
    neighbours = {(messages.rank - 1) % world_size, (messages.rank + 1) % world_size} - {
        messages.rank
    }
    for neighbour in neighbours:
        try:
            # Begun here and not in the thread, where it would disturb the count of a step's
            # collectives.
            sent = group.send([torch.zeros(1)], neighbour, _TAG + messages.guard)
            received = group.recv([torch.zeros(1)], neighbour, _TAG + messages.guard)
        except RuntimeError:
            # The neighbour has ended already.
            messages.lose(neighbour, _REASON)
            return
        wait = partial(_wait_for_neighbour, [received, sent], messages, neighbour)
        messages.start_alone(wait, f"holdfast-arrival-{neighbour}")


def _wait_for_neighbour(works: list[Any], messages: Messages, neighbour: int) -> None:
    """Wait in a thread until a neighbour has sent its message, whose content does not matter."""
    try:
        for work in works:
            work.wait(timedelta(seconds=messages.timeout_seconds))
    except RuntimeError:
        messages.lose(neighbour, _REASON)


def _connects_by_gloo(group: Any) -> bool:
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return False
    return type(backend).__name__ == "ProcessGroupGloo"
