"""Remember which rows all attempts have logged to a W&B run, so that none is logged twice.

W&B appends what a script logs to the history of its run, one row after the other. A resumed attempt
trains the steps after its checkpoint again and logs them again. W&B cannot replace a row, so
`RunHistory` recognizes such rows by their training step and the names of their values.

Some of the last rows that a killed process has logged never reach W&B. `RunHistory` finds out which
ones, so that they are logged when their steps are trained again.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.core.errors import RunDirectoryError
from holdfast.core.files import make_folder, read_file
from holdfast.recorder.ring import Record, RingWriter, read_ring
from holdfast.recorder.run_files import TRACKER_FOLDER, guarded, write_json
from holdfast.supervise.observe.wandb_file import last_position

_ROWS_FILE = "wandb-rows.ring"
_SESSION_FILE = "wandb-session.json"
# The fields of `_Row`.
_ROW = struct.Struct("<qqI")
_CAPACITY = 8192
# Instead of a position, a row of the ring contains this number when a session begins. Its step is
# the position of the last row that W&B had received by then.
_SESSION_BEGINS = -1
# A position that is greater than that of any row.
_END = 2**62
# The values in which the loggers of transformers and Lightning pass the training step.
_STEP_NAMES = ("train/global_step", "trainer/global_step")


class _Row(NamedTuple):
    """One call of ``Run.log``."""

    # The position in W&B's history.
    position: int
    # The training step.
    step: int
    # See `_series`.
    series: int


class _Session(NamedTuple):
    """The part of a W&B run that one process logs.

    `file` is the ``.wandb`` file of an offline run, or None for an online run.
    """

    run_id: str
    file: str | None


class RunHistory:
    """The rows that the attempts have logged to one W&B run.

    Args:
        run_path: The run directory.
        run: The W&B run, which has just begun or has been resumed.

    Raises:
        OSError: If the rows cannot be stored.
    """

    def __init__(self, run_path: Path, run: Any) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        # The position of the next row.
        self._position = int(run.starting_step)
        folder = make_folder(run_path, TRACKER_FOLDER)
        self._file = folder / _ROWS_FILE
        before = _read_session(folder)
        session = _Session(run.id, _file_of(run) if run.offline else None)
        if before is None or before.run_id != session.run_id:
            self._file.unlink(missing_ok=True)
            before = session
        received = _last_received(before, session, self._position)
        self._ring = RingWriter(self._file, payload_bytes=_ROW.size, capacity=_CAPACITY)
        self._append(_Row(_SESSION_BEGINS, received, 0))
        # The rows that were logged before the training state was last restored.
        self._rows = _RestoredRows(self._file)
        write_json(folder / _SESSION_FILE, session._asdict())

    def note_restored(self) -> None:
        """Note that the state of an earlier step was restored, from which training continues."""
        with self._lock:
            self._rows = _RestoredRows(self._file)

    def is_repeated(self, guard: str, data: Any, step: Any = None, commit: Any = None) -> bool:
        """Return whether W&B has this row already. Otherwise, remember that it is logged.

        Args:
            guard: The run directory of the Guard that was opened last, or an empty string.
            data: The argument of ``Run.log``, as are the following ones.
            step: See there.
            commit: See there.
        """
        # In a forked process, two writers would overwrite each other's rows.
        if os.getpid() != self._process or not isinstance(data, Mapping):
            return False
        training_step = _guard_step()
        if training_step is None:
            guard = ""
            training_step = _step_of_script(data, step)
        series = _series(guard, data)
        with self._lock:
            if training_step is not None and self._rows.contain(training_step, series):
                return True
            position = self._next_position(step, commit)
            if training_step is not None:
                self._append(_Row(position, training_step, series))
        return False

    def _next_position(self, step: Any, commit: Any) -> int:
        """Return the position at which W&B adds a row, which it determines in the same way."""
        if step is not None:
            self._position = max(self._position, int(step))
        position = self._position
        # Otherwise, the values of the next call belong to the same row.
        if commit or (commit is None and step is None):
            self._position += 1
        return position

    def _append(self, row: _Row) -> None:
        self._ring.append(_ROW.pack(*row))


class _RestoredRows:
    """The rows that were logged before the training state was restored.

    Args:
        file: The ring of rows.
    """

    def __init__(self, file: Path) -> None:
        records: list[Record] = []
        # If the file is damaged, the writer moves it aside.
        with suppress(RunDirectoryError):
            records = read_ring(file)
        rows = _received_rows(records)
        self._rows = {(row.step, row.series) for row in rows}
        # The first step of each series in the ring, if older rows have been overwritten. Earlier
        # steps of these series were logged, too.
        self._first_steps: dict[int, int] = {}
        if records and records[0].sequence > 1:
            for row in reversed(rows):
                self._first_steps[row.series] = row.step

    def contain(self, step: int, series: int) -> bool:
        """Return whether a row of a series was logged at a training step."""
        return step < self._first_steps.get(series, 0) or (step, series) in self._rows


def _received_rows(records: list[Record]) -> list[_Row]:
    """Return the rows that W&B has received, or will receive from this process."""
    received: list[_Row] = []
    session: list[_Row] = []
    for record in records:
        row = _Row._make(_ROW.unpack(record.payload))
        if row.position == _SESSION_BEGINS:
            last_position_received = row.step
            received += _up_to(last_position_received, session)
            session = []
        else:
            session.append(row)
    return received + session


def _up_to(position: int, rows: Iterable[_Row]) -> list[_Row]:
    return [row for row in rows if row.position <= position]


def _last_received(before: _Session, now: _Session, starting_position: int) -> int:
    """Return the position of the last row that W&B has received from the previous session.

    If it is unknown, return `_END`, because a gap is better than a curve that goes back.

    Args:
        before: The previous session.
        now: The session that begins.
        starting_position: The position at which W&B continues the history.
    """
    if now.file is None and before.file is None:
        return starting_position - 1
    position = None
    # The user may have deleted the file, or W&B may write another format.
    with suppress(Exception):
        if before.file is not None:
            position = last_position(Path(before.file))
    return _END if position is None else position


def _file_of(run: Any) -> str:
    """Return the path of the file to which W&B writes all data of a run."""
    return str(Path(run.dir).absolute().parent / f"run-{run.id}.wandb")


def _read_session(folder: Path) -> _Session | None:
    """Return the previous session, or None if its file is missing or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        values = json.loads(read_file(folder / _SESSION_FILE))
        file = values["file"]
        return _Session(str(values["run_id"]), None if file is None else str(file))
    return None


def _guard_step() -> int | None:
    """Return the step of the open Guard, or None if there is none."""
    counters = [reference() for _, reference in guarded.values()]
    return max((counter.global_step for counter in counters if counter is not None), default=None)


def _step_of_script(data: Mapping[Any, Any], step: Any) -> int | None:
    """Return the step that a script without a Guard passes to W&B, or None if it passes none.

    It may be an epoch, which identifies the row as well.
    """
    if step is None:
        step = next((data[name] for name in _STEP_NAMES if name in data), None)
    return None if step is None else int(step)


def _series(guard: str, data: Mapping[Any, Any]) -> int:
    """Return a checksum of the names of the values, and of the Guard that trains the steps."""
    words = [guard, *sorted(map(str, data))]
    return zlib.crc32("\n".join(words).encode("utf-8", "replace"))
