"""Requests to the kernel that may fail in an unprivileged container."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

from holdfast.core.control_groups import group_folders, read_fields

# From linux/prctl.h.
_PR_SET_CHILD_SUBREAPER = 36
# Files that contain the number of out-of-memory kills, in control groups version 2 and version 1.
_MEMORY_EVENT_FILES = ("memory.events", "memory.oom_control")


def become_subreaper() -> None:
    """Make this process the new parent of its orphaned descendants."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def count_oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes in this control group the kernel's OOM killer has killed.

    Only the innermost group with a counter is read, because outer groups also count kills in other
    jobs. The result is None if the kernel provides no counter.
    """
    for group in group_folders(root, "memory"):
        for name in _MEMORY_EVENT_FILES:
            kills = read_fields(group / name).get("oom_kill")
            if kills is not None:
                return kills
    return None
