"""Read the record of another tool into a `Record`."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from holdfast.core.errors import RunDirectoryError
from holdfast.core.files import read_file
from holdfast.explain.logs.log_text import read_log
from holdfast.explain.records import csv_table, tensorboard, trainer_state, wandb_run
from holdfast.explain.records.damage import DamagedError
from holdfast.explain.records.finding import Format, RecordFiles
from holdfast.explain.records.record import Record
from holdfast.explain.runs.recordings import unreadable_error

_TOOLS: dict[Format, str] = {
    "trainer_state": "Transformers Trainer",
    "tensorboard": "TensorBoard",
    "wandb": "W&B",
    "csv": "CSV",
}
_READERS: dict[Format, Callable[[Path, Record], None]] = {
    "trainer_state": trainer_state.read_into,
    "tensorboard": tensorboard.read_into,
    "wandb": wandb_run.read_into,
    "csv": csv_table.read_into,
}
_SUMMARY = "files/wandb-summary.json"
_OUTPUT = "files/output.log"


def read_record(source: RecordFiles) -> Record:
    """Return the metrics in the files of a record.

    Raises:
        RunDirectoryError: H733 if a file cannot be read, is damaged or holds no numbers.
    """
    record = Record(path=source.path, tool=_TOOLS[source.format], file=source.path.name)
    path = source.path
    try:
        for path in source.files:
            record.file = path.name
            if len(source.files) > 1:
                record.begin_file()
            _READERS[source.format](path, record)
        if not record.series and source.format == "wandb" and source.path.is_dir():
            _read_output_of_wandb(source.path, record)
    except DamagedError as error:
        raise _unusable_error(path, str(error)) from error
    except OSError as error:
        raise unreadable_error(path, error) from error
    if not record.series:
        raise _unusable_error(path, "no numbers")
    if len(source.files) > 1:
        record.file = f"{len(source.files)} event files"
    return record


def _unusable_error(path: Path, problem: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path} has {problem}",
        limit=(
            "a record must be a trainer_state.json, a TensorBoard event file, a W&B run directory"
            " or a CSV file of metrics"
        ),
        fix="check that the file is complete. Explain a log instead, if there is one.",
        rule="H733",
    )


def _read_output_of_wandb(directory: Path, record: Record) -> None:
    """Add the losses that a W&B run printed, and the final values in its summary.

    This is all that is left if the ``.wandb`` file is missing.
    """
    record.note_missing("the history of the run, because its .wandb file is missing or empty")
    output = directory / _OUTPUT
    if output.is_file():
        with output.open("rb") as stream:
            log = read_log(stream, name=output.name, alone=True)
        for line, loss in log.losses:
            record.add("loss", line, loss)
        for line, norm in log.norms:
            record.add("grad_norm", line, norm)
        if record.series:
            record.file = output.name
            record.unit = "line"
    summary = directory / _SUMMARY
    if summary.is_file():
        for name, value in wandb_run.numbers_in_summary(read_file(summary)):
            # The final value of a metric says nothing that its printed values do not say.
            if name not in record.series and math.isfinite(value):
                record.add(name, 0, value)
