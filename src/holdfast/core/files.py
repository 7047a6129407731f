"""Open files in a run directory safely, even if other users can write to that directory.

A symbolic link in the last component of a path is not followed, only regular files are opened, and
a size limit applies to files that are read as a whole. New files that may contain command lines or
output are readable only by their owner. For durable writes, see ``durable``.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, Literal

# Modes of new files: accessible only to this user, or to all users whom the umask permits.
PRIVATE = 0o600
SHARED = 0o666

# The default size limit: larger than any file that holdfast reads as a whole.
_MAX_READ_BYTES = 64 << 20
# What these error numbers of open(2) mean when a file is opened with the flags used here.
_MEANINGS = {
    errno.ELOOP: "it is a link, not a file",
    errno.ENXIO: "it is not a regular file",
}


def open_file(
    path: Path, flags: int = os.O_RDONLY, mode: int = PRIVATE, most: int | None = None
) -> int:
    """Open a regular file and return its descriptor.

    Args:
        path: The file to open.
        flags: Flags of open(2), such as ``os.O_RDWR | os.O_CREAT``.
        mode: The permission bits of the file if it is created.
        most: The maximum size in bytes, or None for no limit.

    Raises:
        OSError: If the file is not a regular file, is larger than `most`, or cannot be opened.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a process that writes to it.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in _MEANINGS:
            raise OSError(error.errno, _MEANINGS[error.errno], str(path)) from error
        raise
    try:
        _check_regular(descriptor, path, most)
    except OSError:
        close_descriptor(descriptor)
        raise
    return descriptor


def _check_regular(descriptor: int, path: Path, most: int | None) -> None:
    """Raise OSError unless an open file is a regular file of at most `most` bytes."""
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, "it is not a regular file", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    # The size limit matters because a sparse file can have a size of a terabyte without using any
    # disk space.
    if most is not None and status.st_size > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))


def close_descriptor(descriptor: int) -> None:
    """Close a descriptor and ignore errors.

    Use this function only if no important data was written through the descriptor: on a network
    file system, ``close`` may fail because data from earlier writes could not be stored. Even then,
    Linux frees the descriptor. It must not be closed again, because its number may already refer to
    another file.
    """
    with suppress(OSError):
        os.close(descriptor)


def open_to_read(path: Path, most: int | None = None) -> BufferedReader:
    """Open a regular file for reading.

    Args:
        path: The file to open.
        most: The maximum size in bytes, or None for no limit.

    Raises:
        OSError: In the same cases as `open_file`.
    """
    return open(path, "rb", opener=_opener(most=most))


def open_to_write(path: Path, how: Literal["rb+", "ab"]) -> BinaryIO:
    """Open a regular file to update it in place (``"rb+"``) or to append to it (``"ab"``).

    Raises:
        OSError: In the same cases as `open_file`.
    """
    return open(path, how, opener=_opener())


def create_file(path: Path, mode: int = PRIVATE) -> BinaryIO:
    """Create a file and open it for reading and writing.

    An existing file or link of the same name is removed first, so that data is never written
    through a link.

    Raises:
        OSError: If the old file cannot be removed or the new one cannot be created.
    """
    path.unlink(missing_ok=True)
    return open(path, "xb+", opener=_opener(mode))


def _opener(mode: int = PRIVATE, most: int | None = None) -> Callable[[str, int], int]:
    """Return a function that calls `open_file`, for use as the `opener` argument of `open`."""
    return lambda path, flags: open_file(Path(path), flags, mode, most)


def read_file(path: Path, most: int = _MAX_READ_BYTES) -> bytes:
    """Return the contents of a regular file.

    Args:
        path: The file to read.
        most: The maximum size in bytes.

    Raises:
        OSError: In the same cases as `open_file`.
    """
    with open_to_read(path, most) as file:
        # Read only up to the current size: another process may be appending to the file, so that
        # reading to the end could exceed the limit.
        return file.read(os.fstat(file.fileno()).st_size)


def swap_in(path: Path, data: bytes) -> None:
    """Replace a file atomically but not durably: a power cut may discard the new contents."""
    temporary = path.with_name(f".{path.name}")
    with create_file(temporary) as file:
        file.write(data)
    temporary.replace(path)


def make_folder(run: Path, *names: str) -> Path:
    """Create a folder within a run directory, including its parents, and return its path.

    Args:
        run: The run directory.
        names: The names of the nested folders, outermost first.

    Raises:
        OSError: If one of the folders is a symbolic link, which may lead out of the run directory.
    """
    path = run
    for name in names:
        path = path / name
        path.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, not a folder", str(path))
    return path


def make_run_directory(path: Path) -> None:
    """Create a run directory that only this user can enter.

    If `path` is already a directory, or a link to one, it is left unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def remove(path: Path) -> None:
    """Remove a file, or a folder and its contents. Skip anything that cannot be removed.

    `shutil.rmtree` is not used because, if closing a folder's descriptor fails, it closes the
    descriptor a second time (CPython 3.11 to 3.13).
    """
    with suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            _remove_folder(str(path), None)
        else:
            path.unlink()


def _remove_folder(name: str, parent: int | None) -> None:
    """Remove a folder and its contents without following symbolic links.

    Args:
        name: The folder's name within its parent, or the folder's path if `parent` is None.
        parent: A descriptor of the parent folder, or None.
    """
    # Another process may have replaced the folder with a link or a pipe. These flags make opening
    # a link or a pipe fail immediately.
    folder = os.open(
        name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent
    )
    try:
        with os.scandir(folder) as entries:
            contents = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for entry_name, is_folder in contents:
            with suppress(OSError):
                if is_folder:
                    _remove_folder(entry_name, folder)
                else:
                    os.unlink(entry_name, dir_fd=folder)
    finally:
        close_descriptor(folder)
    os.rmdir(name, dir_fd=parent)
