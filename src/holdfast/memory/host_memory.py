"""How much memory this process may still take on the host, as the kernel would decide.

The smallest of what the machine has left, what the control groups have left, and what the process's limits leave.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from holdfast.core.control_groups import fields_of, memory_available_bytes


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that may still be allocated, or None if nothing limits them.

    Args:
        root: Where ``proc`` and ``sys`` are mounted.
    """
    left = memory_available_bytes(root)
    return min([*_limits(root)] if left is None else [left, *_limits(root)], default=None)


def _limits(root: Path) -> Iterator[int]:
    """Yield what each limit of this process leaves."""
    mine = fields_of(root / "proc/self/status")
    for kind, used in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY and used in mine:
            yield soft - mine[used] * 1024
