"""A lock file that only one process can hold at a time, and that contains the holder's name.

The lock is a POSIX record lock rather than a ``flock``. Forked loader workers would inherit a
``flock``, so a stuck worker would keep the file locked after its training process was killed.
Callers catch `LockHeldError` and raise an error that tells the user what is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

from holdfast.core.files import close_descriptor, open_file

# The layout of struct flock, for fcntl(2) on 64-bit Linux: type, whence, start, length, process.
_FLOCK = struct.Struct("hhqqi4x")
# The paths of the files that this process has locked. They are tracked here because the kernel
# allows a process to take the same POSIX lock twice.
_held: set[str] = set()


class LockHeldError(Exception):
    """The lock is already held. `holder` names its holder, such as ``"process 4711 on node3"``."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"locked by {holder}")
        self.holder = holder


class FileLock:
    """A lock on a file. The kernel releases the lock when the process ends, for whatever reason.

    Args:
        path: The file, in an existing directory. It is created if missing, and its contents are
            overwritten with the name of the holder.
    """

    def __init__(self, path: Path) -> None:
        self._given_path = path
        self._path = _without_links(path)
        self._descriptor: int | None = None
        self._own_text = ""

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            LockHeldError: If this process or another one already holds the lock.
            OSError: If the file cannot be created or locked.
        """
        self._path = _without_links(self._given_path)
        if str(self._path) in _held:
            raise LockHeldError(f"process {os.getpid()}")
        self._take(_lock_file(self._path))

    def hold(self) -> None:
        """Check that the lock is still held and still protects its path; take it again if not.

        If `acquire` was not called, do nothing. A process loses a POSIX lock when it closes any
        descriptor of the file. The lock also becomes useless if the file is removed or its
        directory is moved, because another process would then create and lock a new file.

        Raises:
            LockHeldError: If another process holds the lock, or has held it in the meantime.
            FileNotFoundError: If the file's directory no longer exists.
            OSError: If the file cannot be read or locked.
        """
        if self._descriptor is None:
            return
        try:
            at_path = self._given_path.lstat()
        except FileNotFoundError:
            self._take_again()
            return
        if not os.path.samestat(os.fstat(self._descriptor), at_path):
            raise LockHeldError(last_holder(self._given_path))
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise LockHeldError(_text(self._descriptor)) from None
        if _text(self._descriptor) != self._own_text:
            raise LockHeldError(_text(self._descriptor))

    @property
    def own_text(self) -> str:
        """Return the text that the lock file contains while this object holds the lock."""
        return self._own_text

    @property
    def is_held_here(self) -> bool:
        """Return whether this process holds the lock, through this or another `FileLock`."""
        return str(self._path) in _held

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            self.release()

    def release(self) -> None:
        """Release the lock, if it is held."""
        descriptor = self._descriptor
        if descriptor is not None:
            _held.discard(str(self._path))
            self._descriptor = None
            close_descriptor(descriptor)

    def _take(self, descriptor: int) -> None:
        """Store the descriptor of a newly locked file, and write this process's name to it."""
        self._descriptor = descriptor
        _held.add(str(self._path))
        # On a full disk, the holder's name cannot be written, but the lock still protects the file.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        self._own_text = _text(descriptor)

    def _take_again(self) -> None:
        """Lock a new file at the path after the old one was removed, and release the old one."""
        path = _without_links(self._given_path)
        if path != self._path and str(path) in _held:
            # A symbolic link in the path has changed. The path now leads to a file that this
            # process has already locked.
            raise LockHeldError(f"process {os.getpid()}")
        descriptor = _lock_file(path)
        self.release()
        self._path = path
        self._take(descriptor)


def _without_links(path: Path) -> Path:
    """Resolve the symbolic links in a path's directory, but not a link in its last component."""
    return path.parent.resolve() / path.name


def _lock_file(path: Path) -> int:
    """Lock a file, which is created if missing, and return its descriptor.

    Raises:
        LockHeldError: If another process holds the lock.
        OSError: If the file cannot be created or locked.
    """
    while True:
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
        except (BlockingIOError, PermissionError):
            holder = _text(descriptor)
            close_descriptor(descriptor)
            raise LockHeldError(holder) from None
        except OSError:
            # An example is ENOLCK on a network file system that does not support locks.
            close_descriptor(descriptor)
            raise
        # The file was removed after it was opened. The next iteration creates a new file.
        close_descriptor(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether `path` still refers to the file that is open as `descriptor`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def last_holder(path: Path) -> str:
    """Return the name in a lock file that another process created: its current or last holder.

    Returns "another process" if the file does not contain the name or cannot be read.
    """
    try:
        descriptor = open_file(path)
    except OSError:
        return "another process"
    try:
        return _text(descriptor)
    finally:
        close_descriptor(descriptor)


def find_holder(path: Path) -> str | None:
    """Return the name of the process that holds a lock, or None if no process holds it.

    This function does not take the lock, so the answer may be outdated by the time it returns.
    """
    if str(_without_links(path)) in _held:
        # Opening and closing the file would release this process's lock.
        return f"process {os.getpid()}"
    try:
        descriptor = open_file(path)
    except OSError:
        return None
    try:
        if not _is_locked(descriptor):
            return None
        return _text(descriptor)
    finally:
        close_descriptor(descriptor)


def is_locked(path: Path) -> bool | None:
    """Return whether any process holds the lock on a file, or None if that is unknown."""
    try:
        if find_holder(path) is not None:
            return True
        is_unreadable = path.exists() and not os.access(path, os.R_OK)
    except (OSError, struct.error):
        return None
    if is_unreadable:
        return None
    return False


def _is_locked(descriptor: int) -> bool:
    """Return whether another process holds the lock on an open file, without taking the lock."""
    # F_GETLK returns an existing lock that conflicts with the requested one, or F_UNLCK.
    whole_file = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    conflicting_type, *_ = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, whole_file))
    return bool(conflicting_type != fcntl.F_UNLCK)


def _text(descriptor: int) -> str:
    """Return the holder's name from a lock file, or "another process" if the file is empty."""
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
