"""Read the history in the ``.wandb`` file of a W&B run, offline or synced.

The file has a header of 7 bytes (``:W&B``, a magic number and a version), and then blocks of 32 KiB
like a log of LevelDB. A block consists of chunks: a checksum (4 bytes), a length (2), a type (1)
and data. A record that does not fit into a block consists of several chunks. Each record is a
protobuf message ``Record``::

    Record        { history = 2 (HistoryRecord) }
    HistoryRecord { item = 1 (repeated HistoryItem); step = 2 (HistoryStep) }
    HistoryItem   { key = 1; nested_key = 2 (repeated); value_json = 16 }
    HistoryStep   { num = 1 (int64) }

The definitions are in ``wandb/proto/wandb_internal.proto``. The wandb package has no public reader
for this file, so it is not used.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from holdfast.explain.records.damage import DamagedError
from holdfast.explain.records.protobuf import as_signed, parse_fields
from holdfast.explain.records.record import Record

_HEADER_BYTES = 7
_IDENTIFIER = b":W&B"
_BLOCK_BYTES = 32768
_CHUNK = struct.Struct("<IHB")
# The types of chunks: a whole record, or the first, a middle or the last part of one.
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# A history record of thousands of metrics is smaller than this.
_MAX_RECORD_BYTES = 16 << 20
# Larger integers are not metrics, and some of them cannot be converted to a float.
_MAX_INT = 2**63
# Metrics that hold the optimizer step. W&B's own step counts calls of `wandb.log`. Transformers
# logs the first of these, and Lightning the second.
_STEP_METRICS = ("train/global_step", "trainer/global_step", "global_step")


def read_into(path: Path, record: Record) -> None:
    """Add the numbers in the history of a W&B run to a record.

    Args:
        path: The ``.wandb`` file.
        record: Receives the numbers, and a clause if the end of the file cannot be read, as in a
            file that is being written.

    Raises:
        DamagedError: If the file is not a ``.wandb`` file.
        OSError: If the file cannot be read.
    """
    count = 0
    with path.open("rb") as file:
        if not file.read(_HEADER_BYTES).startswith(_IDENTIFIER):
            raise DamagedError("no header of a W&B file")
        try:
            for message in _records(file):
                for number, content in parse_fields(message):
                    if number == 2 and isinstance(content, bytes):
                        _add_numbers(content, record)
                count += 1
        except DamagedError as error:
            record.note_missing(f"the rest of {path.name} after record {count:,} has {error}")


def _records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the data of each record."""
    parts: list[bytes] = []
    for kind, data in _chunks(file):
        if kind in (_WHOLE, _FIRST):
            parts = []
        parts.append(data)
        if sum(map(len, parts)) > _MAX_RECORD_BYTES:
            raise DamagedError("a record that is too large")
        if kind in (_WHOLE, _LAST):
            yield b"".join(parts)
            parts = []


def _chunks(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the type and the data of each chunk."""
    left_in_block = _BLOCK_BYTES - _HEADER_BYTES
    while True:
        if left_in_block < _CHUNK.size:
            file.read(left_in_block)
            left_in_block = _BLOCK_BYTES
        header = file.read(_CHUNK.size)
        if not header:
            return
        if len(header) < _CHUNK.size:
            raise DamagedError("a record that is cut off")
        _, length, kind = _CHUNK.unpack(header)
        if kind not in (_WHOLE, _FIRST, _MIDDLE, _LAST):
            raise DamagedError("a chunk of an unknown type")
        data = file.read(length)
        if len(data) < length:
            raise DamagedError("a record that is cut off")
        left_in_block -= _CHUNK.size + length
        yield kind, data


def _add_numbers(history: bytes, record: Record) -> None:
    """Add the numbers of a ``HistoryRecord`` to a record, except those that W&B adds itself."""
    step = 0
    numbers: dict[str, float] = {}
    for number, content in parse_fields(history):
        if not isinstance(content, bytes):
            continue
        if number == 1:
            numbers.update(_parse_item(content))
        elif number == 2:
            step = _parse_step(content)
    own_step = numbers.get("_step", math.nan)
    if math.isfinite(own_step):
        step = int(own_step)
    step = _optimizer_step(numbers, step)
    for name, value in numbers.items():
        # W&B itself adds `_step`, `_runtime` and `_timestamp`.
        if not name.startswith("_"):
            record.add(name, step, value)


def _parse_item(message: bytes) -> Iterator[tuple[str, float]]:
    """Yield the name and the value of a ``HistoryItem``, if its value is a number."""
    names = []
    text = b""
    for number, content in parse_fields(message):
        if not isinstance(content, bytes):
            continue
        if number in (1, 2):
            names.append(content.decode("utf-8", "replace"))
        elif number == 16:
            text = content
    value = _number_in_json(text)
    if value is not None:
        yield ".".join(names), value


def _number_in_json(text: bytes) -> float | None:
    """Return a JSON number, ``NaN`` or ``Infinity``; None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    if isinstance(value, float):
        return value
    return float(value) if type(value) is int and abs(value) < _MAX_INT else None


def _parse_step(message: bytes) -> int:
    for number, content in parse_fields(message):
        if number == 1 and isinstance(content, int):
            return as_signed(content)
    return 0


def _optimizer_step(numbers: Mapping[str, float], step: int) -> int:
    for name in _STEP_METRICS:
        value = numbers.get(name, math.nan)
        if math.isfinite(value):
            return int(value)
    return step


def numbers_in_summary(text: bytes) -> Iterator[tuple[str, float]]:
    """Yield the name and the final value of each metric in ``wandb-summary.json``.

    Raises:
        DamagedError: If the text is not a JSON object.
    """
    try:
        summary = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError("a summary that is not JSON") from error
    if not isinstance(summary, dict):
        raise DamagedError("a summary that is not an object")
    for name, value in summary.items():
        if not name.startswith("_") and type(value) in (int, float) and abs(value) < _MAX_INT:
            yield name, float(value)
