"""glibc's allocator: what is freed goes back to the system at once. In processes of its own."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import ctypes, sys
from holdfast.memory.host_memory import set_malloc_threshold, trim_heap
from holdfast.testing import data_segment_bytes
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1] == "set":
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


def _bytes_kept(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_freed_blocks_go_back_to_the_system() -> None:
    """With the threshold set, 64 MiB that were freed under a live block are gone from the process."""
    assert _bytes_kept("set") < 8 * 2**20
