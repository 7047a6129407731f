"""Find the recordings of a run: those of the supervisor, its processes and its guards.

This module finds the directories and gives them display names. Their contents are read by
``run_follower``, and for a page by ``page.gathering`` and ``page.lanes``.
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
# A directory that contains one of these is a run directory.
_NAMES_IN_A_RUN = frozenset(
    {SUPERVISED_FILE, SUPERVISOR_FOLDER, PROCESSES_FOLDER, RECORDER_FOLDER, CHECKPOINTS_FOLDER}
)
# The JSON files of a run are a few KiB long; a larger file was not written by holdfast.
_MAX_JSON_BYTES = 4 << 20
# The year 5138. A later time can only be corrupt data.
_LATEST_UNIX_SECONDS = 1e11


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSource:
    """One directory with recordings.

    Args:
        kind: Who recorded it.
        directory: Where the recordings are.
        label: Display name, such as "rank 3"; unique within the run.
        rank: Rank of the process, if it has one.
        attempt: Number of the attempt that it belongs to.
        info: The process's self-description; None unless `kind` is "process".
    """

    kind: Literal["supervisor", "process", "guard"]
    directory: Path
    label: str
    rank: int | None = None
    attempt: int = 0
    info: ProcessInfo | None = None

    @property
    def steps_path(self) -> Path:
        """Return the ring of its steps: samples of a process, or marks of a guard."""
        return self.directory / (SAMPLES_FILE if self.kind == "process" else STEPS_FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvent:
    """An event, and the label and the attempt of the source that recorded it."""

    source: str
    event: Event
    attempt: int = 0


def check_run(run: Path) -> Path:
    """Return a run directory with links resolved.

    Raises:
        RunDirectoryError: H731 if nothing was recorded there, H733 if it cannot be read.
    """
    run = folder_of_first_host(run)
    try:
        if is_run(run):
            return run.resolve()
    except OSError as error:
        raise unreadable_error(run, error) from error
    raise no_recording_error(run)


def is_run(path: Path) -> bool:
    """Return whether a directory contains recordings; raise OSError if it cannot be read."""
    return any(entry.name in _NAMES_IN_A_RUN for entry in path.iterdir())


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in a directory, newest first, without those that cannot be read."""
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
        processes: The result of `read_processes`, if already available.
    """
    if processes is None:
        processes = read_processes(run)
    return [*_supervisor_sources(run), *_process_sources(processes), *guard_sources(run)]


def guard_sources(run: Path, *, attempt: int = 0) -> list[RunSource]:
    """Return the recordings of a guard in its run directory, one for each rank."""
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
    """Return a sort key; processes without a rank come first in their attempt."""
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
        # A worker inherits the rank of its trainer.
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
    """Return the run directory that a guard named in an event of its process, or None.

    The path comes from a ring that the process itself wrote, never from what it printed.
    """
    if event.kind != "guard":
        return None
    path = event.data.get("path")
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        return None
    return Path(path)


def ran_here(supervised: Mapping[str, Any]) -> bool:
    """Return whether the processes of a run belong to this machine.

    Args:
        supervised: What the supervisor wrote; a run without a supervisor is assumed to be local.
    """
    host = socket.gethostname()
    return bool(supervised.get("hostname", host) == host)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if it is missing, huge, damaged or not an object."""
    try:
        value = json.loads(read_file(path, _MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
