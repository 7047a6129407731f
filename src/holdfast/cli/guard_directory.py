"""The argument of the commands about a guard's run directory, and its checkpoints. No torch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from holdfast.checkpoint.store import Store
from holdfast.core.errors import RunDirectoryError
from holdfast.explain.runs.recordings import open_recordings

GuardDirectory = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="The directory that was given to Guard.")
]


def open_store(run_dir: Path) -> Store:
    """Return the checkpoints of a guard's run directory.

    Raises:
        RunDirectoryError: H731 if it is not one, with the directories of the guards if it is that
            of a run of `holdfast run`.
    """
    store = Store(run_dir / "checkpoints")
    if store.directory.is_dir() or (run_dir / "recorder").is_dir():
        return store
    fix = f"there was no Guard. `holdfast explain {run_dir}` says how it ended."
    guard_directories = _guard_directories_of_run(run_dir)
    if guard_directories:
        fix = f"pass {' or '.join(guard_directories)}."
    raise RunDirectoryError(
        f"{run_dir} is a directory of `holdfast run`, not of a Guard",
        limit="checkpoints and quarantined samples are in the directory that was given to Guard",
        fix=fix,
        rule="H731",
    )


def _guard_directories_of_run(run_dir: Path) -> list[str]:
    """Return the directories of the guards in a run of `holdfast run`, quoted for a shell.

    Raises:
        RunDirectoryError: H731 if it is no such run.
    """
    recordings = open_recordings(run_dir)
    events = []
    for folder, _process in recordings.processes():
        events.extend(recordings.events(folder))
    # A guard records in the folder recorder/rankN of its directory.
    directories = {folder.parent.parent for folder in recordings.guards(events)}
    return sorted(shlex.quote(str(directory)) for directory in directories)
