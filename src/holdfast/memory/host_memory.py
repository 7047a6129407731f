"""How much memory this process may still take on the host, and how freed memory gets back to the
system.

By default glibc keeps freed blocks in a heap that fragments, so under a limit a retry with a
quarter of the memory still fails (0 of 28 to 7 of 28 recovered). With blocks of 4 MiB and more in
mappings of their own, which are given back at once, 84 of 84 recovered. The price is that their
pages come zeroed from the kernel at each allocation, which doubles the time of a step with
activations of that size.

Where nothing limits this process, the kernel refuses it no memory, and there is nothing to recover
from: there the heap keeps what a step frees, which takes 16 to 27 % less time than glibc's own
setting (benchmarks/malloc_threshold).
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from holdfast.core.control_groups import fields_of, memory_available_bytes

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_STRICT = "2"  # of vm.overcommit_memory: the kernel refuses what it could not back
UNDER_A_LIMIT_BYTES = 4 * 2**20
# The largest that glibc chooses by itself; from 512 MiB on, large heaps fragment
_UNLIMITED_BYTES = 32 * 2**20
# How much may lie free at the top of the heap: less would be given back and taken again at every
# step.
_KEPT_BYTES, _KEPT_UNLIMITED_BYTES = 64 * 2**20, 512 * 2**20


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that may still be allocated, or None if nothing limits them.

    The smallest of what the machine has left, what the control groups have left, and what the
    limits of this process leave.
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


def may_be_refused(root: Path = Path("/")) -> bool:
    """Return whether an allocation can fail.

    Under a limit of this process, or of a kernel that commits strictly.

    A control group refuses nothing: it kills.
    """
    strict = root / "proc/sys/vm/overcommit_memory"
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return any(soft != resource.RLIM_INFINITY for soft in limits) or (
        strict.is_file() and strict.read_text().strip() == _STRICT
    )


def set_malloc_threshold(threshold_bytes: int | Literal["auto"]) -> bool:
    """Let glibc map blocks of this size and more by themselves.

    Return False where malloc is not glibc's.

    Call it before large allocations: from this size on, freed memory goes back to the system at
    once. ``"auto"``: 4 MiB where memory can be refused, 32 MiB elsewhere.
    """
    libc = _libc()
    if libc is None:
        return False
    kept = _KEPT_BYTES
    if threshold_bytes == "auto":
        limited = may_be_refused()
        threshold_bytes = UNDER_A_LIMIT_BYTES if limited else _UNLIMITED_BYTES
        kept = kept if limited else _KEPT_UNLIMITED_BYTES
    return bool(libc.mallopt(_M_MMAP_THRESHOLD, threshold_bytes)) and bool(
        libc.mallopt(_M_TRIM_THRESHOLD, max(threshold_bytes, kept))
    )


def trim_heap() -> None:
    """Give free pages at any place of the heap back to the system, where malloc is glibc's."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def _libc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
