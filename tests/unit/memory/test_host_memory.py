"""How much may still be allocated, and that what is freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from holdfast.memory.host_memory import available_bytes
from holdfast.testing import memory_limited


def test_a_real_limit_of_this_process_counts() -> None:
    """With the data segment limited to 64 MiB more than it has, no more than that is left."""
    before = available_bytes()
    assert before is not None
    with memory_limited(64 * 2**20):
        left = available_bytes()
    assert left is not None
    assert left <= min(64 * 2**20, before)


def test_what_cannot_be_read_does_not_limit(tmp_path: Path) -> None:
    """Where there are no such files, nothing is known."""
    assert available_bytes(tmp_path) is None


_PROGRAM = """
import ctypes, sys
from holdfast.memory.host_memory import set_malloc_threshold, trim_heap
from holdfast.testing import data_segment_bytes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
assert set_malloc_threshold(2**20) is True
libc.free(libc.malloc(24 * 2**20))  # by default this raises the size from which blocks are mapped
before = data_segment_bytes()
blocks = [libc.malloc(8 * 2**20) for _ in range(8)]
pin = libc.malloc(100_000)          # lies above them, so the top of the heap cannot shrink
for block in blocks:
    libc.free(block)
print(data_segment_bytes() - before)
trim_heap()
"""


def test_freed_blocks_go_back_to_the_system() -> None:
    """With the threshold set, 64 MiB that were freed under a live block are gone from the process."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 * 2**20
