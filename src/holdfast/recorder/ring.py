"""A ring of fixed-size records in a memory-mapped file: the writer, and a tolerant reader.

The pages belong to the kernel, so they survive the death of the process by any signal (not a power
cut). Each slot carries its sequence number at both ends, first and last in memory order: a kill
between the two leaves a slot whose ends differ, which the reader drops. The whole file is allocated
at the start, since writing to a hole of a mapped file on a full disk is a SIGBUS.

    header (4096 bytes)   magic, version, payload bytes, capacity
    slot i                sequence | unix nanoseconds | payload | sequence

Does not: interpret payloads (``black_box`` does), lock (one writer per file, guaranteed by the run
directory).
"""

from __future__ import annotations

import bisect
import errno
import math
import mmap
import os
import struct
from contextlib import suppress
from pathlib import Path
from time import time_ns
from typing import NamedTuple

from holdfast.core.errors import RunDirectoryError
from holdfast.core.files import open_file, read_file

MAGIC = b"HOLDRING"
VERSION = 1
HEADER = struct.Struct("<8sIII")
HEADER_BYTES = 4096
_MOST_BYTES = 8 << 20  # twice the largest that is written
_NO_FILE = {errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.EFBIG}
_MOST_RECORDS = 2**62  # more than any process writes; what fills a damaged file is beyond it
# At least one in so many of the records that a number implies is there, in a damaged file too
_LEAST_BELONGING = 50
_MOST_TORN = 2  # slots that a kill leaves torn, with one to spare


class Record(NamedTuple):
    """One payload with its place in time."""

    sequence: int  # number of the record, from 1, without gaps at the writer
    nanoseconds: int  # Unix time
    payload: bytes  # exactly the ring's payload size, zero-padded


def value_or_none(number: float, is_read: int) -> float | None:
    """Return a number of a record, None if nobody read it.

    NaN, without the mark that it is a value.
    """
    return number if is_read or not math.isnan(number) else None


def slot_struct(payload_bytes: int) -> struct.Struct:
    """Return the layout of one slot."""
    return struct.Struct(f"<QQ{payload_bytes}sQ")


class RingWriter:
    """Append records to a ring file, created or continued.

    Args:
        path: The file. An existing one is continued if it has the same layout and whole records,
            else whatever lies there is kept beside it as ``.old``, and `moved_aside` says why.
        payload_bytes: Most bytes of one record.
        capacity: Records kept; older ones are overwritten.
        has_history: Whether these join the ``history`` beside the file before; of steps only.

    Raises:
        OSError: if the file cannot be created or its space cannot be allocated.
    """

    def __init__(
        self, path: Path, *, payload_bytes: int, capacity: int, has_history: bool = False
    ) -> None:
        self._path, self._has_history, self._half = path, has_history, max(capacity // 2, 1)
        self._slot = slot_struct(payload_bytes)
        self._pack_into = self._slot.pack_into
        self._slot_bytes = self._slot.size
        self._capacity = capacity
        size = HEADER_BYTES + capacity * self._slot_bytes
        header = HEADER.pack(MAGIC, VERSION, payload_bytes, capacity)
        # Read through the file: a look at the map would make all of its pages resident at once.
        self._sequence, why = _standing(path, header, size, self._slot)
        self.moved_aside = f"{why}; it is kept as {_move_aside(path).name}" if why else ""
        """Why what lay there was not continued, and where it is now; empty if nothing did, or it is
        continued."""
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            if os.fstat(descriptor).st_size == 0:
                os.posix_fallocate(descriptor, 0, size)
                os.pwrite(descriptor, header, 0)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        # The number of the record that begins the next half, or the rest, of the ring.
        self._turn = -(-(self._sequence + 1) // self._half) * self._half

    def append(self, payload: bytes) -> None:
        """Write one record; a payload that is too long is an error of the caller.

        Cost: below 1 microsecond; no system call.
        """
        sequence = self._sequence + 1
        if sequence == self._turn:
            self._turn_over()
        offset = HEADER_BYTES + (sequence % self._capacity) * self._slot_bytes
        self._pack_into(self._map, offset, sequence, time_ns(), payload, sequence)
        self._sequence = sequence

    def _turn_over(self) -> None:
        """Keep what half of the ring holds in short, before the next record begins to overwrite
        it.
        """
        number, self._turn = self._turn, self._turn + self._half
        if not self._has_history or number < self._capacity:
            return
        # On a full disk, or without numpy: no reason to stop what is recorded
        with suppress(Exception):
            from holdfast.recorder.history import extend

            start = HEADER_BYTES + (number % self._capacity) * self._slot_bytes
            held = self._map[start : start + self._half * self._slot_bytes]
            extend(self._path, held, self._slot_bytes, number - self._capacity)

    def close(self) -> None:
        """Unmap the file. Appending afterwards is an error of the caller."""
        self._map.close()


def _standing(path: Path, header: bytes, size: int, slot: struct.Struct) -> tuple[int, str]:
    """Return the number of the newest record, and why the file cannot be continued, or an empty
    text.
    """
    data, why = _read(path)
    if why or not data:
        return 0, why
    if len(data) != size or not data.startswith(header):
        return 0, "it has another layout, or its header is damaged"
    records, damaged = _records(data, slot)
    if damaged > _MOST_TORN:
        return 0, f"{damaged} of its records are damaged"
    return records[-1].sequence if records else 0, ""


def _read(path: Path) -> tuple[bytes, str]:
    """Return what a ring holds, nothing if there is none, and why what lies there is none, or an
    empty text.
    """
    try:
        return read_file(path, _MOST_BYTES), ""
    except FileNotFoundError:
        return b"", ""
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        return b"", str(error.strerror)


def _move_aside(path: Path) -> Path:
    """Rename what is not ours to destroy.

    What was moved aside before is replaced if that is a file.
    """
    target, number = path.with_name(f"{path.name}.old"), 1
    while os.path.lexists(target) and not (target.is_file() and path.is_file()):
        number += 1
        target = path.with_name(f"{path.name}.old-{number}")
    return path.replace(target)


def _records(data: bytes, slot: struct.Struct) -> tuple[list[Record], int]:
    """Return the whole records, oldest first, and how many slots hold something else.

    A record lies where its number says. Numbers run on without gaps, so that one which hardly any
    of those before it belong to was not counted: it is what fills a damaged file.
    """
    *_, capacity = HEADER.unpack_from(data)
    usable = len(data) - (len(data) - HEADER_BYTES) % slot.size
    found, damaged = [], 0
    for index, (first, nanoseconds, payload, last) in enumerate(
        slot.iter_unpack(memoryview(data)[HEADER_BYTES:usable])
    ):
        if first == last and 0 < first < _MOST_RECORDS and capacity and first % capacity == index:
            found.append(Record(first, nanoseconds, payload))
        elif first or last:
            damaged += 1
    found.sort(key=lambda record: record.sequence)
    kept = min(capacity, (usable - HEADER_BYTES) // slot.size)
    while found:
        newest = found[-1].sequence
        belonging = len(found) - bisect.bisect_right(
            found, newest - capacity, key=lambda record: record.sequence
        )
        if belonging >= min(newest, kept) // _LEAST_BELONGING:
            break
        found.pop()
        damaged += 1
    return found, damaged


def read_ring(path: Path) -> list[Record]:
    """Return the whole records of a ring, oldest first; a missing file gives none.

    H305 if the file is no ring or was written by a newer holdfast.
    """
    data, why = _read(path)
    if why:
        raise newer(path, f"no recording ({why})")
    if len(data) < HEADER_BYTES:
        return []
    magic, version, payload_bytes, _ = HEADER.unpack_from(data)
    if magic != MAGIC or version > VERSION:
        raise newer(path, f"version {version}" if magic == MAGIC else "no recording")
    return _records(data, slot_struct(payload_bytes))[0]


def newer(path: Path, found: str) -> RunDirectoryError:
    """Return the error for a file that this holdfast cannot read."""
    return RunDirectoryError(
        f"{path} is {found}",
        limit=f"this holdfast reads recordings up to version {VERSION}",
        fix="read it with the holdfast that wrote it, or move the file away.",
        rule="H305",
    )
