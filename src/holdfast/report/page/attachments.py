"""Read the checkpoints, stack dumps and output that the page of a run shows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.checkpoint.manifest import read_manifest
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.errors import CheckpointError
from holdfast.core.files import open_to_read
from holdfast.core.text import sanitise
from holdfast.recorder.run_files import (
    FAULTHANDLER_FILE,
    OUTPUT_FILE,
    PROCESSES_FOLDER,
    STACKS_FOLDER,
    ProcessInfo,
)
from holdfast.report.page.gathered_run import CheckpointSummary, RecordedStacks
from holdfast.report.problems import READING_ERRORS, reason
from holdfast.report.sources import CHECKPOINTS_FOLDER

# Limits on what the page shows, which keep it readable.
_MAX_STACKS = 60
_MAX_STACK_BYTES = 64 << 10
_MAX_OUTPUT_BYTES = 32 << 10
_MAX_REASON_CHARACTERS = 200


def read_checkpoints(run: Path) -> list[CheckpointSummary]:
    """Return summaries of the checkpoints in a run directory, newest first, damaged ones last.

    If the directory of checkpoints cannot be read, a single summary says why.
    """
    store = Store(run / CHECKPOINTS_FOLDER)
    try:
        entries = store.entries()
        damaged = store.damaged()
    except CheckpointError as error:
        status = reason(error, _MAX_REASON_CHARACTERS)
        return [CheckpointSummary(name=CHECKPOINTS_FOLDER, global_step=0, status=status)]
    return [
        *(_summary(entry) for entry in entries),
        *(
            CheckpointSummary(
                name=entry.path.name,
                global_step=entry.global_step,
                status="damaged, moved aside",
            )
            for entry in damaged
        ),
    ]


def _summary(entry: Entry) -> CheckpointSummary:
    name = entry.path.name
    try:
        manifest = read_manifest(entry.path)
        return CheckpointSummary(
            name=name,
            global_step=entry.global_step,
            status="complete",
            size_bytes=manifest.size_bytes(),
            saved=manifest.unix_seconds,
        )
    except READING_ERRORS as error:
        status = reason(error, _MAX_REASON_CHARACTERS)
        return CheckpointSummary(name=name, global_step=entry.global_step, status=status)


def read_stacks(run: Path, processes: Sequence[ProcessInfo]) -> Iterator[RecordedStacks]:
    """Yield the newest stack dumps: first the supervisor's, then those of the processes."""
    taken = sorted((run / STACKS_FOLDER).glob("*.txt"))
    # The name of a folder is read from a file that the process has written. A name with a slash
    # could lead out of the run directory.
    folders = [process.folder for process in processes if "/" not in process.folder]
    written = [run / PROCESSES_FOLDER / folder / FAULTHANDLER_FILE for folder in folders]
    for path in [*taken[-_MAX_STACKS:], *written[-_MAX_STACKS:]]:
        with contextlib.suppress(OSError):
            text = read_end(path, _MAX_STACK_BYTES).strip()
            if text:
                yield RecordedStacks(name=sanitise(path.relative_to(run)), text=text)


def read_output(run: Path) -> str:
    """Return the end of the run's output. Raises OSError if it cannot be read."""
    return read_end(run / OUTPUT_FILE)


def read_end(path: Path, most_bytes: int = _MAX_OUTPUT_BYTES) -> str:
    """Return the last lines of a file as sanitized text; empty if the file is missing.

    Raises:
        OSError: If the file cannot be read.
    """
    try:
        with open_to_read(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most_bytes))
            data = file.read(most_bytes)
    except FileNotFoundError:
        return ""
    text = data.decode("utf-8", "replace")
    if size > most_bytes:
        text = text.partition("\n")[2] or text
    return sanitise(_without_redrawn_lines(text), most=most_bytes, lines=True)


def _without_redrawn_lines(text: str) -> str:
    """Return text without the overwritten parts of progress bars.

    A progress bar redraws its line after a carriage return. Of each line, only the text after the
    last carriage return is kept.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
