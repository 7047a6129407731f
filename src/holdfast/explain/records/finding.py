"""Decide which tool wrote a file or a directory, from its name and its beginning."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from holdfast.core.errors import PolicyError
from holdfast.core.text import listed
from holdfast.explain.records.trainer_state import holds_log_history
from holdfast.explain.runs.recordings import holds_recordings, unreadable_error

Format: TypeAlias = Literal["trainer_state", "tensorboard", "wandb", "csv"]

TRAINER_STATE = "trainer_state.json"
# The file of Lightning's CSVLogger, and that of Ultralytics.
_CSV_NAMES = ("metrics.csv", "results.csv")
_CHECKPOINT_FOLDER = re.compile(r"checkpoint-(\d{1,12})")
_EVENT_FILE = re.compile(r"\.tfevents\.(\d{1,15})\.")
# The files that W&B writes beside the history.
_WANDB_FILES = ("files/wandb-summary.json", "files/output.log")
_SNIFFED_CHARACTERS = 4096
# How deep below a directory its records are searched, such as in `runs/Nov30_host`, and how many
# entries are looked at.
_MAX_DEPTH = 2
_MAX_ENTRIES = 10_000
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFiles:
    """The files of a record.

    Attributes:
        path: The file or the directory that was passed, or that was found in it.
        format: The format of the files.
        files: The files that hold the values, oldest first. Empty for a W&B run without its
            ``.wandb`` file.
    """

    path: Path
    format: Format
    files: tuple[Path, ...]


def find_record(path: Path) -> RecordFiles | None:
    """Return the files of the record at a path, or None if there is none.

    Args:
        path: A file or a directory. The directory of a holdfast run holds no record. If a directory
            does not hold a record itself but one of its subdirectories does, that one is returned.

    Raises:
        PolicyError: H105 if a directory holds several records.
        RunDirectoryError: H733 if the file or the directory cannot be read.
    """
    try:
        return _find_record(path)
    except OSError as error:
        raise unreadable_error(path, error) from error


def _find_record(path: Path) -> RecordFiles | None:
    if not path.is_dir():
        return _record_in_file(path)
    if holds_recordings(path):
        return None
    record = _record_in_directory(path)
    if record is not None:
        return record
    records = list(_records_below(path))
    if len(records) > 1:
        names = listed((other.path for other in records), most=_MAX_NAMED)
        raise PolicyError(
            f"{path} holds {len(records)} records: {names}",
            limit="one record is read at a time",
            fix="name one of them.",
            rule="H105",
        )
    return records[0] if records else None


def _record_in_file(path: Path) -> RecordFiles | None:
    """Return the record in a file, or None if the file is something else, such as a log."""
    if not path.is_file():
        return None
    name = path.name.lower()
    kind: Format | None = None
    if name.endswith(TRAINER_STATE) or (name.endswith(".json") and _has_log_history(path)):
        kind = "trainer_state"
    elif ".tfevents." in name:
        kind = "tensorboard"
    elif name.endswith(".wandb"):
        kind = "wandb"
    elif name.endswith(".csv"):
        kind = "csv"
    return None if kind is None else RecordFiles(path=path, format=kind, files=(path,))


def _has_log_history(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as file:
        return holds_log_history(file.read(_SNIFFED_CHARACTERS))


def _record_in_directory(directory: Path) -> RecordFiles | None:
    """Return the record that a directory itself holds."""
    state = directory / TRAINER_STATE
    if not state.is_file():
        state = _newest_state_of_checkpoints(directory) or state
    if state.is_file():
        return RecordFiles(path=state, format="trainer_state", files=(state,))
    for name in _CSV_NAMES:
        table = directory / name
        if table.is_file():
            return RecordFiles(path=table, format="csv", files=(table,))
    events = sorted(directory.glob("*.tfevents.*"), key=_start_of_event_file)
    if events:
        return RecordFiles(path=directory, format="tensorboard", files=tuple(events))
    histories = sorted(directory.glob("*.wandb"))
    if histories or any((directory / name).is_file() for name in _WANDB_FILES):
        return RecordFiles(path=directory, format="wandb", files=tuple(histories[:1]))
    return None


def _newest_state_of_checkpoints(directory: Path) -> Path | None:
    """Return the state in the newest ``checkpoint-N`` of a Trainer's output directory."""
    states = []
    for state in directory.glob(f"checkpoint-*/{TRAINER_STATE}"):
        match = _CHECKPOINT_FOLDER.fullmatch(state.parent.name)
        if match is not None:
            states.append((int(match[1]), state))
    return max(states, default=(0, None))[1]


def _start_of_event_file(path: Path) -> tuple[int, str]:
    """Return the key that sorts event files by the time at which they were begun."""
    match = _EVENT_FILE.search(path.name)
    return (int(match[1]) if match is not None else 0, path.name)


def _records_below(directory: Path) -> Iterable[RecordFiles]:
    """Yield the records in the subdirectories of a directory, without those inside another one."""
    pending = [(child, 1) for child in _subdirectories(directory)]
    examined = 0
    while pending and examined < _MAX_ENTRIES:
        child, depth = pending.pop(0)
        examined += 1
        with suppress(OSError):
            if holds_recordings(child):
                # What its script logged belongs to a run that holdfast itself can explain.
                continue
            record = _record_in_directory(child)
            if record is not None:
                yield record
            elif depth < _MAX_DEPTH:
                pending += [(below, depth + 1) for below in _subdirectories(child)]


def _subdirectories(directory: Path) -> list[Path]:
    # `os.scandir` knows the types of the entries, whereas `Path.iterdir` asks for each one,
    # which matters in a directory with a million samples.
    with os.scandir(directory) as entries:
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
