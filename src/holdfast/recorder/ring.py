"""A ring of fixed-size records in a memory-mapped file: the writer, and a tolerant reader.

The pages belong to the kernel, so they survive the death of the process by any signal (but not a
power cut). Each slot holds its sequence number at both ends, first and last in memory order: a kill
between the two leaves a slot whose ends differ, which the reader drops. The whole file is allocated
at the start, since writing to a hole of a mapped file on a full disk raises SIGBUS.

    header (4096 bytes)  magic, version, payload bytes, capacity
    slot i               sequence | unix nanoseconds | payload | sequence

Payloads are interpreted elsewhere (``black_box``). Nothing is locked: the run directory guarantees
a single writer per file.
"""

from __future__ import annotations

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
# Twice the largest ring that is written.
_MOST_BYTES = 8 << 20
# System errors for a path that is not a regular file, or for a file too large to be a ring.
_NOT_A_RING = frozenset({errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.EFBIG})
# More records than any process writes, even one per microsecond for years. Larger numbers are
# garbage in a damaged file.
_MOST_RECORDS = 2**48
# The most torn slots that a kill leaves, plus one.
_MOST_TORN = 2

# Flags in a record of a step: which of its numbers were read, even if they are NaN. The bits from
# the eighth on are the number of the optimizer.
LOSS_IS_READ = 1
NORM_IS_READ = 2
RATE_IS_READ = 4
OPTIMIZER_SHIFT = 8


class Record(NamedTuple):
    """One payload with its place in time."""

    # The number of the record, from 1, without gaps at the writer.
    sequence: int
    # Unix time.
    nanoseconds: int
    # Exactly as long as the ring's payloads, padded with zeros.
    payload: bytes


def value_or_none(number: float, is_read: int) -> float | None:
    """Return a recorded number, or None if it had not been read from the device.

    Such a number is NaN, and its flag in the record is not set.
    """
    if is_read or not math.isnan(number):
        return number
    return None


def slot_struct(payload_bytes: int) -> struct.Struct:
    """Return the layout of one slot."""
    return struct.Struct(f"<QQ{payload_bytes}sQ")


class RingWriter:
    """Append records to a ring file, which is created or continued.

    An existing file is continued if it has the same layout and intact records. Any other file is
    kept beside it as ``.old``, and `moved_aside` gives the reason.

    Args:
        path: The file.
        payload_bytes: The size of a record's payload.
        capacity: Records that are kept; older ones are overwritten.
        has_history: Whether records join the ``history`` beside the file before they are
            overwritten. Only for rings of steps.

    Raises:
        OSError: The file cannot be created or its space cannot be allocated.
    """

    def __init__(
        self, path: Path, *, payload_bytes: int, capacity: int, has_history: bool = False
    ) -> None:
        self._path = path
        self._has_history = has_history
        self._capacity = capacity
        self._half = max(capacity // 2, 1)
        self._slot = slot_struct(payload_bytes)
        self._pack_into = self._slot.pack_into
        self._slot_bytes = self._slot.size
        size_bytes = HEADER_BYTES + capacity * self._slot_bytes
        header = HEADER.pack(MAGIC, VERSION, payload_bytes, capacity)
        # The number of the newest record.
        self._sequence = 0
        # Why the existing file was not continued, and where it is now. Empty if there was none, or
        # if it is continued.
        self.moved_aside = ""
        try:
            self._sequence = _newest_sequence(path, header, size_bytes, self._slot)
        except _NotARingError as error:
            kept_as = _move_aside(path)
            self.moved_aside = f"{error}; it is kept as {kept_as.name}"
        self._map = _map_file(path, header, size_bytes)
        # The number of the record with which the next half of the ring begins.
        halves_begun = -(-(self._sequence + 1) // self._half)
        self._next_half = halves_begun * self._half

    def append(self, payload: bytes) -> None:
        """Write one record. The payload must not be longer than `payload_bytes`.

        Cost: below 1 microsecond; no system call.
        """
        sequence = self._sequence + 1
        if sequence == self._next_half:
            self._summarize_next_half()
        offset = HEADER_BYTES + (sequence % self._capacity) * self._slot_bytes
        self._pack_into(self._map, offset, sequence, time_ns(), payload, sequence)
        self._sequence = sequence

    def _summarize_next_half(self) -> None:
        """Summarize half of the ring before the next record begins to overwrite it."""
        first_new = self._next_half
        self._next_half += self._half
        if not self._has_history or first_new < self._capacity:
            return
        # On a full disk, or without numpy, recording continues without a history.
        with suppress(Exception):
            from holdfast.recorder.history import extend_history

            start = HEADER_BYTES + (first_new % self._capacity) * self._slot_bytes
            slots = self._map[start : start + self._half * self._slot_bytes]
            extend_history(self._path, slots, self._slot_bytes, first_new - self._capacity)

    def close(self) -> None:
        """Unmap the file. Nothing may be appended afterwards."""
        self._map.close()


def _map_file(path: Path, header: bytes, size_bytes: int) -> mmap.mmap:
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        if os.fstat(descriptor).st_size == 0:
            os.posix_fallocate(descriptor, 0, size_bytes)
            os.pwrite(descriptor, header, 0)
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)


class _NotARingError(Exception):
    """A file is not a ring, or not one that can be continued. Says why."""


def _newest_sequence(path: Path, header: bytes, size_bytes: int, slot: struct.Struct) -> int:
    """Return the number of a ring's newest record, or 0 if it has none or does not exist.

    Raises:
        _NotARingError: The file cannot be continued.
    """
    # Read through the file: reading the map would make all of its pages resident at once.
    data = _read(path)
    if not data:
        return 0
    if len(data) != size_bytes or not data.startswith(header):
        raise _NotARingError("it has another layout, or its header is damaged")
    records, damaged = _records(data, slot)
    if damaged > _MOST_TORN:
        raise _NotARingError(f"{damaged} of its records are damaged")
    return records[-1].sequence if records else 0


def _read(path: Path) -> bytes:
    """Return the content of a file, which is empty if it does not exist."""
    try:
        return read_file(path, _MOST_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        if error.errno not in _NOT_A_RING:
            raise
        raise _NotARingError(error.strerror) from error


def _move_aside(path: Path) -> Path:
    """Rename a file that must not be overwritten, and return its new path.

    A file that was moved aside before is replaced by a file, but by nothing else.
    """
    target = path.with_name(f"{path.name}.old")
    number = 1
    while os.path.lexists(target) and not (target.is_file() and path.is_file()):
        number += 1
        target = path.with_name(f"{path.name}.old-{number}")
    return path.replace(target)


def _records(data: bytes, slot: struct.Struct) -> tuple[list[Record], int]:
    """Return the intact records, oldest first, and the number of damaged slots."""
    *_, capacity = HEADER.unpack_from(data)
    slots_end = len(data) - (len(data) - HEADER_BYTES) % slot.size
    slots = slot.iter_unpack(memoryview(data)[HEADER_BYTES:slots_end])
    records = []
    damaged = 0
    for index, (first, nanoseconds, payload, last) in enumerate(slots):
        is_number = first == last and 0 < first < _MOST_RECORDS
        if is_number and capacity and first % capacity == index:
            records.append(Record(first, nanoseconds, payload))
        elif first or last:
            damaged += 1
    records.sort(key=lambda record: record.sequence)
    return records, damaged


def read_ring(path: Path) -> list[Record]:
    """Return the intact records of a ring, oldest first. A missing file has none.

    Raises:
        RunDirectoryError: H305 if the file is not a ring or was written by a newer holdfast.
    """
    try:
        data = _read(path)
    except _NotARingError as error:
        raise unreadable(path, f"no recording ({error})") from error
    if len(data) < HEADER_BYTES:
        return []
    magic, version, payload_bytes, _ = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise unreadable(path, "no recording")
    if version > VERSION:
        raise unreadable(path, f"version {version}")
    records, _ = _records(data, slot_struct(payload_bytes))
    return records


def unreadable(path: Path, problem: str) -> RunDirectoryError:
    """Return H305 for a file that this holdfast cannot read."""
    return RunDirectoryError(
        f"{path} is {problem}",
        limit=f"this holdfast reads recordings up to version {VERSION}",
        fix="read it with the holdfast that wrote it, or move the file away.",
        rule="H305",
    )
