"""A lock file that only one process can hold at a time, and that contains the holder's name.

The lock is a POSIX record lock rather than a ``flock``, which forked loader workers would inherit:
a stuck worker would keep the file locked after its trainer was killed. Callers catch
`LockHeldError` and raise an error that tells the user what is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

from holdfast.core.files import close_descriptor, open_file

# struct flock of fcntl(2) on 64-bit Linux: type, whence, start, length, process.
_FLOCK = struct.Struct("hhqqi4x")
# The files that this process has locked. A POSIX lock does not keep the same process from taking
# it twice.
_held: set[str] = set()


class LockHeldError(Exception):
    """The lock is already held. `holder` says by whom, such as ``"process 4711 on node3"``."""

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

        A process loses a POSIX lock when it closes any descriptor of the file. The lock also
        protects nothing after the file has been removed or its directory has been moved, because
        another process would lock a new file.

        Raises:
            LockHeldError: If another process has the lock, or had it in the meantime.
            FileNotFoundError: If the directory is gone.
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
            raise LockHeldError(_last_holder(self._given_path))
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise LockHeldError(_text(self._descriptor)) from None
        if _text(self._descriptor) != self._own_text:
            raise LockHeldError(_text(self._descriptor))

    @property
    def is_held_here(self) -> bool:
        """Return whether this process holds the lock, through this object or another one."""
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
        """Store the descriptor of a file that was just locked, and write the holder's name."""
        self._descriptor = descriptor
        _held.add(str(self._path))
        # On a full disk, the holder's name cannot be written, but the lock still works.
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        self._own_text = _text(descriptor)

    def _take_again(self) -> None:
        """Lock a new file at the path, because the old one was removed, and release the old one."""
        path = _without_links(self._given_path)
        if path != self._path and str(path) in _held:
            # A symbolic link in the path has changed and now leads to a file that this process has
            # already locked.
            raise LockHeldError(f"process {os.getpid()}")
        descriptor = _lock_file(path)
        self.release()
        self._path = path
        self._take(descriptor)


def _without_links(path: Path) -> Path:
    """Return the path with the links in its directory resolved, but not a link at its end."""
    return path.parent.resolve() / path.name


def _lock_file(path: Path) -> int:
    """Create a file if it is missing, lock it and return its descriptor.

    Raises:
        LockHeldError: If another process has the lock.
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
            # For example ENOLCK, if a network file system has no locks.
            close_descriptor(descriptor)
            raise
        # The file was removed after it was opened. The next iteration creates a new one.
        close_descriptor(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether `path` still leads to the file that is open as `descriptor`."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _last_holder(path: Path) -> str:
    """Return the name of the current or last holder of another process's lock file."""
    try:
        descriptor = open_file(path)
    except OSError:
        return "another process"
    try:
        return _text(descriptor)
    finally:
        close_descriptor(descriptor)


def find_holder(path: Path) -> str | None:
    """Return the name of the holder of a lock, or None if nobody holds it.

    The function does not take the lock, so another process can acquire it at the same time.
    """
    if str(_without_links(path)) in _held:
        # Opening and closing the file would release our own lock.
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
    """Return whether any process holds the lock of a file, or None if that is unknown."""
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
    """Return whether another process holds the lock of an open file, without taking it."""
    # The kernel returns an existing lock that conflicts with the requested one, if there is any.
    whole_file = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    conflicting_type, *_ = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, whole_file))
    return bool(conflicting_type != fcntl.F_UNLCK)


def _text(descriptor: int) -> str:
    """Return the contents of a lock file, which name its holder."""
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
