"""Read a CSV file of metrics: the ``metrics.csv`` of Lightning's CSVLogger and files like it.

The first line names the columns. The columns ``step`` (or ``epoch``) number the lines, and a cell
is empty if its metric was not logged there.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice, zip_longest
from pathlib import Path

from holdfast.explain.records.damage import DamagedError
from holdfast.explain.records.record import Record

# The names of the column that numbers the lines. The first one that the file has is used.
_STEP_COLUMNS = ("step", "global_step", "train/global_step", "iteration", "iter", "epoch")
_MAX_COLUMNS = 2000
_MAX_LINE_BYTES = 1 << 20
# How many lines are searched for a number before the file is considered to be something else.
_LINES_OF_SAMPLE = 100
_ROWS_AT_ONCE = 4096


def read_into(path: Path, record: Record) -> None:
    """Add the numbers in a CSV file to a record.

    Args:
        path: The file.
        record: Receives the numbers, and the unit of the steps if the file does not number its
            lines by steps.

    Raises:
        DamagedError: If the file is not a CSV file with columns of numbers.
        OSError: If the file cannot be read.
    """
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        # Without the limit, a file without line breaks would be read into memory as a whole.
        rows = csv.reader(iter(lambda: file.readline(_MAX_LINE_BYTES), ""))
        try:
            names = [name.strip() for name in next(rows, [])]
            sample = list(islice(rows, _LINES_OF_SAMPLE))
            _check_is_table(names, sample)
            column = _step_column(names)
            if column is None:
                record.unit = "line"
            elif names[column].lower() == "epoch":
                record.unit = "epoch"
            _add_rows(names, column, chain(sample, rows), record)
        except csv.Error as error:
            raise DamagedError(f"a line that is not CSV ({error})") from error


def _check_is_table(names: Sequence[str], sample: Sequence[Sequence[str]]) -> None:
    """Check that a file looks like a table of metrics.

    Raises:
        DamagedError: If it does not.
    """
    if not 2 <= len(names) <= _MAX_COLUMNS:
        raise DamagedError(f"{len(names)} columns in its first line")
    if all(_number(name) is not None for name in names):
        raise DamagedError("no column names in its first line")
    if not any(_number(cell) is not None for row in sample for cell in row):
        raise DamagedError(f"no number in its first {_LINES_OF_SAMPLE} lines")


def _step_column(names: Sequence[str]) -> int | None:
    """Return the index of the column that numbers the lines, or None."""
    lowered = [name.lower() for name in names]
    for name in _STEP_COLUMNS:
        if name in lowered:
            return lowered.index(name)
    return None


def _add_rows(
    names: Sequence[str], step_column: int | None, rows: Iterator[list[str]], record: Record
) -> None:
    """Add the numbers in all rows to a record.

    Args:
        names: The names of the columns.
        step_column: The index of the column that numbers the rows. If it is None, the numbers of
            the lines are used.
        rows: The rows below the names.
        record: Receives the numbers.
    """
    # The line of the first row, below the names.
    line = 2
    step = 0
    # Working on the columns of many rows is several times as fast as working on each cell.
    while block := list(islice(rows, _ROWS_AT_ONCE)):
        columns = list(zip_longest(*block, fillvalue=""))[: len(names)]
        steps: list[int] = list(range(line, line + len(block)))
        if step_column is not None and step_column < len(columns):
            # A row without a step belongs to the step before it.
            steps = list(accumulate(columns[step_column], _as_step, initial=step))[1:]
        for index, (name, cells) in enumerate(zip(names, columns, strict=False)):
            if index != step_column:
                _add_column(name, steps, cells, record)
        line += len(block)
        step = steps[-1]


def _as_step(previous: int, cell: str) -> int:
    """Return the step in a cell, or the step before it if the cell holds none."""
    value = _number(cell)
    return int(value) if value is not None and math.isfinite(value) else previous


def _add_column(name: str, steps: Sequence[int], cells: Sequence[str], record: Record) -> None:
    """Add the numbers of a column to a record. The cells may be empty or hold other text."""
    try:
        numbers: list[float | None] = list(map(float, cells))
    except ValueError:
        numbers = [_number(cell) for cell in cells]
    pairs = [(step, value) for step, value in zip(steps, numbers, strict=True) if value is not None]
    if pairs:
        record.extend(name, *zip(*pairs, strict=True))


def _number(cell: str) -> float | None:
    """Return the number in a cell, or None if it holds none."""
    if not cell:
        return None
    try:
        return float(cell)
    except ValueError:
        return None
