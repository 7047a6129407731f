"""The files of a feature cache: a draft that grows while it is built, and the finished HDF5 file.

    features.h5.building/      a build under way, or one that was killed
        lock                   held by the builder; names its process
        key.json               what the features are made from
        data                   64 KiB of nothing, then of each item: length, digest, bytes
    features.h5                finished; never changed again

HDF5 keeps its structure in blocks all over a file, and one that was open for writing when its
process was killed may not open again. So nothing is written through HDF5 until the last item is
there: ``data`` only grows, a kill leaves a prefix, and the items whose digests match are kept. At
the end HDF5 writes a twin with the same structure, whose dataset ``data`` is contiguous and still a
hole. All of the twin but the hole is copied around the items: ``data`` becomes a HDF5 file without
moving a byte of theirs, and is renamed.

    /data    uint8, contiguous at byte 65536: the items
    /index   uint64 (items, 4), contiguous: begin, end, digest
    /about   JSON: format, length, digest of the index, key; with its SHA-256
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from holdfast.core.durable import fsync_path, replace_file
from holdfast.core.errors import LoaderError
from holdfast.core.lock import FileLock, LockHeldError, find_holder
from recipes.features.items import DIGEST_BYTES, digest_of

_FORMAT = 2
_HEAD = struct.Struct(f"<Q{DIGEST_BYTES}s")
_ROW = struct.Struct(f"<QQ{DIGEST_BYTES}s")
_MARK = "holdfast_feature_cache"
_DATA_AT = 65536
"""Where the items begin. HDF5 aligns what is at least so large to multiples of it, so ``data``
begins there too."""
_LIMITS = {
    "H620": "a cache is read and continued only as what it is",
    "H621": "it has one writer, and can be read when all items are there",
    "H622": "an item is returned only if every byte verifies",
    "H623": "a feature cache holds the features of every item",
    "H624": "the file and a folder beside it must be readable, and writable while it is built",
}
_FIXES = {
    "H620": (
        "use another path, or remove the file, and the folder <path>.building, to compute it anew."
    ),
    "H621": (
        "wait until that build is done, or call FeatureCache.build with the same arguments: it"
        " continues."
    ),
    "H622": "copy the file again from where it came, or remove it and build it anew.",
    "H623": (
        "correct the sample or fn and build again: what came before is kept. If fn computes other"
        " features now, pass another version=."
    ),
    "H624": (
        "free some space or give permission, then call FeatureCache.build again: what was computed"
        " is kept."
    ),
}


def failure(what: str, *, rule: str) -> LoaderError:
    """Return an error with the limit and the fix of its rule, H620 to H624."""
    return LoaderError(what, limit=_LIMITS[rule], fix=_FIXES[rule], rule=rule)


class Contents(NamedTuple):
    """What a finished file holds, and where.

    `identity` is a digest that distinguishes it from every other.
    """

    length: int
    key: dict[str, str]
    identity: str
    data_at: int
    data_bytes: int
    index_at: int


class Draft:
    """A feature cache at a path that is being built.

    Items are added in order; `acquire` first, `release` last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.directory = path.with_name(f"{path.name}.building")
        self._lock = FileLock(self.directory / "lock")
        self._data = -1
        self._index = bytearray()

    @property
    def length(self) -> int:
        """Return how many items are there."""
        return len(self._index) // _ROW.size

    @property
    def _end(self) -> int:
        return _ROW.unpack(self._index[-_ROW.size :])[1] if self._index else 0

    def key(self) -> dict[str, str] | None:
        """Return what its features are made from; None if there is nothing to continue."""
        try:
            found = json.loads((self.directory / "key.json").read_bytes())
            key = found["key"] if found["format"] == _FORMAT else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return key if isinstance(key, dict) and (self.directory / "data").exists() else None

    def acquire(self) -> None:
        """Take the lock; H621 names the process that has it."""
        while True:
            self.directory.mkdir(parents=True, exist_ok=True)
            try:
                return self._lock.acquire()
            except LockHeldError as error:
                raise failure(
                    f"feature cache {self.path} is being written by {error.holder}", rule="H621"
                ) from error
            except FileNotFoundError:
                # A builder that has just finished removed the directory between our two lines
                continue

    def release(self) -> None:
        """Close the file and give the lock back. What was added stays."""
        if self._data >= 0:
            os.close(self._data)
        self._data = -1
        self._lock.release()

    def begin(self, key: dict[str, str]) -> None:
        """Start an empty build; what was there is removed."""
        for name in ("key.json", "data"):  # the key first: without it nothing is continued
            (self.directory / name).unlink(missing_ok=True)
        (self.directory / "data").touch()
        replace_file(
            self.directory / "key.json", json.dumps({"format": _FORMAT, "key": key}).encode()
        )

    def resume(self) -> Iterator[int]:
        """Open the file for adding behind the items that verify; yield the number of each.

        The rest is cut off.
        """
        self._data = os.open(self.directory / "data", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._index = bytearray()
        size = os.fstat(self._data).st_size - _DATA_AT
        while (begin := self._end + _HEAD.size) <= size:
            length, digest = _HEAD.unpack(_read_at(self._data, _HEAD.size, _DATA_AT + self._end))
            whole = length <= size - begin
            if (
                not whole
                or digest_of(self.length, _read_at(self._data, length, _DATA_AT + begin)) != digest
            ):
                break
            self._index += _ROW.pack(begin, begin + length, digest)
            yield self.length
        os.ftruncate(self._data, _DATA_AT + self._end)

    def add(self, data: bytes, digest: bytes) -> None:
        """Add the next item."""
        begin = self._end + _HEAD.size
        _write(self._data, _HEAD.pack(len(data), digest) + data, _DATA_AT + self._end)
        self._index += _ROW.pack(begin, begin + len(data), digest)

    def finish(self, key: dict[str, str]) -> None:
        """Make the draft a HDF5 file, flush it, and give it its name."""
        data_bytes, index = max(self._end, _DATA_AT), hashlib.sha256(self._index).hexdigest()
        # The digest of the index makes one of the same key with other features another file.
        about = {
            "format": _FORMAT,
            "length": self.length,
            "data_bytes": data_bytes,
            "index": index,
            "key": key,
        }
        if shutil.disk_usage(self.directory).free < (needed := 2 * len(self._index) + 2**20):
            raise OSError(
                errno.ENOSPC, f"no space left on device, the index needs {needed} bytes more"
            )
        twin = self.directory / "twin"
        try:
            self._write_twin(twin, json.dumps(about).encode(), data_bytes)
        except RuntimeError as error:  # how h5py reports some refusals of the disk
            raise OSError(errno.EIO, f"HDF5 cannot write ({error})") from error
        with twin.open("rb") as source:
            _write(self._data, source.read(_DATA_AT), 0)
            source.seek(_DATA_AT + data_bytes)
            _write(self._data, source.read(), _DATA_AT + data_bytes)
        os.ftruncate(self._data, twin.stat().st_size)
        os.fsync(self._data)
        (self.directory / "data").rename(self.path)
        fsync_path(self.path.parent)
        shutil.rmtree(self.directory, ignore_errors=True)

    def _write_twin(self, twin: Path, about: bytes, data_bytes: int) -> None:
        """Let HDF5 write a file of this structure in which ``data`` is a hole.

        The same items give the same bytes.
        """
        h5py = require_h5py()
        how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        how.set_layout(h5py.h5d.CONTIGUOUS)
        how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        how.set_obj_track_times(False)
        aligned = {"alignment_threshold": _DATA_AT, "alignment_interval": _DATA_AT}
        # Headers of 1.8 and later have checksums.
        with h5py.File(twin, "w", libver=("v108", "v110"), locking=False, **aligned) as h5:
            space, kind = h5py.h5s.create_simple((data_bytes,)), h5py.h5t.STD_U8LE
            data = h5py.h5d.create(h5.id, b"data", kind, space, how)
            assert data.get_offset() == _DATA_AT, (
                f"HDF5 has put the items at byte {data.get_offset()}"
            )
            rows = np.frombuffer(self._index, "<u8").reshape(-1, _ROW.size // 8)
            h5.create_dataset("index", data=rows, dtype="<u8", track_times=False)
            h5.create_dataset("about", data=np.frombuffer(about, "u1"), track_times=False)
            # Of fixed length, so that it lies in a header: strings of any length go to a heap
            # without checksums, and a flipped bit there can keep HDF5 busy for ever.
            h5.attrs[_MARK] = np.bytes_(hashlib.sha256(about).hexdigest())


def require_h5py() -> Any:
    """Return the module h5py; H625 if it is not installed."""
    try:
        import h5py
    except ImportError as error:
        raise LoaderError(
            "h5py is not installed",
            limit="features are kept in HDF5",
            fix="pip install h5py",
            rule="H625",
        ) from error
    return h5py


def missing(path: Path) -> LoaderError:
    """Return the error for a file that is not there, as far as its builder has come."""
    draft = Draft(path)
    if builder := find_holder(draft.directory / "lock"):
        return failure(f"feature cache {path} is being written by {builder}", rule="H621")
    if draft.key() is not None:
        return failure(f"feature cache {path} is not finished: its build was stopped", rule="H621")
    fix = "call FeatureCache.build(dataset, fn, path, version=...), or correct the path."
    return LoaderError(
        f"there is no feature cache {path}", limit="it is built first", fix=fix, rule="H625"
    )


def open_finished(path: Path) -> tuple[int, Contents]:
    """Open a finished cache.

    Return a descriptor, for threads and after a fork too, and what the file holds.

    H620 for another kind of HDF5 file or a newer format, H622 for a damaged one, H624 for one that
    cannot be opened; FileNotFoundError if there is none.
    """
    h5py = require_h5py()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise failure(f"feature cache {path}: {error.strerror or error}", rule="H624") from error
    try:
        return descriptor, _contents(descriptor, path, h5py)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, (OSError, RuntimeError, KeyError, TypeError)):
            raise failure(
                f"feature cache {path}: HDF5 cannot read it ({error})", rule="H622"
            ) from error
        raise


def _contents(descriptor: int, path: Path, h5py: Any) -> Contents:
    with open(descriptor, "rb", closefd=False) as file, h5py.File(file, "r") as h5:
        if _MARK not in h5.attrs:
            raise failure(f"{path} is a HDF5 file of another kind", rule="H620")
        about = h5["about"][:].tobytes()
        identity = hashlib.sha256(about).hexdigest()
        if h5.attrs[_MARK] != identity.encode():
            raise failure(
                f"feature cache {path}: its description does not match its digest", rule="H622"
            )
        found = json.loads(about)
        if found["format"] != _FORMAT:
            raise failure(
                f"{path} has format {found['format']}; this holdfast reads {_FORMAT}", rule="H620"
            )
        data_at, index_at = (h5[name].id.get_offset() for name in ("data", "index"))
    contents = Contents(
        found["length"], found["key"], identity, data_at, found["data_bytes"], index_at
    )
    if os.fstat(descriptor).st_size < max(
        data_at + contents.data_bytes, index_at + _ROW.size * contents.length
    ):
        raise failure(f"feature cache {path} is shorter than it should be", rule="H622")
    return contents


def read_item(descriptor: int, contents: Contents, path: Path, index: int) -> bytearray:
    """Return the bytes of one item; H622 if they are not what was written."""
    try:
        begin, end, digest = _ROW.unpack(
            _read_at(descriptor, _ROW.size, contents.index_at + index * _ROW.size)
        )
        if begin <= end <= contents.data_bytes:
            data = _read_at(descriptor, end - begin, contents.data_at + begin)
            if digest_of(index, data) == digest:
                return data
    except (OSError, EOFError) as error:
        raise failure(
            f"feature cache {path}: item {index} cannot be read ({error})", rule="H622"
        ) from error
    raise failure(f"feature cache {path}: item {index} does not match its digest", rule="H622")


def _read_at(descriptor: int, length: int, begin: int) -> bytearray:
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        count = os.preadv(descriptor, [view[done:]], begin + done)
        if not count:
            raise EOFError(f"the file ends at byte {begin + done}")
        done += count
    return data


def _write(descriptor: int, data: Any, begin: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, begin)
        view, begin = view[count:], begin + count
