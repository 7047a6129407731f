"""Cause real faults: a lack of memory, a full disk, a flipped bit.

Nothing is mocked: an allocation fails because the kernel refuses it, and a write fails because the
disk is full. Import these functions from `holdfast.testing`. In a campaign, `fault_plans` decides
which faults happen and when, and `injector` carries them out.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.memory.host_memory import UNDER_A_LIMIT_BYTES, set_malloc_threshold, trim_heap

# `fill_disk` writes blocks of up to this size.
FILL_BLOCK_BYTES = 1 << 20


def limit_memory(headroom_bytes: int | None) -> None:
    """Limit this process's memory to its current use plus some headroom.

    The limit applies to the data segment (``RLIMIT_DATA``), which includes the heap, private
    mappings and the stacks of all threads except the main thread. A stack usually takes 8 MiB, so
    leave room for threads that start while the limit applies. Setting the first limit also
    configures glibc's malloc to return freed memory to the system, so that freed memory does not
    act as extra headroom. A guard configures malloc in the same way when it finds a limit.

    Args:
        headroom_bytes: The number of bytes that may still be allocated. None removes the limit.

    Raises:
        OSError: If the system does not report the size of the data segment. Only Linux does.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    if headroom_bytes is None:
        resource.setrlimit(resource.RLIMIT_DATA, (hard_limit, hard_limit))
        return
    if soft_limit == resource.RLIM_INFINITY:
        set_malloc_threshold(UNDER_A_LIMIT_BYTES)
        trim_heap()
    new_limit = data_segment_bytes() + headroom_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (new_limit, hard_limit))


def data_segment_bytes() -> int:
    """Return the size of this process's data segment as ``RLIMIT_DATA`` counts it, in bytes.

    Raises:
        OSError: If ``/proc/self/status`` does not contain the size. Only Linux reports it.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            kibibytes = int(line.split()[1])
            return kibibytes * 1024
    raise OSError("/proc/self/status has no VmData: memory can be limited on Linux only")


@contextmanager
def memory_limited(headroom_bytes: int) -> Iterator[None]:
    """Limit memory with `limit_memory` while the ``with`` block runs.

    Args:
        headroom_bytes: The number of bytes that may still be allocated inside the block.
    """
    limit_memory(headroom_bytes)
    try:
        yield
    finally:
        limit_memory(None)


def flip_bit(path: Path, bit: int) -> None:
    """Flip one bit of a file and flush the file to disk.

    Args:
        path: The file to change.
        bit: The index of the bit, counted from the beginning of the file. The least significant bit
            of each byte comes first.
    """
    byte_index, bit_in_byte = divmod(bit, 8)
    with path.open("r+b") as file:
        file.seek(byte_index)
        byte = file.read(1)[0]
        file.seek(byte_index)
        file.write(bytes([byte ^ (1 << bit_in_byte)]))
        file.flush()
        os.fsync(file.fileno())


def fill_disk(file: Path, *, leave_bytes: int = 0) -> None:
    """Write zeros to a file until its disk is full.

    Use this function only on a small disk that is reserved for the test.

    Args:
        file: The file to write. An existing file is replaced.
        leave_bytes: The number of bytes to leave free on the disk.
    """
    with file.open("wb") as filler:
        while True:
            bytes_to_fill = shutil.disk_usage(file.parent).free - leave_bytes
            if bytes_to_fill <= 0:
                return
            try:
                filler.write(b"\0" * min(bytes_to_fill, FILL_BLOCK_BYTES))
                filler.flush()
            except OSError:
                return
