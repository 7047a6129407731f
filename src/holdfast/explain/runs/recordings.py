"""The rings of a run directory, read so that nothing in them can end the reader.

Damaged or foreign ones are named.

Does not: interpret events (see ``collecting``).
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

FORMAT = 1
"""Of run directories that this holdfast reads."""
_MOST_GUARDS = 64


@dataclass(slots=True, kw_only=True)
class Recordings:
    """What a run directory holds."""

    run: Path  # the directory
    supervised: bool  # whether ``holdfast run`` made it
    missing: list[str] = field(default_factory=list)  # what cannot be read, one sentence each

    def events(self, folder: Path) -> list[Event]:
        """Return the events of one ring, oldest first.

        None, and a word in `missing`, if it cannot be read.
        """
        try:
            return [
                event
                for event in read_events(folder)
                if isinstance(event.unix_seconds, (int, float))
            ]
        except (HoldfastError, OSError, ValueError) as error:
            reason = error.what if isinstance(error, HoldfastError) else str(error)
            self.missing.append(f"events of {folder.name}: {reason}")
            return []

    def say_lost_steps(self, folders: Mapping[Path, str]) -> None:
        """Note which steps of processes, given by folder and name, are not recorded any more."""
        for folder, who in folders.items():
            # Damaged: that is said where its events are read
            with suppress(HoldfastError, OSError, ValueError):
                words = not_recorded_any_more(folder)
                self.missing += [f"of {who} {words}"] if words else []

    def newest_step(self, folder: Path) -> StepRecord | None:
        """Return the newest mark of a step of a guard, None if there is none that can be read."""
        try:
            return max(read_steps(folder), key=lambda step: step.unix_seconds, default=None)
        except (HoldfastError, OSError, ValueError):
            return None  # the events of the same folder say what is wrong with it

    def lost(self) -> dict[str, Any] | None:
        """Return what was left when the supervisor itself was killed, or None.

        It was not, or nobody noted it.
        """
        return _json_object(self.run / SUPERVISOR_FOLDER / LOST_FILE)

    def supervisor(self) -> list[Event]:
        """Return the events of the supervisor."""
        return self.events(self.run / SUPERVISOR_FOLDER) if self.supervised else []

    def processes(self) -> list[tuple[Path, ProcessInfo]]:
        """Return the observed processes."""
        try:
            return read_processes(self.run)
        except OSError as error:
            self.missing.append(f"processes: {error.strerror or error}")
            return []

    def standing(self, folder: Path) -> Standing | None:
        """Return where a process stood when it last said so."""
        try:
            return read_board(folder / BOARD_FILE)
        except (HoldfastError, OSError) as error:
            self.missing.append(f"board of {folder.name}: {error}")
            return None

    def guards(self, events: list[Event]) -> list[Path]:
        """Return the recordings of guards.

        Of this directory, and of those that processes say they have opened.
        """
        folders = [*_ranks(self.run)]
        for event in events:
            path = event.data.get("path")
            if event.kind == "guard" and isinstance(path, str) and "\0" not in path:
                folders += _ranks(Path(path))
        return list({folder.resolve(): folder for folder in folders[::-1]}.values())[::-1][
            :_MOST_GUARDS
        ]


def open_recordings(run: Path) -> Recordings:
    """Return the recordings of a directory (H731 if it holds none, H733 unreadable, H734 of a
    newer holdfast).
    """
    try:
        names = {path.name for path in run.iterdir()}
    except OSError as error:
        raise unreadable(run, error) from error
    if names & {SUPERVISED_FILE, SUPERVISOR_FOLDER, PROCESSES_FOLDER}:
        found = Recordings(run=run, supervised=True)
        written = (_json_object(run / SUPERVISED_FILE) or {}).get("format", FORMAT)
        if not isinstance(written, int) or written > FORMAT:
            raise RunDirectoryError(
                f"{run} has format {written!r}",
                limit=f"this holdfast reads run directories of format {FORMAT}",
                fix="read it with the holdfast that wrote it.",
                rule="H734",
            )
        return found
    if "recorder" in names and any(_ranks(run)):
        return Recordings(run=run, supervised=False)
    raise no_recording(run)


def no_recording(run: Path) -> RunDirectoryError:
    """Return the error for a directory that is not one of a run."""
    return RunDirectoryError(
        f"{run} holds no recording",
        limit="neither `holdfast run` nor a Guard has written to it",
        fix="pass a directory made by `holdfast run` (such as runs/last), or one given to Guard.",
        rule="H731",
    )


def near_path(path: Path) -> Path | None:
    """Return what is called almost as a path that is not there.

    None if nothing is, or if it is there.
    """
    with suppress(OSError):
        parent = path.parent if path.parent.is_dir() else near_path(path.parent)
        name = (
            nearest(path.name, [each.name for each in parent.iterdir()])
            if parent and not path.exists()
            else None
        )
        return parent / name if parent and name else None
    return None


def _json_object(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def unreadable(path: Path, error: OSError) -> RunDirectoryError:
    """Return the error for a directory or a log that the system does not let us read."""
    is_missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
    near = near_path(path) if is_missing else None
    fix = (
        "check the path."
        if is_missing
        else "check its permissions, or run as the user who owns it."
    )
    return RunDirectoryError(
        f"{path} cannot be read ({error.strerror or error})",
        limit="this needs what was recorded",
        fix=f"did you mean {near}?" if near else fix,
        rule="H733",
    )


def all_rings(recordings: Recordings) -> Iterator[tuple[str, Path]]:
    """Yield the folder of each ring of events of a run directory, with what to call it."""
    run = recordings.run
    if (run / SUPERVISOR_FOLDER / EVENTS_FILE).exists():
        yield "supervisor", run / SUPERVISOR_FOLDER
    recorded: list[Event] = []
    for folder, info in recordings.processes():
        rank = f" rank {info.rank}" if info.rank is not None else ""
        yield f"{info.role} {info.pid}{rank}", folder
        recorded += recordings.events(folder)
    for folder in recordings.guards(recorded):
        yield f"guard {folder.name}", folder


def _ranks(run: Path) -> list[Path]:
    try:
        return sorted(
            path for path in (run / "recorder").iterdir() if (path / EVENTS_FILE).exists()
        )
    except OSError:
        return []
