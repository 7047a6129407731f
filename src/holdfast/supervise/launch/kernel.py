"""Requests to the kernel, which an unprivileged container may deny."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

from holdfast.core.control_groups import group_folders, read_fields

# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
# The files with the counters of control groups, version 2 and version 1.
_MEMORY_EVENT_FILES = ("memory.events", "memory.oom_control")


def become_subreaper() -> None:
    """Make this process the parent of every orphaned descendant, so that none is lost."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def count_oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes of our control group the kernel has killed for memory.

    Only the innermost group with a counter is read, since outer groups also count the kills of
    other jobs. The result is None if the kernel does not provide a count.
    """
    for group in group_folders(root, "memory"):
        for name in _MEMORY_EVENT_FILES:
            kills = read_fields(group / name).get("oom_kill")
            if kills is not None:
                return kills
    return None
