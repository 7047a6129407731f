"""Find the position of each tensor in a safetensors file.

A safetensors file consists of the length of the header (an 8-byte integer), the header in JSON, and
the bytes of the tensors. The format is specified at
https://github.com/huggingface/safetensors#format.

This module does not import torch.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.files import open_to_read

# Largest header that the format allows.
_MAX_HEADER_BYTES = 100 * 10**6
_LENGTH = struct.Struct("<Q")
# Header key that the format reserves for metadata.
METADATA = "__metadata__"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """The dtype and shape of a tensor, and the range ``[begin, end)`` of its bytes in the file."""

    name: str
    begin: int
    end: int
    # Name of the dtype in the safetensors format, such as "F32".
    dtype: str
    shape: tuple[int, ...]


def tensor_places(path: Path) -> tuple[int, list[TensorPlace]]:
    """Return the number of bytes before the first tensor, and where each tensor is in the file.

    Raises:
        ValueError, LookupError, TypeError, AttributeError, struct.error: The file is not a valid
            safetensors file.
    """
    with open_to_read(path) as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
    # The offsets in the header are relative to the end of the header.
    start = _LENGTH.size + length
    places = []
    for name, entry in header.items():
        if name == METADATA:
            continue
        begin, end = entry["data_offsets"]
        if not (type(begin) is int and type(end) is int and 0 <= begin <= end):
            raise ValueError(f"the offsets of {name!r:.80} in {path.name} are invalid")
        place = TensorPlace(
            name=name,
            begin=start + begin,
            end=start + end,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
        )
        places.append(place)
    return start, places
