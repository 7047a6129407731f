"""A disk that is soon full: a small file system in memory, mounted where only this process sees it. Needs root."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE, _MS_RDONLY = 16384, 1 << 18, 1


def small_disk(*, megabytes: int, read_only: bool = False) -> Path:
    """Mount a file system of so many megabytes in a new folder, in a namespace that ends with this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    folder = Path("disk").absolute()
    folder.mkdir()
    flags = _MS_RDONLY if read_only else 0
    for failed in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None),
        libc.mount(b"tmpfs", bytes(folder), b"tmpfs", ctypes.c_ulong(flags), f"size={megabytes}m".encode()),
    ):
        if failed:
            os._exit(
                0
            )  # not a failure of the program under test: the runner sees 0 and says that it was not reproduced
    return folder
