"""Summarize the steps that were overwritten in a ring, in a history file of at most 1 MiB.

Before half of a ring is overwritten, its records are summarized in rows of 64 records each. A row
contains the lowest, mean and highest value of each number, and how many values were finite and how
many were not. If there are more than 3,072 rows, neighboring rows are merged in pairs. The history
file is in the ring's directory. It is replaced as a whole, so that the previous version remains if
the process is killed during the write.

This is the only module of ``recorder`` that needs numpy.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.core.files import read_file, swap_in

Rows = NDArray[np.void]
Numbers = NDArray[Any]
SUFFIX = ".history"
# The header of a history file: magic, version, size of a row in bytes, `History.newest`,
# `History.missing`.
_HEADER = struct.Struct("<8sIIQQ")
_MAGIC = b"HOLDHIST"
_VERSION = 1
# The number of records that a new row summarizes. Merging rows doubles this number.
_FINEST = 64
_MOST_ROWS = 3072
_MOST_RECORDS = 2**62
_MOST_BYTES = 4 << 20
# The numbers that a row summarizes. A sample has all of these numbers, whereas a Guard's step
# record has only those in `_MARK_NAMES`.
NAMES = (
    "loss",
    "grad_norm",
    "learning_rate",
    "seconds",
    "wait_seconds",
    "host_bytes",
    "device_allocated_bytes",
    "device_reserved_bytes",
    "device_peak_bytes",
)
_MARK_NAMES = ("loss", "grad_norm", "seconds")
_SLOT_START: list[Any] = [("number", "<u8"), ("time", "<u8")]
_ROW = np.dtype(
    [*_SLOT_START, ("step", "<u8"), ("optimizer", "u1")]
    + [(name, "<f8", len(NAMES)) for name in ("low", "mean", "high")]
    + [(name, "<u4", len(NAMES)) for name in ("finite", "odd")]
)
# The slot layouts of the two kinds of step rings: samples (written by ``progress``) and step
# records (written by ``black_box``).
_SAMPLE = np.dtype(
    [
        *_SLOT_START,
        ("step", "<u8"),
        ("micro_steps", "<u4"),
        ("flags", "<u4"),
        ("values", "<f8", 5),
        ("sizes", "<u8", 4),
        ("end", "<u8"),
    ]
)
_MARK = np.dtype(
    [
        *_SLOT_START,
        ("mark", "<u2"),
        ("flags", "<u2"),
        ("samples", "<u4"),
        ("step", "<u8"),
        ("values", "<f8", 3),
        ("end", "<u8"),
    ]
)
_KINDS_BY_BYTES = {kind.itemsize: kind for kind in (_SAMPLE, _MARK)}
# The value of `StepMark.BEGUN`, which marks that a step began. Such a record has no loss, gradient
# norm or duration.
_BEGUN = 1
# How many of the numbers have a flag that is set if the number was read: the first three (loss,
# gradient norm, learning rate). The flag is needed because a number that was read may be NaN.
_READ_FLAGS = 3
_LATEST = np.uint64(2**64 - 1)
_NO_ROWS = np.zeros(0, _ROW)


class History(NamedTuple):
    """The summary of the records that were overwritten in a ring.

    `rows` contains one row for each stretch of records and each optimizer, oldest first. A row
    contains the ``number`` of its first record, the ``step`` and ``time`` (in Unix nanoseconds) at
    which the stretch starts, and the number of the ``optimizer``. For each number in `NAMES`, a row
    also contains the ``low``, ``mean`` and ``high`` value, the count of ``finite`` values and the
    count of ``odd`` values (NaN or Inf). If no value is finite, ``low`` is inf and ``high`` is
    -inf.
    """

    rows: Rows
    # The number of the newest record that the history covers.
    newest: int = 0
    # How many records up to `newest` are missing from the history.
    missing: int = 0


def read_history(path: Path) -> History:
    """Return the history of a ring, or an empty history if its file is missing or damaged.

    Args:
        path: The path of the ring, not of the history file.
    """
    try:
        data = read_file(path.with_name(path.name + SUFFIX), _MOST_BYTES)
        magic, version, row_bytes, newest, missing = _HEADER.unpack_from(data)
    except (OSError, struct.error):
        return History(_NO_ROWS)
    if (magic, version, row_bytes) != (_MAGIC, _VERSION, _ROW.itemsize):
        return History(_NO_ROWS)
    count = (len(data) - _HEADER.size) // row_bytes
    return History(np.frombuffer(data, _ROW, count, _HEADER.size), newest, missing)


def extend_history(path: Path, slots: bytes, slot_bytes: int, first: int) -> None:
    """Add a summary of half of a ring to the ring's history.

    This takes about 3 ms for 16,384 records.

    Args:
        path: The path of the ring, not of the history file.
        slots: The content of the slots in this half of the ring.
        slot_bytes: The size of one slot in bytes.
        first: The number of the record in the first slot.

    Raises:
        OSError: If the history file cannot be written.
    """
    last = first + len(slots) // slot_bytes - 1
    history = read_history(path)
    if history.newest > last:
        # The history is that of an earlier ring, which was moved aside. Start a new history.
        history = History(_NO_ROWS)
    expected = np.arange(first, last + 1, dtype=np.uint64)
    new_rows, recorded = rows_of(slots, slot_bytes, expected, history.newest, _FINEST)
    rows = merge_rows(np.concatenate([history.rows, new_rows]), _MOST_ROWS)
    missing = history.missing + last - history.newest - recorded
    header = _HEADER.pack(_MAGIC, _VERSION, _ROW.itemsize, last, missing)
    swap_in(path.with_name(path.name + SUFFIX), header + rows.tobytes())


def merge_rows(rows: Rows, most: int, finest: int = 2 * _FINEST) -> Rows:
    """Merge neighboring rows until at most `most` rows are left, and return these rows.

    Args:
        rows: The rows to merge, oldest first.
        most: The largest number of rows to return.
        finest: How many records a row covers after the first merge. This number is doubled until at
            most `most` rows are left.
    """
    records = finest
    while len(rows) > most and records < _MOST_RECORDS:
        rows = _merged(rows, records)
        records *= 2
    return rows


def _merged(rows: Rows, records: int) -> Rows:
    """Merge rows so that there is one row for each stretch of `records` records and optimizer."""
    stretch = rows["number"] // np.uint64(records)
    # The key identifies a stretch and an optimizer, whose number is less than 256.
    key = stretch * np.uint64(256) + rows["optimizer"]
    order = np.argsort(key, kind="stable")
    rows = rows[order]
    key = key[order]
    # The index of the first row of each group of equal keys. Prepending a different key makes the
    # first row start a group.
    starts = np.flatnonzero(np.diff(key, prepend=key[:1] + np.uint64(1)))
    merged = rows[starts]
    merged["low"] = np.minimum.reduceat(rows["low"], starts)
    merged["high"] = np.maximum.reduceat(rows["high"], starts)
    merged["finite"] = np.add.reduceat(rows["finite"], starts)
    merged["odd"] = np.add.reduceat(rows["odd"], starts)
    with np.errstate(over="ignore"):
        totals = np.add.reduceat(rows["mean"] * rows["finite"], starts)
    merged["mean"] = totals / np.maximum(merged["finite"], 1)
    return merged


def rows_of(
    data: bytes, slot_bytes: int, expected: Numbers | None = None, after: int = 0, records: int = 1
) -> tuple[Rows, int]:
    """Summarize the slots of a step ring in rows.

    Args:
        data: The content of the slots.
        slot_bytes: The size of one slot in bytes, which identifies the kind of ring.
        expected: The record number that each slot should hold, or None to accept any number.
        after: Records up to this number are ignored.
        records: How many slots to summarize in one row.

    Returns:
        The rows and the number of intact slots. For any other kind of ring, no rows and 0.
    """
    kind = _KINDS_BY_BYTES.get(slot_bytes)
    if kind is None:
        return _NO_ROWS, 0
    slots = np.frombuffer(data, kind)
    if expected is None:
        expected = slots["number"]
    intact = (slots["number"] == expected) & (slots["end"] == expected) & (expected > after)
    valid = intact & (slots["mark"] != _BEGUN) if kind is _MARK else intact
    # The second byte of the flags is the optimizer's number.
    optimizers = slots["flags"] >> 8 & 255
    groups = [
        _rows_of_optimizer(slots, expected, valid & (optimizers == optimizer), records, optimizer)
        for optimizer in np.unique(optimizers[valid])
    ]
    rows = np.concatenate([_NO_ROWS, *groups])
    by_number = np.argsort(rows["number"], kind="stable")
    return rows[by_number], int(intact.sum())


def _rows_of_optimizer(
    slots: Rows, expected: Numbers, valid: Numbers, records: int, optimizer: int
) -> Rows:
    """Return one row for each stretch of slots that contains at least one valid slot.

    Args:
        slots: The slots to summarize.
        expected: The record number of each slot.
        valid: A mask of the slots that are intact and were recorded for this optimizer.
        records: How many slots to summarize in one row.
        optimizer: The number of the optimizer.
    """
    values, columns = _values_of(slots)
    finite = np.isfinite(values) & valid
    odd = _odd_values(slots, values, finite, valid)

    rows = np.zeros(len(slots) // records, _ROW)
    rows["number"] = expected[::records]
    rows["optimizer"] = optimizer
    rows["low"] = np.inf
    rows["high"] = -np.inf
    for name in ("time", "step"):
        firsts = np.where(valid, slots[name], _LATEST)
        rows[name] = firsts.reshape(-1, records).min(1)

    # The axes are the recorded number (loss, norm, ...), the row, and the slot in the row.
    shape = (len(columns), -1, records)
    rows["finite"][:, columns] = finite.reshape(shape).sum(2).T
    rows["odd"][:, columns] = odd.reshape(shape).sum(2).T
    rows["low"][:, columns] = np.where(finite, values, np.inf).reshape(shape).min(2).T
    rows["high"][:, columns] = np.where(finite, values, -np.inf).reshape(shape).max(2).T
    with np.errstate(over="ignore"):
        rows["mean"][:, columns] = np.where(finite, values, 0.0).reshape(shape).sum(2).T
    rows["mean"] /= np.maximum(rows["finite"], 1)
    return rows[valid.reshape(-1, records).any(1)]


def _values_of(slots: Rows) -> tuple[Numbers, list[int]]:
    """Return the numbers in slots and their indices in `NAMES`.

    The array of numbers has the shape ``(numbers, slots)``.
    """
    values = slots["values"].T.copy()
    if slots.dtype != _SAMPLE:
        return values, [NAMES.index(name) for name in _MARK_NAMES]
    sizes = slots["sizes"].T
    # A size of 0 means that the size was not read.
    known_sizes = np.where(sizes > 0, sizes, np.nan)
    return np.concatenate([values, known_sizes]), list(range(len(NAMES)))


def _odd_values(slots: Rows, values: Numbers, finite: Numbers, valid: Numbers) -> Numbers:
    """Return a mask of the values that are Inf, or NaN with the flag that says they were read."""
    odd = ~finite & ~np.isnan(values) & valid
    bits = np.arange(_READ_FLAGS, dtype=np.uint16)[:, None]
    is_value = (slots["flags"] >> bits & 1) > 0
    odd[:_READ_FLAGS] |= ~finite[:_READ_FLAGS] & is_value & valid
    return odd
