"""Find the recordings of a run's supervisor, processes and guards.

This module finds the directories of the recordings and assigns display names. ``run_follower``
reads their contents for the live view, and ``page.gathering`` and ``page.lanes`` read them for a
page.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from holdfast.core.events.event import Event
from holdfast.core.files import read_file
from holdfast.explain.runs.recordings import no_recording_error, unreadable_error
from holdfast.recorder.black_box import STEPS_FILE
from holdfast.recorder.run_files import (
    PROCESSES_FOLDER,
    SAMPLES_FILE,
    SUPERVISED_FILE,
    SUPERVISOR_FOLDER,
    ProcessInfo,
    folder_of_first_host,
    read_processes,
)

RECORDER_FOLDER = "recorder"
CHECKPOINTS_FOLDER = "checkpoints"
# A directory that contains a file or directory with one of these names is a run directory.
_NAMES_IN_A_RUN = frozenset(
    {SUPERVISED_FILE, SUPERVISOR_FOLDER, PROCESSES_FOLDER, RECORDER_FOLDER, CHECKPOINTS_FOLDER}
)
# JSON files of a run are a few KiB long. A larger file was not written by holdfast.
_MAX_JSON_BYTES = 4 << 20
# Any later Unix time, after the year 5138, can only be corrupt data.
_LATEST_UNIX_SECONDS = 1e11


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSource:
    """A directory with recordings of one process, one guard or the supervisor.

    Args:
        kind: Who wrote the recordings: the supervisor, an observed process or a guard.
        directory: The directory of the recordings.
        label: Display name such as "rank 3", which is unique within the run.
        rank: Rank of the process, if it has one.
        attempt: Number of the attempt in which the recordings were made.
        info: The description that the process recorded of itself; None unless `kind` is "process".
    """

    kind: Literal["supervisor", "process", "guard"]
    directory: Path
    label: str
    rank: int | None = None
    attempt: int = 0
    info: ProcessInfo | None = None

    @property
    def steps_path(self) -> Path:
        """Return the path of the ring with the steps of a process (samples) or a guard (marks)."""
        return self.directory / (SAMPLES_FILE if self.kind == "process" else STEPS_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvent:
    """An event with the label and the attempt of its source."""

    source: str
    event: Event
    attempt: int = 0


def check_run(run: Path) -> Path:
    """Check that a directory is a run directory, and return it with symbolic links resolved.

    Raises:
        RunDirectoryError: H731 if the directory contains no recordings, H733 if it cannot be read.
    """
    run = folder_of_first_host(run)
    try:
        if is_run(run):
            return run.resolve()
    except OSError as error:
        raise unreadable_error(run, error) from error
    raise no_recording_error(run)


def is_run(path: Path) -> bool:
    """Return whether a directory contains recordings. Raises OSError if it cannot be read."""
    return any(entry.name in _NAMES_IN_A_RUN for entry in path.iterdir())


def runs_in(folder: Path) -> list[Path]:
    """Return the run directories in a directory, newest first. Unreadable ones are skipped."""
    runs = []
    for path in folder.iterdir():
        with suppress(OSError):
            if not path.is_symlink() and is_run(path):
                runs.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(runs, reverse=True)]


def find_sources(
    run: Path, processes: Sequence[tuple[Path, ProcessInfo]] | None = None
) -> list[RunSource]:
    """Return the sources of a run: the supervisor, processes by attempt and rank, then guards.

    Args:
        run: The run directory.
        processes: The result of `read_processes`, if it is already available.
    """
    if processes is None:
        processes = read_processes(run)
    return [*_supervisor_sources(run), *_process_sources(processes), *guard_sources(run)]


def guard_sources(run: Path, *, attempt: int = 0) -> list[RunSource]:
    """Return the sources in a guard's run directory, one for each rank."""
    sources = []
    for folder in sorted((run / RECORDER_FOLDER).glob("rank*")):
        digits = folder.name.removeprefix("rank")
        rank = int(digits) if digits.isascii() and digits.isdigit() else None
        sources.append(
            RunSource(
                kind="guard",
                directory=folder,
                label=f"guard {folder.name}",
                rank=rank,
                attempt=attempt,
            )
        )
    return sources


def _supervisor_sources(run: Path) -> list[RunSource]:
    folder = run / SUPERVISOR_FOLDER
    if not folder.is_dir():
        return []
    return [RunSource(kind="supervisor", directory=folder, label="supervisor")]


def _process_sources(processes: Sequence[tuple[Path, ProcessInfo]]) -> list[RunSource]:
    ordered = sorted(processes, key=lambda process: _attempt_and_rank(process[1]))
    labels = _unique_labels([info for _, info in ordered])
    return [
        RunSource(
            kind="process",
            directory=folder,
            label=label,
            rank=info.rank,
            attempt=info.attempt,
            info=info,
        )
        for (folder, info), label in zip(ordered, labels, strict=True)
    ]


def _attempt_and_rank(info: ProcessInfo) -> tuple[int, int]:
    """Return the sort key of a process: attempt, then rank. Processes without a rank come first."""
    return info.attempt, -1 if info.rank is None else info.rank


def _unique_labels(infos: Sequence[ProcessInfo]) -> list[str]:
    """Return a unique display name for each process."""
    labels = [_label(info) for info in infos]
    if len({info.attempt for info in infos}) > 1:
        labels = [
            f"{label}, attempt {info.attempt}" for label, info in zip(labels, infos, strict=True)
        ]
    counts = Counter(labels)
    return [
        label if counts[label] == 1 else f"{label} ({info.folder})"
        for label, info in zip(labels, infos, strict=True)
    ]


def _label(info: ProcessInfo) -> str:
    if info.role == "loader worker":
        # The recorded rank of a loader worker is the rank of its trainer.
        return f"worker {info.pid}" + ("" if info.rank is None else f" of rank {info.rank}")
    if info.role == "launcher":
        return f"launcher {info.pid}"
    if info.role != "trainer":
        return f"process {info.pid}"
    return f"trainer {info.pid}" if info.rank is None else f"rank {info.rank}"


def is_sound_event(event: Event) -> bool:
    """Return whether an event has a valid time and step."""
    return (
        isinstance(event.unix_seconds, (int, float))
        and 0 <= event.unix_seconds < _LATEST_UNIX_SECONDS
        and isinstance(event.global_step, int)
    )


def guard_run_of(event: Event) -> Path | None:
    """Return the run directory of the guard that an event announces, or None.

    Only an event that the process itself has recorded is trusted, never the output of the run.
    """
    if event.kind != "guard":
        return None
    path = event.data.get("path")
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        return None
    return Path(path)


def ran_here(supervised: Mapping[str, Any]) -> bool:
    """Return whether the processes of a run are, or were, on this machine.

    Args:
        supervised: The supervisor's description of the run, or an empty dict for a run without a
            supervisor, which is assumed to be local.
    """
    host = socket.gethostname()
    return bool(supervised.get("hostname", host) == host)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if the file is missing, too large or damaged."""
    try:
        value = json.loads(read_file(path, _MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
