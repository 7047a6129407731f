"""How much memory this process may still take on the host, and how freed memory gets back to the system.

By default glibc keeps freed blocks in a heap that fragments, so a retry with a quarter of the memory still
fails (0 of 28 to 7 of 28 recovered). With blocks of 4 MiB and more in mappings of their own, which are given
back at once, 84 of 84 recovered. The price is that their pages come zeroed from the kernel at each allocation.
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path

from holdfast.core.control_groups import fields_of, memory_available_bytes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# How much may lie free at the top of the heap: glibc's own largest value. Whoever runs out of memory trims it; less
# would be given back and taken again at every step (benchmarks/malloc_threshold, activations below 4 MiB).
_TRIM_THRESHOLD_BYTES = 64 * 2**20


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that may still be allocated, or None if nothing limits them.

    The smallest of what the machine has left, what the control groups have left, and what the limits of this process
    leave.
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


def set_malloc_threshold(threshold_bytes: int) -> bool:
    """Let glibc map blocks of this size and more by themselves; return False where malloc is not glibc's.

    Call it before large allocations: from this size on, freed memory goes back to the system at once.
    """
    libc = _libc()
    if libc is None:
        return False
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, threshold_bytes)) and bool(
        libc.mallopt(_M_TRIM_THRESHOLD, max(threshold_bytes, _TRIM_THRESHOLD_BYTES))
    )


def trim_heap() -> None:
    """Give free pages at any place of the heap back to the system, where malloc is glibc's."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def _libc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
