"""Files of a run directory, opened so that what lies in their place can neither lead elsewhere nor
hold us up.

Others may be able to write there. So no link at the end of a path is followed, nothing but a
regular file is opened, and what is read whole has a limit. New files that may hold command lines or
output are for this user alone.
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

PRIVATE, SHARED = 0o600, 0o666  # the latter is what the user's umask leaves of it
_MOST_BYTES = 64 << 20


def open_file(
    path: Path, flags: int = os.O_RDONLY, mode: int = PRIVATE, most: int | None = None
) -> int:
    """Return a descriptor of a regular file.

    OSError for anything else, and for one of more than `most` bytes.
    """
    try:
        # Without O_NONBLOCK a pipe would keep us waiting for whoever writes to it.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        why = {
            errno.ELOOP: "it is a link, and a file is needed",
            errno.ENXIO: "it is no regular file",
        }
        if error.errno in why:
            raise OSError(error.errno, why[error.errno], str(path)) from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        odd = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL, "it is no regular file"
    elif most is not None and found.st_size > most:  # a hole of a terabyte costs nothing to make
        odd = errno.EFBIG, f"it has more than {most} bytes"
    else:
        return descriptor
    close_descriptor(descriptor)
    raise OSError(*odd, str(path))


def close_descriptor(descriptor: int) -> None:
    """Close a descriptor and ignore errors.

    Use it only if nothing that must be on the disk was written through it.

    ``close`` may fail on a network file system that could not write data which it had accepted.
    Linux frees the
    descriptor even then, so it must not be closed again: its number may already belong to another
        file.
    """
    with suppress(OSError):
        os.close(descriptor)


def opened(path: Path, most: int | None = None) -> BufferedReader:
    """Return a file object of a regular file, to read; OSError as `open_file`."""
    return open(path, "rb", opener=_opener(most=most))


def opened_to_write(path: Path, how: Literal["rb+", "ab"]) -> BinaryIO:
    """Return a file object of a regular file, to write; OSError as `open_file`."""
    return open(path, how, opener=_opener())


def _opener(mode: int = PRIVATE, most: int | None = None) -> Callable[[str, int], int]:
    return lambda path, flags: open_file(Path(path), flags, mode, most)


def created(path: Path, mode: int = PRIVATE) -> BinaryIO:
    """Return a new file, to write and read.

    What has its name is removed, and not written through. OSError if not.
    """
    path.unlink(missing_ok=True)
    return open(path, "xb+", opener=_opener(mode))


def read_file(path: Path, most: int = _MOST_BYTES) -> bytes:
    """Return all of a regular file; OSError as `opened`."""
    with opened(path, most) as file:
        return file.read(os.fstat(file.fileno()).st_size)


def swap_in(path: Path, data: bytes) -> None:
    """Replace a file as a whole, but not durably: it must survive this process, not the machine."""
    temporary = path.with_name(f".{path.name}")
    with created(temporary) as file:
        file.write(data)
    temporary.replace(path)


def make_folder(run: Path, *names: str) -> Path:
    """Make a folder within a run directory and return it.

    OSError if a link on the way might lead out of it.
    """
    path = run
    for name in names:
        path = path / name
        path.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link, and a folder is needed", str(path))
    return path


def remove(path: Path) -> None:
    """Remove a folder with its contents, or a file, as far as the system permits.

    `shutil.rmtree` is not used: if closing a folder's descriptor fails, it closes it twice (CPython
        3.11 to 3.13).
    """
    with suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            _remove_folder(str(path), None)
        else:
            path.unlink()


def _remove_folder(name: str, parent: int | None) -> None:
    """Remove a folder and its contents without following symbolic links.

    Args:
        name: The name of the folder within its parent, or its path if `parent` is None.
        parent: A descriptor of the parent folder, or None.
    """
    # Another process may have replaced the folder meanwhile. With O_DIRECTORY, opening a pipe fails
    # without waiting.
    folder = os.open(
        name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent
    )
    try:
        with os.scandir(folder) as entries:
            contents = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for entry, is_folder in contents:
            with suppress(OSError):
                if is_folder:
                    _remove_folder(entry, folder)
                else:
                    os.unlink(entry, dir_fd=folder)
    finally:
        close_descriptor(folder)
    os.rmdir(name, dir_fd=parent)


def make_run_directory(path: Path) -> None:
    """Make a run directory that only this user may enter.

    One that exists, or a link to one, stays as it is.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
