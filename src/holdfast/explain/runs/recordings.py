"""Read the event rings in a run directory, even if some of them are damaged.

`Recordings.missing` lists the files that could not be read. ``statements`` and
``explain.collecting`` interpret the events.
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
from holdfast.recorder.reader import describe_lost_steps, read_events
from holdfast.recorder.run_files import (
    BOARD_FILE,
    LOST_FILE,
    PROCESSES_FOLDER,
    SUPERVISED_FILE,
    SUPERVISOR_FOLDER,
    ProcessInfo,
    read_processes,
)

# The newest format of run directories that this version of holdfast can read.
FORMAT = 1
# The folder in a run directory to which a Guard records. It has a subfolder for each rank.
_GUARD_FOLDER = "recorder"
# At most this many Guard recordings of a run are read. A notebook may open any number of Guards.
_MAX_GUARDS = 64


@dataclass(slots=True, kw_only=True)
class Recordings:
    """The recordings in a run directory."""

    # The run directory.
    run: Path
    # Whether `holdfast run` created the directory.
    supervised: bool
    # One clause for each recording that could not be read or is incomplete.
    missing: list[str] = field(default_factory=list)

    def events(self, folder: Path) -> list[Event]:
        """Return the events in a folder's event ring, oldest first.

        Events of a damaged ring whose time is not a number are left out. If the ring cannot be
        read, the reason is added to `missing` and no events are returned.
        """
        try:
            events = read_events(folder)
        except (HoldfastError, OSError, ValueError) as error:
            reason = error.what if isinstance(error, HoldfastError) else str(error)
            self.missing.append(f"events of {folder.name}: {reason}")
            return []
        return [event for event in events if isinstance(event.unix_seconds, (int, float))]

    def note_overwritten_steps(self, folders: Mapping[Path, str]) -> None:
        """Add a clause to `missing` for each process or Guard whose older steps were overwritten.

        Args:
            folders: The name of each process or Guard, keyed by its folder.
        """
        for folder, name in folders.items():
            # Ignore damage here, because it is reported when the events in this folder are read.
            with suppress(HoldfastError, OSError, ValueError):
                clause = describe_lost_steps(folder)
                if clause:
                    self.missing.append(f"{name}: {clause}")

    def supervisor_loss(self) -> dict[str, Any] | None:
        """Return the note that the sentinel wrote after the supervisor was killed.

        Return None if there is no such note.
        """
        return _read_json_object(self.run / SUPERVISOR_FOLDER / LOST_FILE)

    def supervisor_events(self) -> list[Event]:
        """Return the supervisor's events, oldest first; none if the run was not supervised."""
        return self.events(self.run / SUPERVISOR_FOLDER) if self.supervised else []

    def processes(self) -> list[tuple[Path, ProcessInfo]]:
        """Return the folder and the `ProcessInfo` of each observed process, oldest first."""
        try:
            return read_processes(self.run)
        except OSError as error:
            self.missing.append(f"processes: {error.strerror or error}")
            return []

    def standing(self, folder: Path) -> Standing | None:
        """Return the last progress that a process published, or None if it cannot be read."""
        try:
            return read_board(folder / BOARD_FILE)
        except (HoldfastError, OSError) as error:
            self.missing.append(f"board of {folder.name}: {error}")
            return None

    def guards(self, events: list[Event]) -> list[Path]:
        """Return the folders to which Guards recorded, without duplicates.

        The folders are in this run directory or in directories that are named in `events`.

        Args:
            events: The events of processes, which name the directory of each Guard that a process
                opened.
        """
        folders = _folders_of_ranks(self.run)
        for event in events:
            path = event.data.get("path")
            if event.kind == "guard" and isinstance(path, str) and "\0" not in path:
                folders += _folders_of_ranks(Path(path))
        distinct: dict[Path, Path] = {}
        for folder in folders:
            distinct.setdefault(folder.resolve(), folder)
        return list(distinct.values())[:_MAX_GUARDS]


def open_recordings(run: Path) -> Recordings:
    """Return the recordings in a run directory.

    Raises:
        RunDirectoryError: H731 if the directory contains no recordings, H733 if it cannot be read,
            H734 if a newer version of holdfast created it.
    """
    try:
        supervised = _is_supervised(run)
        if not supervised and not holds_recordings(run):
            raise no_recording_error(run)
    except OSError as error:
        raise unreadable_error(run, error) from error
    if supervised:
        _check_format(run)
    return Recordings(run=run, supervised=supervised)


def holds_recordings(run: Path) -> bool:
    """Return whether `holdfast run` or a Guard has recorded to a directory.

    Raises:
        OSError: If the directory cannot be read.
    """
    return _is_supervised(run) or bool(_folders_of_ranks(run))


def _is_supervised(run: Path) -> bool:
    names = {path.name for path in run.iterdir()}
    return bool(names & {SUPERVISED_FILE, SUPERVISOR_FOLDER, PROCESSES_FOLDER})


def _check_format(run: Path) -> None:
    """Raise H734 if a newer version of holdfast created a run directory.

    A directory without a format number is assumed to have the current format.
    """
    description = _read_json_object(run / SUPERVISED_FILE) or {}
    number = description.get("format", FORMAT)
    if not isinstance(number, int) or number > FORMAT:
        raise RunDirectoryError(
            f"{run} has format {number!r}",
            limit=f"this holdfast reads run directories of format {FORMAT}",
            fix="read it with the holdfast version that wrote it.",
            rule="H734",
        )


def all_rings(recordings: Recordings) -> Iterator[tuple[str, Path]]:
    """Yield a name and the folder for each event ring in a run directory."""
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


def no_recording_error(run: Path) -> RunDirectoryError:
    """Return the H731 error for a directory that contains no recording."""
    return RunDirectoryError(
        f"{run} contains no recording",
        limit="neither `holdfast run` nor a Guard has written to it",
        fix=(
            "pass a directory that `holdfast run` created (such as runs/last) or that was passed to"
            " a Guard."
        ),
        rule="H731",
    )


def unreadable_error(path: Path, error: OSError) -> RunDirectoryError:
    """Return the H733 error for a run directory or a log that cannot be read."""
    fix = "check its permissions, or run as the user who owns it."
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        suggestion = near_path(path)
        fix = f"did you mean {suggestion}?" if suggestion is not None else "check the path."
    return RunDirectoryError(
        f"{path} cannot be read ({error.strerror or error})",
        limit="the recordings or the log must be readable",
        fix=fix,
        rule="H733",
    )


def near_path(path: Path) -> Path | None:
    """Return an existing path whose spelling is similar to that of a missing path.

    Return None if there is no similar path, or if `path` exists.
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
    """Return the folders in a run directory in which the ranks of a Guard recorded events."""
    try:
        folders = sorted((run / _GUARD_FOLDER).iterdir())
        return [folder for folder in folders if (folder / EVENTS_FILE).exists()]
    except OSError:
        return []


def _read_json_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file, or None if the file does not contain a JSON object."""
    try:
        value = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
