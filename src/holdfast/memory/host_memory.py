"""How much host memory this process can still allocate, and how freed memory returns to the system.

By default glibc keeps freed blocks in a heap that fragments, so under a memory limit even a retry
that needs a quarter of the memory fails (at best 7 of 28 attempts recovered). If blocks of 4 MiB
and more are mapped one by one, they return to the system as soon as they are freed, and 84 of 84
attempts recovered. The price is that the kernel zeroes their pages at each allocation, which
doubles the duration of a step with such large activations.

If nothing limits this process, the kernel never refuses an allocation and there is nothing to
recover from. The heap then keeps what a step frees, which takes 16 to 27 % less time than glibc's
default (both figures: ``benchmarks/malloc_threshold``).
"""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from holdfast.core.control_groups import memory_available_bytes, read_fields

# Parameters of mallopt(3), from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
# The value of vm.overcommit_memory with which the kernel refuses memory that it cannot back.
_STRICT_OVERCOMMIT = "2"

# Blocks of at least this size are mapped separately if memory can be refused.
UNDER_A_LIMIT_BYTES = 4 * 2**20
# The largest threshold that glibc itself chooses (DEFAULT_MMAP_THRESHOLD_MAX on 64-bit machines).
# With 512 MiB and more, large heaps fragment.
_UNLIMITED_BYTES = 32 * 2**20
# How much free memory may stay at the top of the heap. With less, memory would be returned and
# allocated again in every step.
_TRIM_UNDER_A_LIMIT_BYTES = 64 * 2**20
_TRIM_UNLIMITED_BYTES = 512 * 2**20


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that may still be allocated, or None if nothing limits them.

    This is the least of what the machine, the control groups and the limits of this process leave.
    """
    candidates = list(_left_by_process_limits(root))
    left_by_machine = memory_available_bytes(root)
    if left_by_machine is not None:
        candidates.append(left_by_machine)
    return min(candidates, default=None)


def _left_by_process_limits(root: Path) -> Iterator[int]:
    """Yield the bytes that each limit of this process leaves."""
    status = read_fields(root / "proc/self/status")
    for field, limit_bytes in _process_limits().items():
        if field in status:
            used_kib = status[field]
            yield limit_bytes - used_kib * 1024


def _process_limits() -> dict[str, int]:
    """Return the limits in bytes, by the field of /proc/self/status that says what is used."""
    limits = {
        "VmData": resource.getrlimit(resource.RLIMIT_DATA)[0],
        "VmSize": resource.getrlimit(resource.RLIMIT_AS)[0],
    }
    return {field: limit for field, limit in limits.items() if limit != resource.RLIM_INFINITY}


def allocation_can_fail(root: Path = Path("/")) -> bool:
    """Return whether an allocation can fail.

    It can if this process has a resource limit or if the kernel does not overcommit. A control
    group never refuses an allocation: it kills the process.
    """
    if _process_limits():
        return True
    overcommit = root / "proc/sys/vm/overcommit_memory"
    return overcommit.is_file() and overcommit.read_text().strip() == _STRICT_OVERCOMMIT


def set_malloc_threshold(threshold_bytes: int | Literal["auto"]) -> bool:
    """Make glibc map each block of at least this size separately, so that it can be returned.

    Call it before anything large is allocated.

    Args:
        threshold_bytes: A size, or ``"auto"`` for 4 MiB where memory can be refused and 32 MiB
            elsewhere.

    Returns:
        False where malloc is not glibc's.
    """
    libc = _glibc()
    if libc is None:
        return False
    trim_bytes = _TRIM_UNDER_A_LIMIT_BYTES
    if threshold_bytes == "auto":
        if allocation_can_fail():
            threshold_bytes = UNDER_A_LIMIT_BYTES
        else:
            threshold_bytes = _UNLIMITED_BYTES
            trim_bytes = _TRIM_UNLIMITED_BYTES
    if not libc.mallopt(_M_MMAP_THRESHOLD, threshold_bytes):
        return False
    return bool(libc.mallopt(_M_TRIM_THRESHOLD, max(threshold_bytes, trim_bytes)))


def trim_heap() -> None:
    """Return free pages in the heap to the system. Does nothing unless malloc is glibc's."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    is_glibc = hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")
    return libc if is_glibc else None
