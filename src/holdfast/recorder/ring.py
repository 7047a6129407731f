"""Write and read a ring of fixed-size records in a memory-mapped file.

The kernel owns the mapped pages, so records survive any signal that kills the process (but not a
power failure). Each slot stores the sequence number of its record twice, at its beginning and at
its end. If the process is killed between these two writes, the numbers differ and the reader skips
the slot. The file is fully allocated when it is created, because writing to an unallocated page of
a mapped file would raise SIGBUS if the disk were full.

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
# The size of the largest file to read: twice that of the largest ring that holdfast writes.
_MOST_BYTES = 8 << 20
# The errors that are raised if a path is not a regular file or a file is too large to be a ring.
_NOT_A_RING = frozenset({errno.ELOOP, errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.EFBIG})
# Valid sequence numbers are less than this. Even one record per microsecond would not reach this
# number within years, so a larger number means that the file is damaged.
_MOST_RECORDS = 2**48
# No records are appended to an existing ring with more damaged slots than this. A kill leaves at
# most one partly written slot, and one more damaged slot is tolerated.
_MOST_TORN = 2

# The flags of a step record or sample. The first three say that a number (loss, gradient norm,
# learning rate) was read from the device, even if the number is NaN. The bits from OPTIMIZER_SHIFT
# upward hold the optimizer's number.
LOSS_IS_READ = 1
NORM_IS_READ = 2
RATE_IS_READ = 4
OPTIMIZER_SHIFT = 8


class Record(NamedTuple):
    """One record of a ring: its number, the time at which it was written, and its payload."""

    # The record's number. The writer numbers its records consecutively, starting at 1.
    sequence: int
    # The Unix time at which the record was written, in nanoseconds.
    nanoseconds: int
    # The content of the record, padded with zeros to the payload size of the ring.
    payload: bytes


def value_or_none(number: float, is_read: int) -> float | None:
    """Return a recorded number, or None if it was never read from the device.

    If a number was not read, NaN is recorded and the flag that says that it was read is not set.

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
    """Appends records to a ring file, which is created if it does not exist.

    If an existing file has another layout or too many damaged records, it is renamed to
    ``<name>.old`` and a new file is created. `moved_aside` then gives the reason.

    Args:
        path: The ring file.
        payload_bytes: The size of a record's payload in bytes.
        capacity: How many records the ring holds. When it is full, each new record overwrites the
            oldest one.
        has_history: Whether to summarize records in the ring's ``history`` before they are
            overwritten. Only rings of step records or samples can have a history.

    Raises:
        OSError: If the file cannot be created or its space cannot be allocated.
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
        # Why an existing file was moved aside, and its new name. Empty if no file was moved aside.
        self.moved_aside = ""
        try:
            self._sequence = _newest_sequence(path, header, size_bytes, self._slot)
        except _NotARingError as error:
            kept_as = _move_aside(path)
            self.moved_aside = f"{error}; the old file is kept as {kept_as.name}"
        self._map = _map_file(path, header, size_bytes)
        # The number of the next record that will be the first one in a half of the ring. Halves
        # start at multiples of the half's size; `-(-a // b)` rounds up.
        halves_begun = -(-(self._sequence + 1) // self._half)
        self._next_half = halves_begun * self._half

    def append(self, payload: bytes) -> None:
        """Write one record in less than 1 microsecond, without a system call.

        Args:
            payload: The content of the record. It must not be longer than `payload_bytes`.
        """
        sequence = self._sequence + 1
        if sequence == self._next_half:
            self._summarize_next_half()
        offset = HEADER_BYTES + (sequence % self._capacity) * self._slot_bytes
        self._pack_into(self._map, offset, sequence, time_ns(), payload, sequence)
        self._sequence = sequence

    def _summarize_next_half(self) -> None:
        """Add the half of the ring that the next records will overwrite to the ring's history."""
        first_new = self._next_half
        self._next_half += self._half
        # Until `capacity` records have been written, no record is overwritten.
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
    """Return a ring file mapped into memory. A missing or blank file is allocated first."""
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        if _is_blank(os.pread(descriptor, HEADER_BYTES, 0)):
            os.posix_fallocate(descriptor, 0, size_bytes)
            os.pwrite(descriptor, header, 0)
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)


class _NotARingError(Exception):
    """Raised if a file is not a ring, or is a ring to which no records can be appended.

    The message gives the reason.
    """


def _newest_sequence(path: Path, header: bytes, size_bytes: int, slot: struct.Struct) -> int:
    """Return the number of a ring's newest record, or 0 if the ring is empty or does not exist.

    Args:
        path: The ring file.
        header: The header that the file must have.
        size_bytes: The size that the file must have.
        slot: The layout of a slot.

    Raises:
        _NotARingError: If no records can be appended to the file.
    """
    # Read the file itself, not the map, because reading the map would make all its pages resident.
    data = _read(path)
    if _is_blank(data):
        return 0
    if len(data) != size_bytes or not data.startswith(header):
        raise _NotARingError("its layout is different, or its header is damaged")
    records, damaged = _records(data, slot)
    if damaged > _MOST_TORN:
        raise _NotARingError(f"{damaged:,} of its records are damaged")
    return records[-1].sequence if records else 0


def _is_blank(data: bytes) -> bool:
    """Return whether a file has no content yet: no bytes, or only the zeros of its allocation.

    A file holds only zeros if its writer has not written the header yet, or was killed before.
    """
    return not any(data)


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

    An existing ``.old`` file is replaced if `path` is also a regular file. Otherwise, the new name
    ends with ``.old-2``, ``.old-3`` and so on.
    """
    target = path.with_name(f"{path.name}.old")
    number = 1
    while os.path.lexists(target) and not (target.is_file() and path.is_file()):
        number += 1
        target = path.with_name(f"{path.name}.old-{number}")
    return path.replace(target)


def _records(data: bytes, slot: struct.Struct) -> tuple[list[Record], int]:
    """Return the intact records of a ring, oldest first, and the number of damaged slots.

    Args:
        data: The content of the ring file.
        slot: The layout of a slot.
    """
    *_, capacity = HEADER.unpack_from(data)
    # Ignore a slot that is cut off at the end of a truncated file.
    slots_end = len(data) - (len(data) - HEADER_BYTES) % slot.size
    slots = slot.iter_unpack(memoryview(data)[HEADER_BYTES:slots_end])
    records = []
    damaged = 0
    for index, (first, nanoseconds, payload, last) in enumerate(slots):
        is_number = first == last and 0 < first < _MOST_RECORDS
        if is_number and capacity and first % capacity == index:
            records.append(Record(first, nanoseconds, payload))
        # Both numbers of a slot that was never written are 0.
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
    if len(data) < HEADER_BYTES or _is_blank(data):
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
