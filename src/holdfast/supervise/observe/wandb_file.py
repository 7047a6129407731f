"""Find the last row of the history in the file of an offline W&B run.

W&B writes all data of a run to a ``.wandb`` file, which has the log format of LevelDB: blocks of
32 KiB that contain chunks. A record is one chunk or several consecutive ones. When a process is
killed, the last rows that it has logged are missing in the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK_BYTES = 32 << 10
# The file begins with a header of its own, which has the same size as that of a chunk.
_FILE_HEADER_BYTES = 7
# Checksum, length of the data, and the kind of the chunk.
_CHUNK_HEADER = struct.Struct("<IHB")
_WHOLE = 1
_FIRST = 2
_LAST = 4
# Only the end of the file is read. Besides the history, it contains the output of the script and
# statistics of the machine.
_MOST_BYTES = 4 << 20


def last_position(file: Path) -> int | None:
    """Return the position of the last row in a ``.wandb`` file, or -1 if it contains no row.

    Return None if the position is unknown, because the part of the file that is read contains no
    row, but the part before it may.

    Raises:
        OSError: If the file cannot be read.
        Exception: If this version of W&B writes another format.
    """
    # The script has imported W&B already.
    from wandb.proto import wandb_internal_pb2

    with file.open("rb") as stream:
        size = stream.seek(0, 2)
        start = max(0, size - _MOST_BYTES) // _BLOCK_BYTES * _BLOCK_BYTES
        stream.seek(start)
        content = stream.read()
    offset = _FILE_HEADER_BYTES if start == 0 else 0
    for data in reversed(list(_records(content, offset))):
        record: Any = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            return int(record.history.step.num)
    return -1 if start == 0 else None


def _records(content: bytes, offset: int) -> Iterator[bytes]:
    """Yield the records that are complete in a part of the file.

    Args:
        content: A part of the file that starts at the beginning of a block.
        offset: Where the first chunk starts.
    """
    chunks: list[bytes] = []
    # The first chunk may continue a record whose beginning has not been read.
    is_inside = False
    while True:
        if _BLOCK_BYTES - offset % _BLOCK_BYTES < _CHUNK_HEADER.size:
            # No chunk starts in the last bytes of a block.
            offset += _BLOCK_BYTES - offset % _BLOCK_BYTES
        start = offset + _CHUNK_HEADER.size
        if start > len(content):
            return
        _, length, kind = _CHUNK_HEADER.unpack_from(content, offset)
        offset = start + length
        if not _WHOLE <= kind <= _LAST or offset > len(content):
            return
        if kind in (_WHOLE, _FIRST):
            chunks = []
            is_inside = True
        chunks.append(content[start:offset])
        if kind in (_WHOLE, _LAST) and is_inside:
            yield b"".join(chunks)
            is_inside = False
