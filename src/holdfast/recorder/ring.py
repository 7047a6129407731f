"""Write and read a ring of fixed-size records in a memory-mapped file.

The mapped pages belong to the kernel, so records survive any signal that kills the process (but not
a power failure). Each slot stores its sequence number twice, at its beginning and at its end. If
the process is killed between these two writes, the numbers differ and the reader drops the slot.
The file is fully allocated when it is created: on a full disk, writing to an unallocated page of a
mapped file would raise SIGBUS.

    header (4096 bytes)  magic, version, payload bytes, capacity
    slot i               sequence | unix nanoseconds | payload | sequence

Other modules, such as ``black_box``, define the payloads. There are no locks, because the run
directory ensures that each file has only one writer.
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
# The largest file to read: twice the size of the largest ring that holdfast writes.
_MOST_BYTES = 8 << 20
# Errors from opening a path that is not a regular file, or a file that is too large to be a ring.
_NOT_A_RING = frozenset({errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.EFBIG})
# The largest valid sequence number. Not even one record per microsecond for years would reach it,
# so a larger number means that the file is damaged.
_MOST_RECORDS = 2**48
# A ring with more damaged slots than this is not continued. A kill leaves at most one torn slot,
# and one more is tolerated.
_MOST_TORN = 2

# Flags of a step record or sample. The first three say that a number was read from the device, even
# if it is NaN. The bits from OPTIMIZER_SHIFT upward hold the optimizer's number.
LOSS_IS_READ = 1
NORM_IS_READ = 2
RATE_IS_READ = 4
OPTIMIZER_SHIFT = 8


class Record(NamedTuple):
    """One record of a ring: its number, the time at which it was written, and its payload."""

    # The writer numbers its records consecutively, starting at 1.
    sequence: int
    # Unix time.
    nanoseconds: int
    # Padded with zeros to the payload size of the ring.
    payload: bytes


def value_or_none(number: float, is_read: int) -> float | None:
    """Return a recorded number, or None if it was never read from the device.

    A number that was not read is recorded as NaN without the flag that says that it was read.

    Args:
        number: The number in the record.
        is_read: The number's flag in the record; 0 if the flag is not set.
    """
    if is_read or not math.isnan(number):
        return number
    return None


def slot_struct(payload_bytes: int) -> struct.Struct:
    """Return the layout of a slot: sequence number, time, payload, sequence number."""
    return struct.Struct(f"<QQ{payload_bytes}sQ")


class RingWriter:
    """Append records to a ring file, which is created or continued.

    An existing file is continued if its layout is the same and its records are intact. Otherwise it
    is renamed to ``<name>.old``, a new file is created, and `moved_aside` gives the reason.

    Args:
        path: The ring file.
        payload_bytes: The size of a record's payload in bytes.
        capacity: How many records the ring holds. When it is full, each new record overwrites the
            oldest one.
        has_history: Whether to summarize records in the ring's ``history`` before they are
            overwritten. Only for rings of step records or samples.

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
        # Why an existing file was not continued, and its new name. Empty if there was no existing
        # file, or if it was continued.
        self.moved_aside = ""
        try:
            self._sequence = _newest_sequence(path, header, size_bytes, self._slot)
        except _NotARingError as error:
            kept_as = _move_aside(path)
            self.moved_aside = f"{error}; the old file is kept as {kept_as.name}"
        self._map = _map_file(path, header, size_bytes)
        # The number of the record that starts the next half of the ring.
        halves_begun = -(-(self._sequence + 1) // self._half)
        self._next_half = halves_begun * self._half

    def append(self, payload: bytes) -> None:
        """Write one record in less than 1 microsecond, without a system call.

        The payload must not be longer than `payload_bytes`.
        """
        sequence = self._sequence + 1
        if sequence == self._next_half:
            self._summarize_next_half()
        offset = HEADER_BYTES + (sequence % self._capacity) * self._slot_bytes
        self._pack_into(self._map, offset, sequence, time_ns(), payload, sequence)
        self._sequence = sequence

    def _summarize_next_half(self) -> None:
        """Summarize the half of the ring that the next records will overwrite."""
        first_new = self._next_half
        self._next_half += self._half
        if not self._has_history or first_new < self._capacity:
            return
        # If the disk is full or numpy is missing, recording continues without a history.
        with suppress(Exception):
            from holdfast.recorder.history import extend_history

            start = HEADER_BYTES + (first_new % self._capacity) * self._slot_bytes
            slots = self._map[start : start + self._half * self._slot_bytes]
            extend_history(self._path, slots, self._slot_bytes, first_new - self._capacity)

    def close(self) -> None:
        """Unmap the file. No record can be appended afterwards."""
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
    """A file is not a ring, or it is a ring that cannot be continued. The message says why."""


def _newest_sequence(path: Path, header: bytes, size_bytes: int, slot: struct.Struct) -> int:
    """Return the number of a ring's newest record, or 0 if the ring is empty or does not exist.

    Raises:
        _NotARingError: The file cannot be continued.
    """
    # Read the file instead of the map: reading the map would make all of its pages resident.
    data = _read(path)
    if not data:
        return 0
    if len(data) != size_bytes or not data.startswith(header):
        raise _NotARingError("its layout is different, or its header is damaged")
    records, damaged = _records(data, slot)
    if damaged > _MOST_TORN:
        raise _NotARingError(f"{damaged:,} of its records are damaged")
    return records[-1].sequence if records else 0


def _read(path: Path) -> bytes:
    """Return the content of a file, or no bytes if the file does not exist."""
    try:
        return read_file(path, _MOST_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        if error.errno not in _NOT_A_RING:
            raise
        raise _NotARingError(error.strerror) from error


def _move_aside(path: Path) -> Path:
    """Rename a path that must not be overwritten to ``<name>.old``, and return the new path.

    An earlier ``.old`` file is replaced if `path` is also a regular file. Otherwise the new name is
    ``.old-2``, ``.old-3`` and so on.
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
    """Return the intact records of a ring, oldest first, or no records if the file is missing.

    Raises:
        RunDirectoryError: H305 if the file is not a ring or was written by a newer holdfast.
    """
    try:
        data = _read(path)
    except _NotARingError as error:
        raise unreadable(path, f"not a recording ({error})") from error
    if len(data) < HEADER_BYTES:
        return []
    magic, version, payload_bytes, _ = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise unreadable(path, "not a recording")
    if version > VERSION:
        raise unreadable(path, f"version {version}")
    records, _ = _records(data, slot_struct(payload_bytes))
    return records


def unreadable(path: Path, problem: str) -> RunDirectoryError:
    """Return the H305 error for a file that this version of holdfast cannot read."""
    return RunDirectoryError(
        f"{path} is {problem}",
        limit=f"this holdfast reads recordings up to version {VERSION}",
        fix="read it with the holdfast version that wrote it, or move the file away.",
        rule="H305",
    )
