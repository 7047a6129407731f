"""Write files that are either complete and on disk, or absent.

To replace a file, these functions write a temporary file in the same directory, fsync it, rename it
and then fsync the directory. Without these steps, a power cut or a kill can leave a truncated file
under the final name. In a test with ``torch.save``, 10 of 12 kills did.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from holdfast.core.files import PRIVATE, SHARED, create_file


def fsync_path(path: Path) -> None:
    """Flush a file or a directory to disk.

    Raises:
        OSError: If the disk reports that the data was not written. The kernel reports this only
            once, so the caller must write a new file instead of retrying the flush.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes, mode: int = SHARED) -> None:
    """Write a new file and flush it to disk.

    The write is not atomic, so use this function only in a temporary directory that is renamed once
    all of its files are complete.
    """
    with create_file(path, mode) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes, mode: int = PRIVATE) -> None:
    """Replace a file atomically and durably.

    Raises:
        OSError: If the new file cannot be written or renamed, in which case the old file is
            unchanged; or if the directory cannot be flushed, in which case a power cut may undo the
            replacement.
    """
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        write_file(temporary, data, mode)
        temporary.replace(path)
    except OSError:
        # If the temporary path is an existing directory, `unlink` fails too.
        with suppress(OSError):
            temporary.unlink()
        raise
    fsync_path(path.parent)


def rename_directory(source: Path, target: Path) -> None:
    """Rename a directory within one file system, and flush it and its new parent to disk.

    Raises:
        OSError: If the target exists or is on another file system.
    """
    # Check first, because a POSIX rename silently replaces an empty target directory.
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    fsync_path(source)
    source.rename(target)
    fsync_path(target.parent)
