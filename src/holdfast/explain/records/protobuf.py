"""Read the fields of a serialized protobuf message, without knowing its schema.

https://protobuf.dev/programming-guides/encoding/ describes the encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from holdfast.explain.records.damage import DamagedError

# The number of a field and its contents: an int for a varint, otherwise the raw bytes.
Field: TypeAlias = tuple[int, int | bytes]

_VARINT = 0
_FIXED64 = 1
_LENGTH_DELIMITED = 2
_FIXED32 = 5
_MAX_VARINT_BYTES = 10


def parse_fields(message: bytes) -> Iterator[Field]:
    """Yield the fields of a message in the order in which they are stored.

    Raises:
        DamagedError: If the bytes are not a message.
    """
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number = key >> 3
        kind = key & 7
        if kind == _VARINT:
            value, position = _varint(message, position)
            yield number, value
            continue
        if kind == _FIXED64:
            size = 8
        elif kind == _FIXED32:
            size = 4
        elif kind == _LENGTH_DELIMITED:
            size, position = _varint(message, position)
        else:
            raise DamagedError(f"a field of unknown type {kind}")
        end = position + size
        if end > len(message):
            raise DamagedError("a field that is longer than its message")
        yield number, message[position:end]
        position = end


def as_signed(varint: int) -> int:
    """Return a varint that encodes an ``int64``, which may be negative."""
    return varint - 2**64 if varint >= 2**63 else varint


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after it."""
    value = 0
    for index in range(_MAX_VARINT_BYTES):
        if position + index >= len(message):
            break
        byte = message[position + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value, position + index + 1
    raise DamagedError("a number that does not end")
