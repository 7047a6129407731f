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

from holdfast.core.files import open_file

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
        self._path = path.parent.resolve() / path.name
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock; LockHeldError names the holder, OSError if the disk refuses."""
        if str(self._path) in _held:
            raise LockHeldError(f"process {os.getpid()}")
        while True:
            descriptor = open_file(self._path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                holder = _text(descriptor)
                os.close(descriptor)
                raise LockHeldError(holder) from error
            except OSError:  # such as ENOLCK: a network disk without locks
                os.close(descriptor)
                raise
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self._path.lstat()):
                    break
            os.close(descriptor)  # whoever had it has just removed the file
        _held.add(str(self._path))
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        with contextlib.suppress(OSError):  # a full disk: the name of the holder is a courtesy
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        self._own_text = _text(descriptor)

    def hold(self) -> None:
        """Make sure that a lock which was taken is still there: closing any other descriptor of the file loses it.

        LockHeldError if another process has it by now, or has had it meanwhile.
        """
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _text(self._descriptor) == self._own_text:
                    return
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
            os.close(self._descriptor)
            self._descriptor = None


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
        os.close(descriptor)


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
