"""The rings of events in a run directory, read so that no damage to them can end the reader.

What is damaged, or written by somebody else, is named in `Recordings.missing`. What the events mean
is found in ``statements`` and in ``explain.collecting``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError, RunDirectoryError, nearest
from holdfast.core.events.event import Event
from holdfast.core.files import read_file
from holdfast.recorder.black_box import EVENTS_FILE
from holdfast.recorder.progress import Standing, read_board
from holdfast.recorder.reader import StepRecord, not_recorded_any_more, read_events, read_steps
from holdfast.recorder.run_files import (
    BOARD_FILE,
    LOST_FILE,
    PROCESSES_FOLDER,
    SUPERVISED_FILE,
    SUPERVISOR_FOLDER,
    ProcessInfo,
    read_processes,
)

# The format of run directories that this holdfast reads.
FORMAT = 1
# The folder of a guard's recordings, with a folder for each rank.
_GUARD_FOLDER = "recorder"
# Guards of one run that are read. A notebook may have opened any number.
_MOST_GUARDS = 64


@dataclass(slots=True, kw_only=True)
class Recordings:
    """The recordings in a run directory."""

    # The directory.
    run: Path
    # Whether `holdfast run` made it.
    supervised: bool
    # What could not be read, one sentence each.
    missing: list[str] = field(default_factory=list)

    def events(self, folder: Path) -> list[Event]:
        """Return the events of one ring, oldest first.

        If the ring cannot be read, none are returned and the reason is added to `missing`.
        """
        try:
            events = read_events(folder)
        except (HoldfastError, OSError, ValueError) as error:
            reason = error.what if isinstance(error, HoldfastError) else str(error)
            self.missing.append(f"events of {folder.name}: {reason}")
            return []
        return [event for event in events if isinstance(event.unix_seconds, (int, float))]

    def say_lost_steps(self, folders: Mapping[Path, str]) -> None:
        """Add to `missing` which steps of processes are no longer recorded.

        Args:
            folders: The folders of the processes, with what to call each process.
        """
        for folder, name in folders.items():
            # That a ring is damaged is said where its events are read.
            with suppress(HoldfastError, OSError, ValueError):
                words = not_recorded_any_more(folder)
                if words:
                    self.missing.append(f"of {name} {words}")

    def newest_step(self, folder: Path) -> StepRecord | None:
        """Return the newest step that a guard recorded, or None if none can be read."""
        try:
            return max(read_steps(folder), key=lambda step: step.unix_seconds, default=None)
        except (HoldfastError, OSError, ValueError):
            # That the ring is damaged is said where its events are read.
            return None

    def lost(self) -> dict[str, Any] | None:
        """Return what was left when the supervisor itself was killed.

        None if it was not killed, or if nobody noted it.
        """
        return _read_json_object(self.run / SUPERVISOR_FOLDER / LOST_FILE)

    def supervisor(self) -> list[Event]:
        """Return the events of the supervisor."""
        return self.events(self.run / SUPERVISOR_FOLDER) if self.supervised else []

    def processes(self) -> list[tuple[Path, ProcessInfo]]:
        """Return the folders of the observed processes, with what each says of itself."""
        try:
            return read_processes(self.run)
        except OSError as error:
            self.missing.append(f"processes: {error.strerror or error}")
            return []

    def standing(self, folder: Path) -> Standing | None:
        """Return the progress that a process published last, or None if it cannot be read."""
        try:
            return read_board(folder / BOARD_FILE)
        except (HoldfastError, OSError) as error:
            self.missing.append(f"board of {folder.name}: {error}")
            return None

    def guards(self, events: list[Event]) -> list[Path]:
        """Return the folders of the recordings of guards.

        Args:
            events: The events of processes. They name the directories of the guards which the
                processes opened; a guard may also have recorded in this directory.
        """
        folders = _folders_of_ranks(self.run)
        for event in events:
            path = event.data.get("path")
            if event.kind == "guard" and isinstance(path, str) and "\0" not in path:
                folders += _folders_of_ranks(Path(path))
        distinct: dict[Path, Path] = {}
        for folder in folders:
            distinct.setdefault(folder.resolve(), folder)
        return list(distinct.values())[:_MOST_GUARDS]


def open_recordings(run: Path) -> Recordings:
    """Return the recordings in a run directory.

    Raises:
        RunDirectoryError: H731 if it holds none, H733 if it cannot be read, H734 if a newer
            holdfast made it.
    """
    try:
        names = {path.name for path in run.iterdir()}
    except OSError as error:
        raise unreadable(run, error) from error
    if names & {SUPERVISED_FILE, SUPERVISOR_FOLDER, PROCESSES_FOLDER}:
        _check_format(run)
        return Recordings(run=run, supervised=True)
    if _GUARD_FOLDER in names and _folders_of_ranks(run):
        return Recordings(run=run, supervised=False)
    raise no_recording(run)


def _check_format(run: Path) -> None:
    """Raise H734 if a newer holdfast made a directory. Without a number, it is of this format."""
    description = _read_json_object(run / SUPERVISED_FILE) or {}
    written = description.get("format", FORMAT)
    if not isinstance(written, int) or written > FORMAT:
        raise RunDirectoryError(
            f"{run} has format {written!r}",
            limit=f"this holdfast reads run directories of format {FORMAT}",
            fix="read it with the holdfast that wrote it.",
            rule="H734",
        )


def all_rings(recordings: Recordings) -> Iterator[tuple[str, Path]]:
    """Yield the folder of each ring of events in a run directory, with what to call it."""
    supervisor = recordings.run / SUPERVISOR_FOLDER
    if (supervisor / EVENTS_FILE).exists():
        yield "supervisor", supervisor
    events: list[Event] = []
    for folder, info in recordings.processes():
        rank = f" rank {info.rank}" if info.rank is not None else ""
        yield f"{info.role} {info.pid}{rank}", folder
        events += recordings.events(folder)
    for folder in recordings.guards(events):
        yield f"guard {folder.name}", folder


def no_recording(run: Path) -> RunDirectoryError:
    """Return the error for a directory that is not one of a run (H731)."""
    return RunDirectoryError(
        f"{run} holds no recording",
        limit="neither `holdfast run` nor a Guard has written to it",
        fix="pass a directory made by `holdfast run` (such as runs/last), or one given to Guard.",
        rule="H731",
    )


def unreadable(path: Path, error: OSError) -> RunDirectoryError:
    """Return the error for a directory or a log that the system refuses to read (H733)."""
    fix = "check its permissions, or run as the user who owns it."
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        near = near_path(path)
        fix = f"did you mean {near}?" if near is not None else "check the path."
    return RunDirectoryError(
        f"{path} cannot be read ({error.strerror or error})",
        limit="the recordings or the log are needed",
        fix=fix,
        rule="H733",
    )


def near_path(path: Path) -> Path | None:
    """Return an existing path that is spelled almost like one that does not exist.

    None if there is none, or if the path exists.
    """
    with suppress(OSError):
        if path.exists():
            return None
        parent = path.parent if path.parent.is_dir() else near_path(path.parent)
        if parent is not None:
            name = nearest(path.name, [sibling.name for sibling in parent.iterdir()])
            return parent / name if name else None
    return None


def _folders_of_ranks(run: Path) -> list[Path]:
    """Return the folders in which the ranks of a guard recorded events."""
    try:
        folders = sorted((run / _GUARD_FOLDER).iterdir())
        return [folder for folder in folders if (folder / EVENTS_FILE).exists()]
    except OSError:
        return []


def _read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file holds none."""
    try:
        value = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
