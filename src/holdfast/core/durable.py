"""Files that are either whole and on the disk, or not there.

Temporary file in the same directory, fsync, rename, fsync of the directory: the order without which
    a power
cut or a kill leaves a truncated file under the final name (measured: 10 of 12 kills during
``torch.save``).
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from holdfast.core.files import PRIVATE, SHARED, created


def fsync_path(path: Path) -> None:
    """Flush a file or a directory to the disk.

    OSError if the disk reports that the data did not arrive. It is reported once only, so the
    caller must write a new file rather than call this again.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes, mode: int = SHARED) -> None:
    """Write a new file and flush it.

    Not atomic: use it inside a directory that is renamed later.
    """
    with created(path, mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """Replace a file atomically and durably.

    Where that fails (OSError) the old file is untouched.
    """
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        write_file(temporary, data, mode)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):  # a folder lies there
            temporary.unlink()
        raise
    fsync_path(path.parent)


def rename_directory(source: Path, target: Path) -> None:
    """Rename a directory within one file system, and flush both it and its parent.

    OSError if the target exists or the file systems differ.
    """
    if target.exists():
        # POSIX would replace an empty directory without a word
        raise FileExistsError(f"{target} exists already")
    fsync_path(source)
    source.rename(target)
    fsync_path(target.parent)


def free_bytes(path: Path) -> int:
    """Return the bytes that this user can still write to the file system of ``path``."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
