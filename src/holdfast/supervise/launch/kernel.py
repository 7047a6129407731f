"""What the kernel knows and does for a supervisor: orphans come to us, who was killed for memory.

Everything is optional: a kernel, a container or a user without the right gives None or nothing, never an error.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.core.control_groups import fields_of, group_folders

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_ROOT = Path("/")


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Let every orphaned descendant become a child of this process, so that none is lost."""
    with suppress(OSError, AttributeError):
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def count_oom_kills(root: Path = _ROOT) -> int | None:
    """Return how many processes of our own control group the kernel has killed for memory; None if it does not say.

    Only the innermost group that counts is read: those above it count the kills of other jobs too.
    """
    names = ("memory.events", "memory.oom_control")  # versions 2 and 1
    counts = (fields_of(each / name).get("oom_kill") for each in group_folders(root, "memory") for name in names)
    return next((count for count in counts if count is not None), None)
