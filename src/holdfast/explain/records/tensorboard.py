"""Read the scalars in TensorBoard's event files.

An event file is a sequence of TFRecords: the length of the data (8 bytes), a checksum of the length
(4), the data, and a checksum of the data (4). The data is a protobuf message ``Event``::

    Event       { wall_time = 1 (double); step = 2 (int64); summary = 5 (Summary) }
    Summary     { value = 1 (repeated Value) }
    Value       { tag = 1; simple_value = 2 (float); tensor = 8 (TensorProto) }
    TensorProto { dtype = 1; tensor_shape = 2; tensor_content = 4; float_val = 5; double_val = 6 }

The definitions are in ``tensorboard/compat/proto``. Only the checksums of lengths are verified:
verifying those of the data would take longer than everything else.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from holdfast.explain.records.damage import DamagedError
from holdfast.explain.records.protobuf import as_signed, parse_fields
from holdfast.explain.records.record import Record

_HEADER = struct.Struct("<QI")
_CHECKSUM_BYTES = 4
# Events of scalars are about 50 bytes long. Larger events hold images, histograms or graphs.
_MAX_EVENT_BYTES = 1 << 20
_FLOAT = struct.Struct("<f")
_DOUBLE = struct.Struct("<d")
# The values of ``TensorProto.dtype`` for the types of scalars, and how such a scalar is stored.
_TYPES = {1: _FLOAT, 2: _DOUBLE}
# CRC-32C (Castagnoli) in reversed bit order, and the constant with which TFRecords mask it.
_CASTAGNOLI = 0x82F63B78
_MASK = 0xA282EAD8


def read_into(path: Path, record: Record) -> None:
    """Add the scalars in an event file to a record.

    Args:
        path: The event file.
        record: Receives the scalars, and a clause if the end of the file cannot be read, as in a
            file that is being written.

    Raises:
        DamagedError: If the file does not begin with an event.
        OSError: If the file cannot be read.
    """
    count = 0
    with path.open("rb") as file:
        try:
            for event in _events(file):
                for name, step, value in _scalars(event):
                    record.add(name, step, value)
                count += 1
        except DamagedError as error:
            if count == 0:
                raise
            record.note_missing(f"the rest of {path.name} after event {count:,} has {error}")


def _events(file: BinaryIO) -> Iterator[bytes]:
    """Yield the data of each TFRecord, except data that is too large for a scalar."""
    while header := file.read(_HEADER.size):
        if len(header) < _HEADER.size:
            raise DamagedError("an event that is cut off")
        length, checksum = _HEADER.unpack(header)
        if checksum != _masked_checksum(header[:8]):
            raise DamagedError("a wrong checksum")
        if length > _MAX_EVENT_BYTES:
            file.seek(length + _CHECKSUM_BYTES, 1)
            continue
        data = file.read(length)
        if len(data) < length or len(file.read(_CHECKSUM_BYTES)) < _CHECKSUM_BYTES:
            raise DamagedError("an event that is cut off")
        yield data


def _scalars(event: bytes) -> Iterator[tuple[str, int, float]]:
    """Yield the tag, the step and the value of each scalar in an ``Event``."""
    step = 0
    summary = b""
    for number, content in parse_fields(event):
        if number == 2 and isinstance(content, int):
            step = as_signed(content)
        elif number == 5 and isinstance(content, bytes):
            summary = content
    for number, content in parse_fields(summary):
        if number == 1 and isinstance(content, bytes):
            tag, value = _tag_and_value(content)
            if value is not None:
                yield tag, step, value


def _tag_and_value(message: bytes) -> tuple[str, float | None]:
    """Return the tag of a ``Value`` and its scalar, or None if it is an image or a histogram."""
    tag = ""
    value: float | None = None
    for number, content in parse_fields(message):
        if not isinstance(content, bytes):
            continue
        if number == 1:
            tag = content.decode("utf-8", "replace")
        elif number == 2 and len(content) == _FLOAT.size:
            value = _FLOAT.unpack(content)[0]
        elif number == 8:
            value = _value_of_tensor(content)
    return tag, value


def _value_of_tensor(tensor: bytes) -> float | None:
    """Return the value of a tensor that holds a single float or double, otherwise None."""
    kind = None
    contents = b""
    for number, content in parse_fields(tensor):
        if number == 1 and isinstance(content, int):
            kind = _TYPES.get(content)
        elif number in (4, 5, 6) and isinstance(content, bytes):
            contents = content
    if kind is None or len(contents) != kind.size:
        return None
    value: float = kind.unpack(contents)[0]
    return value


def _masked_checksum(data: bytes) -> int:
    """Return the masked CRC-32C of a few bytes, as TFRecords store it."""
    checksum = 0xFFFFFFFF
    for byte in data:
        checksum = _TABLE[(checksum ^ byte) & 0xFF] ^ (checksum >> 8)
    checksum ^= 0xFFFFFFFF
    rotated = (checksum >> 15) | (checksum << 17)
    return (rotated + _MASK) & 0xFFFFFFFF


def _checksum_table() -> list[int]:
    """Return the CRC-32C of each byte."""
    table = []
    for byte in range(256):
        checksum = byte
        for _ in range(8):
            checksum = (checksum >> 1) ^ (_CASTAGNOLI if checksum & 1 else 0)
        table.append(checksum)
    return table


_TABLE = _checksum_table()
