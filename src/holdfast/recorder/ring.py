"""A ring of fixed-size records in a memory-mapped file: the writer, and a tolerant reader.

The pages belong to the kernel, so they survive the death of the process by any signal (not a power cut). Each
slot carries its sequence number at both ends, first and last in memory order: a kill between the two leaves a
slot whose ends differ, which the reader drops. The whole file is allocated at the start, since writing to a
hole of a mapped file on a full disk is a SIGBUS.

    header (4096 bytes)   magic, version, payload bytes, capacity
    slot i                sequence | unix nanoseconds | payload | sequence

Does not: interpret payloads (see ``black_box``), lock (one writer per file, guaranteed by the run directory).
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import RunDirectoryError

MAGIC = b"HOLDRING"
VERSION = 1
HEADER = struct.Struct("<8sIII")
HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Record:
    """One payload with its place in time.

    Args:
        sequence: Number of the record, from 1, without gaps at the writer.
        nanoseconds: Unix time.
        payload: Exactly the ring's payload size, zero-padded.
    """

    sequence: int
    nanoseconds: int
    payload: bytes


def slot_struct(payload_bytes: int) -> struct.Struct:
    """Return the layout of one slot."""
    return struct.Struct(f"<QQ{payload_bytes}sQ")


class RingWriter:
    """Append records to a ring file, created or continued.

    Args:
        path: The file. An existing one is continued if its layout is the same, else kept beside it as ``.old``.
        payload_bytes: Most bytes of one record.
        capacity: Records kept; older ones are overwritten.

    Raises:
        OSError: if the file cannot be created or its space cannot be allocated.
    """

    def __init__(self, path: Path, *, payload_bytes: int, capacity: int) -> None:
        self._slot = slot_struct(payload_bytes)
        self._pack_into = self._slot.pack_into
        self._slot_bytes = self._slot.size
        self._capacity = capacity
        size = HEADER_BYTES + capacity * self._slot_bytes
        header = HEADER.pack(MAGIC, VERSION, payload_bytes, capacity)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            continues = os.fstat(descriptor).st_size == size and os.pread(descriptor, len(header), 0) == header
            if not continues:
                if os.fstat(descriptor).st_size > 0:  # of another layout, or damaged: not ours to destroy
                    path.replace(path.with_name(path.name + ".old"))
                    os.close(descriptor)
                    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                os.posix_fallocate(descriptor, 0, size)
                os.pwrite(descriptor, header, 0)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        # Read through the file: a look at the map would make all of its pages resident at once.
        self._sequence = _newest(path, self._slot) if continues else 0

    def append(self, payload: bytes) -> None:
        """Write one record; a payload that is too long is an error of the caller.

        Cost: below 1 microsecond; no system call.
        """
        sequence = self._sequence + 1
        offset = HEADER_BYTES + (sequence % self._capacity) * self._slot_bytes
        self._pack_into(self._map, offset, sequence, time.time_ns(), payload, sequence)
        self._sequence = sequence

    def close(self) -> None:
        """Unmap the file. Appending afterwards is an error of the caller."""
        self._map.close()


def _newest(path: Path, slot: struct.Struct) -> int:
    newest = 0
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        while len(data := file.read(slot.size)) == slot.size:
            first, _, _, last = slot.unpack(data)
            if first == last:
                newest = max(newest, first)
    return newest


def read_slots(buffer: bytes, slot: struct.Struct) -> Iterator[Record]:
    """Yield every whole record in file order; torn and empty slots are passed over."""
    usable = len(buffer) - (len(buffer) - HEADER_BYTES) % slot.size
    for first, nanoseconds, payload, last in slot.iter_unpack(memoryview(buffer)[HEADER_BYTES:usable]):
        if first and first == last:
            yield Record(first, nanoseconds, payload)


def read_ring(path: Path) -> list[Record]:
    """Return the whole records of a ring, oldest first; a missing file gives none.

    Raises:
        RunDirectoryError: H305 if the file is no ring or was written by a newer holdfast.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    if len(data) < HEADER_BYTES:
        return []
    magic, version, payload_bytes, _ = HEADER.unpack_from(data)
    if magic != MAGIC or version > VERSION:
        found = f"version {version}" if magic == MAGIC else "no recording"
        raise RunDirectoryError(
            f"{path} is {found}",
            limit=f"this holdfast reads recordings up to version {VERSION}",
            fix="read it with the holdfast that wrote it, or move the file away.",
            rule="H305",
        )
    return sorted(read_slots(data, slot_struct(payload_bytes)), key=lambda record: record.sequence)
