"""The lock of a file that one process at a time may hold, and that names its holder.

A POSIX record lock and not ``flock``: forked loader workers inherit the latter, so one that is stuck would keep the
file locked after its trainer was killed. Does not decide what is protected, and builds no error of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

from holdfast.core.files import close_descriptor, open_file

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of fcntl(2) on 64-bit Linux: type, whence, start, length, process
_held: set[str] = set()
"""Files that this process has locked. A POSIX lock cannot tell two of its threads apart."""


class LockHeldError(Exception):
    """Another holder has the lock, for instance ``"process 4711 on node3"``."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"locked by {holder}")
        self.holder = holder


class FileLock:
    """A lock on a file, made if missing. The end of the process, however it ends, releases it too.

    Nothing else may be kept in the file, and its directory exists.
    """

    def __init__(self, path: Path) -> None:
        self._given_path = path
        self._path = _without_links(path)
        self._descriptor: int | None = None
        self._own_text = ""

    def acquire(self) -> None:
        """Take the lock; LockHeldError names the holder, OSError if the disk refuses."""
        self._path = _without_links(self._given_path)
        if str(self._path) in _held:
            raise LockHeldError(f"process {os.getpid()}")
        self._take(_lock_file(self._path))

    def hold(self) -> None:
        """Make sure that a lock which was taken is still held, and that it is the lock of this path.

        It is lost when any other descriptor of the file is closed, and nobody else sees it where the file was removed
        or its directory was moved. Then it is taken again, unless another process has had it meanwhile.

        Raises:
            LockHeldError: If another process has the lock by now, or has had it meanwhile.
            OSError: If the disk does not say; FileNotFoundError if the directory is gone.
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
        """Return whether this process has the lock, by this object or another."""
        return str(self._path) in _held

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            self.release()

    def release(self) -> None:
        """Give the lock back. Without effect if it is not held."""
        if self._descriptor is not None:
            _held.discard(str(self._path))
            descriptor, self._descriptor = self._descriptor, None
            close_descriptor(descriptor)

    def _take(self, descriptor: int) -> None:
        """Keep the descriptor of a file that was just locked, and write into the file who has the lock."""
        self._descriptor = descriptor
        _held.add(str(self._path))
        with contextlib.suppress(OSError):  # a full disk: the name of the holder is a courtesy
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        self._own_text = _text(descriptor)

    def _take_again(self) -> None:
        """Take the lock of a new file, since the old one is not at its path any more; then give that one back."""
        path = _without_links(self._given_path)
        if path != self._path and str(path) in _held:  # a link on the way leads elsewhere by now
            raise LockHeldError(f"process {os.getpid()}")
        descriptor = _lock_file(path)
        self.release()
        self._path = path
        self._take(descriptor)


def _without_links(path: Path) -> Path:
    """Return the path with all links on the way to it followed, but not a link at its end."""
    return path.parent.resolve() / path.name


def _lock_file(path: Path) -> int:
    """Return a descriptor of a file, made if missing, that was locked with it; LockHeldError or OSError if not."""
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
        except OSError:  # such as ENOLCK: a network disk without locks
            close_descriptor(descriptor)
            raise
        close_descriptor(descriptor)  # whoever had it has just removed the file


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether an open file is the one at a path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _last_holder(path: Path) -> str:
    """Return who has the lock of a file that another process has put at a path, or has had it."""
    try:
        descriptor = open_file(path)
    except OSError:
        return "another process"
    try:
        return _text(descriptor)
    finally:
        close_descriptor(descriptor)


def find_holder(path: Path) -> str | None:
    """Return who holds the lock of a file, or None. Takes no lock itself, so nobody else is turned away."""
    if str(path.parent.resolve() / path.name) in _held:  # closing the file would release our own lock
        return f"process {os.getpid()}"
    try:
        descriptor = open_file(path)
    except OSError:
        return None
    try:
        return _text(descriptor) if _is_locked(descriptor) else None
    finally:
        close_descriptor(descriptor)


def is_locked(path: Path) -> bool | None:
    """Return whether a process holds the lock of a file; None if that cannot be known."""
    try:
        return find_holder(path) is not None or (None if path.exists() and not os.access(path, os.R_OK) else False)
    except (OSError, struct.error):
        return None


def _is_locked(descriptor: int) -> bool:
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _text(descriptor: int) -> str:
    return os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
