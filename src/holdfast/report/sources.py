"""Where a run's recordings lie: of the supervisor, of each observed process, and of guards."""

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
from holdfast.explain.runs.recordings import no_recording, unreadable
from holdfast.recorder.run_files import (
    PROCESSES_FOLDER,
    SUPERVISED_FILE,
    SUPERVISOR_FOLDER,
    ProcessInfo,
    folder_of_first_host,
    read_processes,
)

RECORDER_FOLDER = "recorder"
CHECKPOINTS_FOLDER = "checkpoints"
_MOST_JSON_BYTES = 4 << 20
_LATEST = 1e11  # the year 5138: what lies beyond is no time


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One directory with rings.

    Who wrote it, what people call that ("rank 3"), and what a process says of itself.
    """

    kind: Literal["supervisor", "process", "guard"]
    directory: Path
    label: str
    rank: int | None = None
    attempt: int = 0
    info: ProcessInfo | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventSeen:
    """One event, and who recorded it."""

    source: str
    event: Event


def check_run(run: Path) -> Path:
    """Return the directory with links resolved (H731 if nothing was recorded there, H733 if it
    cannot be read).
    """
    run = folder_of_first_host(run)
    try:
        if is_run(run):
            return run.resolve()
    except OSError as error:
        raise unreadable(run, error) from error
    raise no_recording(run)


def is_run(path: Path) -> bool:
    """Return whether something was recorded in a directory; OSError if it cannot be read."""
    names = {each.name for each in path.iterdir()}
    return bool(
        names
        & {
            SUPERVISED_FILE,
            SUPERVISOR_FOLDER,
            PROCESSES_FOLDER,
            RECORDER_FOLDER,
            CHECKPOINTS_FOLDER,
        }
    )


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in a directory, the newest first; what cannot be read is left out."""
    found = []
    for each in folder.iterdir():
        with suppress(OSError):
            if not each.is_symlink() and is_run(each):
                found.append((each.stat().st_mtime, each))
    return [path for _, path in sorted(found, reverse=True)]


def find_sources(
    run: Path, processes: Sequence[tuple[Path, ProcessInfo]] | None = None
) -> list[Source]:
    """Return the sources of a run, the supervisor first, then processes by attempt, rank and start,
    then guards.

    `processes` is what `read_processes` gives, if that is known.
    """
    found = []
    if (run / SUPERVISOR_FOLDER).is_dir():
        found.append(
            Source(kind="supervisor", directory=run / SUPERVISOR_FOLDER, label="supervisor")
        )
    processes = sorted(
        read_processes(run) if processes is None else processes,
        key=lambda pair: (pair[1].attempt, -1 if pair[1].rank is None else pair[1].rank),
    )
    labels = _labels([info for _, info in processes])
    for (folder, info), label in zip(processes, labels, strict=True):
        found.append(
            Source(
                kind="process",
                directory=folder,
                label=label,
                rank=info.rank,
                attempt=info.attempt,
                info=info,
            )
        )
    return found + guard_sources(run)


def _labels(infos: list[ProcessInfo]) -> list[str]:
    """Return a name for each process, no two the same."""
    several_attempts = len({info.attempt for info in infos}) > 1
    labels = []
    for info in infos:
        label = f"trainer {info.pid}" if info.rank is None else f"rank {info.rank}"
        if info.role == "loader worker":  # inherits the rank of its trainer
            label = f"worker {info.pid}" + ("" if info.rank is None else f" of rank {info.rank}")
        elif info.role != "trainer":
            label = f"{'launcher' if info.role == 'launcher' else 'process'} {info.pid}"
        labels.append(label + (f", attempt {info.attempt}" if several_attempts else ""))
    counts = Counter(labels)
    return [
        label if counts[label] == 1 else f"{label} ({info.folder})"
        for label, info in zip(labels, infos, strict=True)
    ]


def guard_sources(run: Path, *, attempt: int = 0) -> list[Source]:
    """Return the recordings of a guard's run directory; none if it has none."""
    found = []
    for folder in sorted((run / RECORDER_FOLDER).glob("rank*")):
        number = folder.name.removeprefix("rank")
        rank = int(number) if number.isascii() and number.isdigit() else None
        found.append(
            Source(
                kind="guard",
                directory=folder,
                label=f"guard {folder.name}",
                rank=rank,
                attempt=attempt,
            )
        )
    return found


def is_sound_event(event: Event) -> bool:
    """Return whether an event has a time and a step that can be drawn."""
    return (
        isinstance(event.unix_seconds, (int, float))
        and 0 <= event.unix_seconds < _LATEST
        and isinstance(event.global_step, int)
    )


def guard_run_of(event: Event) -> Path | None:
    """Return the run directory that an observed guard named in an event of its process, or None.

    The path comes from a ring that the process itself wrote, never from what it printed.
    """
    path = event.data.get("path") if event.kind == "guard" else None
    return (
        Path(path) if isinstance(path, str) and path.startswith("/") and "\0" not in path else None
    )


def ran_here(supervised: Mapping[str, Any]) -> bool:
    """Return whether the processes of a run are of this machine, as its supervisor wrote.

    If it did not, they are.
    """
    host = socket.gethostname()
    return bool(supervised.get("hostname", host) == host)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if it is missing, huge, damaged or something else."""
    try:
        found = json.loads(read_file(path, _MOST_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
