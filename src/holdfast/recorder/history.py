"""What a ring of steps does not hold any more.

Rows of many records each, in a file of at most 1 MiB beside it.

When half of a ring is about to be overwritten, its records join the rows: the least, mean and most
of each number, and how many were not finite. Rows are of 64 records, and of twice as many whenever
they would be more than 3,072. The file is replaced as a whole: a kill at any moment leaves the one
from before. This is where ``recorder`` needs numpy.
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
# Magic, version, bytes of a row, `History.newest` and `History.missing`
_HEADER = struct.Struct("<8sIIQQ")
_MAGIC, _VERSION = b"HOLDHIST", 1
_FINEST, _MOST_ROWS, _MOST_RECORDS = 64, 3072, 2**62
_MOST_BYTES = 4 << 20
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
"""The numbers of a row: those of a sample. A guard's mark has the first two, and the seconds."""
_BEGINS: list[Any] = [("number", "<u8"), ("time", "<u8")]
_ROW = np.dtype(
    [*_BEGINS, ("step", "<u8"), ("optimizer", "u1")]
    + [(name, "<f8", len(NAMES)) for name in ("low", "mean", "high")]
    + [(name, "<u4", len(NAMES)) for name in ("finite", "odd")]
)
# A slot of each kind of ring, as ``progress`` and ``black_box`` write it.
_SAMPLE = np.dtype(
    [
        *_BEGINS,
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
        *_BEGINS,
        ("mark", "<u2"),
        ("flags", "<u2"),
        ("samples", "<u4"),
        ("step", "<u8"),
        ("values", "<f8", 3),
        ("end", "<u8"),
    ]
)
_KINDS = {kind.itemsize: kind for kind in (_SAMPLE, _MARK)}
_BEGUN = 1  # the mark that a step begins: it has no numbers
_READ_FLAGS = 3  # of loss, norm and rate: it is a value also where it is NaN


class History(NamedTuple):
    """Rows of a ring, oldest first: one for each stretch of records and each optimizer.

    Fields of a row: ``number``, and the first ``step`` and ``time`` (Unix nanoseconds),
    ``optimizer``; and, for each of `NAMES`, ``low``, ``mean``, ``high`` and how many were
    ``finite`` or ``odd``. Without a finite value low is inf, and high -inf. `newest` is the number
    of the newest record in it; `missing` ones up to that are not.
    """

    rows: Rows
    newest: int = 0
    missing: int = 0


def _merged(rows: Rows, records: int) -> Rows:
    """Return rows in which those of each so many records are one, for each optimizer.

    There must be some.
    """
    key = rows["number"] // np.uint64(records) * np.uint64(256) + rows["optimizer"]
    order = np.argsort(key, kind="stable")
    rows = rows[order]
    first = np.flatnonzero(np.diff(key[order], prepend=key[order[:1]] + np.uint64(1)))
    found = rows[first]
    for name, reduce in (
        ("low", np.minimum),
        ("high", np.maximum),
        ("finite", np.add),
        ("odd", np.add),
    ):
        found[name] = reduce.reduceat(rows[name], first)
    with np.errstate(over="ignore"):
        total = np.add.reduceat(rows["mean"] * rows["finite"], first)
    found["mean"] = total / np.maximum(found["finite"], 1)
    return found


def at_most(rows: Rows, most: int, finest: int = 2 * _FINEST) -> Rows:
    """Return no more than so many rows, of some power of two times `finest` records where these
    are more.
    """
    while len(rows) > most and finest < _MOST_RECORDS:
        rows, finest = _merged(rows, finest), 2 * finest
    return rows


def extend(path: Path, slots: bytes, slot_bytes: int, first: int) -> None:
    """Take over half of a ring, whose first slot is for the record of this number, and replace its
    history.

    Cost: some 3 ms for 16,384 records. OSError if it cannot be written.
    """
    last = first + len(slots) // slot_bytes - 1
    rows, newest, missing = read_history(path)
    if newest > last:  # of a ring that was moved aside
        rows, newest, missing = rows[:0], 0, 0
    fresh, count = rows_of(
        slots, slot_bytes, np.arange(first, last + 1, dtype=np.uint64), newest, _FINEST
    )
    rows = at_most(np.concatenate([rows, fresh]), _MOST_ROWS)
    header = _HEADER.pack(_MAGIC, _VERSION, _ROW.itemsize, last, missing + last - newest - count)
    swap_in(path.with_name(path.name + SUFFIX), header + rows.tobytes())


def rows_of(
    data: bytes, slot_bytes: int, due: Numbers | None = None, after: int = 0, records: int = 1
) -> tuple[Rows, int]:
    """Return a row for each so many slots of a ring of steps, and how many of these are whole.

    None of another ring. `due`: the number that each slot is to have, else what it has; records
    count `after` one.
    """
    kind = _KINDS.get(slot_bytes)
    if kind is None:
        return np.zeros(0, _ROW), 0
    slots = np.frombuffer(data, kind)
    due = slots["number"] if due is None else due
    whole = (slots["number"] == due) & (slots["end"] == due) & (due > after)
    valid = whole & (slots["mark"] != _BEGUN) if kind is _MARK else whole
    optimizer = slots["flags"] >> 8 & 255  # the bits above
    found = [
        _grouped(slots, due, valid & (optimizer == each), records, each)
        for each in np.unique(optimizer[valid])
    ]
    rows = np.concatenate([np.zeros(0, _ROW), *found])
    return rows[np.argsort(rows["number"], kind="stable")], int(whole.sum())


def _grouped(slots: Rows, due: Numbers, valid: Numbers, records: int, optimizer: int) -> Rows:
    """Return a row for each so many slots, of those that are `valid`."""
    values, places = (
        slots["values"].T.copy(),
        [NAMES.index(name) for name in ("loss", "grad_norm", "seconds")],
    )
    if slots.dtype == _SAMPLE:
        sizes, places = slots["sizes"].T, list(range(len(NAMES)))
        values = np.concatenate([values, np.where(sizes > 0, sizes, np.nan)])
    finite = np.isfinite(values) & valid
    odd = ~finite & ~np.isnan(values) & valid
    flags = slots["flags"] >> np.arange(_READ_FLAGS, dtype=np.uint16)[:, None] & 1
    odd[:_READ_FLAGS] |= ~finite[:_READ_FLAGS] & (flags > 0) & valid
    rows, shape = np.zeros(len(slots) // records, _ROW), (len(places), -1, records)
    rows["number"], rows["optimizer"], rows["low"], rows["high"] = (
        due[::records],
        optimizer,
        np.inf,
        -np.inf,
    )
    for name in ("time", "step"):
        rows[name] = np.where(valid, slots[name], np.uint64(2**64 - 1)).reshape(-1, records).min(1)
    rows["finite"][:, places], rows["odd"][:, places] = (
        each.reshape(shape).sum(2).T for each in (finite, odd)
    )
    rows["low"][:, places] = np.where(finite, values, np.inf).reshape(shape).min(2).T
    rows["high"][:, places] = np.where(finite, values, -np.inf).reshape(shape).max(2).T
    with np.errstate(over="ignore"):
        rows["mean"][:, places] = np.where(finite, values, 0.0).reshape(shape).sum(2).T
    rows["mean"] /= np.maximum(rows["finite"], 1)
    return rows[valid.reshape(-1, records).any(1)]


def read_history(path: Path) -> History:
    """Return the history beside a ring, whose path this is.

    An empty one if it is missing or damaged.
    """
    try:
        data = read_file(path.with_name(path.name + SUFFIX), _MOST_BYTES)
        magic, version, row_bytes, newest, missing = _HEADER.unpack_from(data)
    except (OSError, struct.error):
        return History(np.zeros(0, _ROW))
    if (magic, version, row_bytes) != (_MAGIC, _VERSION, _ROW.itemsize):
        return History(np.zeros(0, _ROW))
    whole = (len(data) - _HEADER.size) // row_bytes
    return History(np.frombuffer(data, _ROW, whole, _HEADER.size), newest, missing)
