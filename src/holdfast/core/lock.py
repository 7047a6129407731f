"""Lock a file that only one process at a time may hold, and that names its holder.

It is a POSIX record lock rather than a ``flock``, which forked loader workers would inherit: a
stuck worker would keep the file locked after its trainer was killed. What the lock protects, and
the errors for users, are up to the caller.
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
# The files that this process has locked. POSIX locks do not exclude two holders within one process.
_held: set[str] = set()


class LockHeldError(Exception):
    """The lock is already held, for instance by ``"process 4711 on node3"``."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"locked by {holder}")
        self.holder = holder


class FileLock:
    """A lock on a file. The kernel releases it when the process ends, however it ends.

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
            LockHeldError: If another holder has it.
            OSError: If the file cannot be created or locked.
        """
        self._path = _without_links(self._given_path)
        if str(self._path) in _held:
            raise LockHeldError(f"process {os.getpid()}")
        self._take(_lock_file(self._path))

    def hold(self) -> None:
        """Check that the lock is still held and still protects its path; take it again if not.

        A POSIX lock is lost when the process closes any descriptor of the file. It also protects
        nothing once the file was removed or its directory was moved, because another process would
        lock a new file.

        Raises:
            LockHeldError: If another process has the lock, or had it meanwhile.
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
        """Return whether this process has the lock, through this object or another one."""
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
        """Keep the descriptor of a file that was just locked, and write our name into the file."""
        self._descriptor = descriptor
        _held.add(str(self._path))
        # The lock also works without the holder's name, which may not fit on a full disk.
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
    """Return whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _last_holder(path: Path) -> str:
    """Return the current or last holder of a lock file that another process has created."""
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

    The lock is not taken for this, so no other process is turned away meanwhile.
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
    """Return whether a process holds the lock of a file; None if that cannot be determined."""
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
    # The kernel returns a lock that would conflict with this one, if there is any.
    whole_file = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    conflicting_type, *_ = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, whole_file))
    return bool(conflicting_type != fcntl.F_UNLCK)


def _text(descriptor: int) -> str:
    """Return the contents of a lock file, which name its holder."""
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
