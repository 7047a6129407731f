"""The files of a feature cache: a draft that grows while it is built, and the finished HDF5 file.

    features.h5.building/      a build under way, or one that was killed
        lock                   held by the builder; names its process
        key.json               what the features are made from, and what the function changes when it runs
        data                   64 KiB of nothing, then the items one behind the other
        journal                begin, end and digest of each item, 32 bytes, written after the item
    features.h5                finished; never changed again

HDF5 keeps its structure in blocks all over a file, and one that was open for writing when its process was killed may
not open again. So nothing is written through HDF5 until the last item is there. The draft is two files that only
grow, and a kill leaves a prefix of each; what the journal names and its digest confirms is kept. At the end HDF5
writes a twin with the same structure, whose dataset ``data`` is contiguous and still a hole. All of the twin but the
hole is copied around the items: ``data`` becomes a HDF5 file without moving a byte of theirs, and is renamed.

    /data    uint8, contiguous at byte 65536: the items
    /index   uint64 (items, 4), contiguous: begin, end, digest
    /about   JSON: format, length, digest of the index, key; with its SHA-256
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.core.durable import free_bytes, fsync_path, replace_file
from holdfast.core.errors import LoaderError
from holdfast.data.features.changing import Origin
from holdfast.data.features.errors import being_written
from holdfast.data.features.finished import FORMAT, MARK, ROW, read_at, require_h5py
from holdfast.data.features.items import digest_of

_DATA_AT = 65536
"""Where the items begin. HDF5 aligns what is at least so large to multiples of it, so ``data`` begins there too."""
_CHUNK_BYTES = 4 * 2**20
_ROWS_AT_ONCE = _CHUNK_BYTES // ROW.size
_FLOCK = struct.Struct("hhqqi")  # of fcntl(2) on 64-bit Linux: type, whence, start, length, process
_held: dict[str, Draft] = {}
"""Drafts with a builder in this process. A POSIX lock cannot tell two of its threads apart."""


def _write(descriptor: int, data: Any, begin: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, begin)
        view, begin = view[count:], begin + count


class Draft:
    """A feature cache that is being built. Items are added in order; `acquire` first, `release` at last.

    Args:
        path: Where the finished file will lie.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.directory = path.with_name(f"{path.name}.building")
        self._lock: int | None = None
        self._data = self._journal = -1
        self._end = 0
        self.length = 0
        """Items that are there."""

    @property
    def exists(self) -> bool:
        """Return whether a build was begun and not finished."""
        return self._place("data").exists()

    def _place(self, name: str) -> Path:
        return self.directory / name

    def origin(self) -> Origin | None:
        """Return what its features are made from; None if there is nothing to continue."""
        try:
            found = json.loads(self._place("key.json").read_bytes())
            origin = Origin.of(found) if found["format"] == FORMAT else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return origin if self.exists else None

    def describe(self, origin: Origin) -> None:
        """Note what its features are made from."""
        replace_file(self._place("key.json"), json.dumps({"format": FORMAT, **origin.as_json()}).encode())

    def builder(self) -> str | None:
        """Return who is building at the moment, or None."""
        if str(self.directory) in _held:  # not to be asked of the file: closing it would give the lock back
            return f"process {os.getpid()}"
        try:
            lock = os.open(self._place("lock"), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:  # only asks: a lock of our own, however short, would turn a builder away
            answer = fcntl.fcntl(lock, fcntl.F_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            return None if _FLOCK.unpack(answer)[0] == fcntl.F_UNLCK else _holder(lock)
        finally:
            os.close(lock)

    def items_written(self) -> int:
        """Return how many items the journal names, without a look at them."""
        try:
            return self._place("journal").stat().st_size // ROW.size
        except OSError:
            return 0

    def acquire(self) -> None:
        """Take the lock; it is released by `release` or by the end of the process, however it ends.

        Raises:
            LoaderError: H621, naming the process that has it.
            OSError: if the disk refuses.
        """
        if _held.setdefault(str(self.directory), self) is not self:
            raise being_written(self.path, f"process {os.getpid()}", self.items_written())
        try:
            self._lock = self._locked()
        except BaseException:
            del _held[str(self.directory)]
            raise
        os.ftruncate(self._lock, 0)
        with contextlib.suppress(OSError):  # a full disk: the name of the holder is a courtesy
            os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _locked(self) -> int:
        while True:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock = os.open(self._place("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:  # POSIX allows both
                holder = _holder(lock)
                os.close(lock)
                raise being_written(self.path, holder, self.items_written()) from error
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), self._place("lock").stat()):
                    return lock
            os.close(lock)  # a builder that has just finished removed it between our two lines

    def release(self) -> None:
        """Close the files and give the lock back. What was added stays."""
        for descriptor in (self._data, self._journal):
            if descriptor >= 0:
                os.close(descriptor)
        self._data = self._journal = -1
        if self._lock is not None:
            _held.pop(str(self.directory), None)
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove all that was added."""
        for name in ("key.json", "data", "journal"):  # the key first: without it nothing is continued
            self._place(name).unlink(missing_ok=True)

    def begin(self, origin: Origin) -> None:
        """Start an empty build."""
        self.discard()
        self._place("data").touch()
        self.describe(origin)

    def resume(self) -> Iterator[int]:
        """Open the files for adding, behind the items that are there; yield the number of each that verifies.

        What follows the first item that does not verify is cut off: it is computed again.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._data = os.open(self._place("data"), flags, 0o644)
        self._journal = os.open(self._place("journal"), flags, 0o644)
        self.length, self._end = 0, 0
        size = os.fstat(self._data).st_size - _DATA_AT
        for _ in range(self.items_written()):
            begin, end, digest = ROW.unpack(read_at(self._journal, ROW.size, self.length * ROW.size))
            if begin != self._end or not begin <= end <= size:
                break
            if digest_of(self.length, read_at(self._data, end - begin, _DATA_AT + begin)) != digest:
                break
            self.length, self._end = self.length + 1, end
            yield self.length
        os.ftruncate(self._data, _DATA_AT + self._end)
        os.ftruncate(self._journal, self.length * ROW.size)

    def add(self, data: bytes, digest: bytes) -> None:
        """Add the next item. The item first, then its row: a kill in between leaves bytes that nobody names."""
        end = self._end + len(data)
        _write(self._data, data, _DATA_AT + self._end)
        _write(self._journal, ROW.pack(self._end, end, digest), self.length * ROW.size)
        self.length, self._end = self.length + 1, end

    def finish(self, origin: Origin) -> None:
        """Make the draft a HDF5 file, flush it, and give it its name."""
        about = {"format": FORMAT, "length": self.length, "data_bytes": self._end, "index": self._index_digest()}
        about |= origin.as_json()
        twin, hole_end = self._place("twin"), _DATA_AT + max(self._end, _DATA_AT)
        needed = 2 * self.length * ROW.size + 2**20
        if free_bytes(self.directory) < needed:
            raise OSError(errno.ENOSPC, f"no space left on device, the index needs {needed} bytes more")
        try:
            self._write_twin(twin, json.dumps(about).encode(), hole_end - _DATA_AT)
        except RuntimeError as error:  # as h5py tells of some refusals of the disk
            raise OSError(errno.EIO, f"HDF5 cannot write ({error})") from error
        size = twin.stat().st_size
        with twin.open("rb") as source:
            for begin, end in ((0, _DATA_AT), (hole_end, size)):
                for at in range(begin, end, _CHUNK_BYTES):
                    _write(self._data, read_at(source.fileno(), min(_CHUNK_BYTES, end - at), at), at)
        os.ftruncate(self._data, size)
        os.fsync(self._data)
        self._place("data").rename(self.path)
        fsync_path(self.path.parent)
        self.remove()

    def _index_digest(self) -> str:
        """Return a digest of the journal, and so of all items: two builds of the same length are told apart by it."""
        digest = hashlib.sha256()
        for first in range(0, self.length, _ROWS_AT_ONCE):
            rows = min(_ROWS_AT_ONCE, self.length - first)
            digest.update(read_at(self._journal, rows * ROW.size, first * ROW.size))
        return digest.hexdigest()

    def tidy(self) -> None:
        """Remove what is left of a builder that was killed just after it had given the file its name."""
        if self.directory.exists() and not self.exists:
            with contextlib.suppress(OSError, LoaderError):
                self.acquire()
                try:
                    if not self.exists:
                        self.remove()
                finally:
                    self.release()

    def remove(self) -> None:
        """Remove the draft's directory. Only for the holder of the lock, with nothing in it to be kept."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _write_twin(self, twin: Path, about: bytes, data_bytes: int) -> None:
        """Let HDF5 write a file of this structure in which ``data`` is a hole. The same items give the same bytes."""
        h5py = require_h5py()
        how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        how.set_layout(h5py.h5d.CONTIGUOUS)
        how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        how.set_obj_track_times(False)
        with h5py.File(  # headers of 1.8 and later have checksums
            twin,
            "w",
            libver=("v108", "v110"),
            locking=False,
            alignment_threshold=_DATA_AT,
            alignment_interval=_DATA_AT,
        ) as h5:
            space, kind = h5py.h5s.create_simple((data_bytes,)), h5py.h5t.STD_U8LE
            data = h5py.h5d.create(h5.id, b"data", kind, space, how)
            assert data.get_offset() == _DATA_AT, f"HDF5 has put the items at byte {data.get_offset()}"
            index = h5.create_dataset("index", (self.length, ROW.size // 8), dtype="<u8", track_times=False)
            for first in range(0, self.length, _ROWS_AT_ONCE):
                rows = min(_ROWS_AT_ONCE, self.length - first)
                block = read_at(self._journal, rows * ROW.size, first * ROW.size)
                index[first : first + rows] = np.frombuffer(block, "<u8").reshape(rows, -1)
            h5.create_dataset("about", data=np.frombuffer(about, "u1"), track_times=False)
            # Of fixed length, so that it lies in a header: strings of any length go to a heap without checksums, and
            # a flipped bit there can keep HDF5 busy for ever.
            h5.attrs[MARK] = np.bytes_(hashlib.sha256(about).hexdigest())


def _holder(lock: int) -> str:
    return os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
