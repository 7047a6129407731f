"""The argument of commands that read a guard's run directory. Does not import torch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from holdfast.checkpoint.store import Store
from holdfast.core.errors import RunDirectoryError
from holdfast.explain.runs.recordings import open_recordings

GuardDirectory = Annotated[
    Path, typer.Argument(metavar="RUN_DIR", help="The run directory that was passed to Guard.")
]


def open_store(run_dir: Path) -> Store:
    """Open the checkpoints of a guard's run directory.

    Raises:
        RunDirectoryError: H731 if the directory is not a guard's. If it is a directory of `holdfast
            run`, the error names the guards' directories.
    """
    store = Store(run_dir / "checkpoints")
    if store.directory.is_dir() or (run_dir / "recorder").is_dir():
        return store
    fix = f"the run had no Guard. `holdfast explain {run_dir}` shows how it ended."
    guard_directories = _guard_directories_of_run(run_dir)
    if guard_directories:
        fix = f"pass {' or '.join(guard_directories)}."
    raise RunDirectoryError(
        f"{run_dir} is a directory of `holdfast run`, not of a Guard",
        limit="checkpoints and quarantined samples are in the directory that was passed to Guard",
        fix=fix,
        rule="H731",
    )


def _guard_directories_of_run(run_dir: Path) -> list[str]:
    """Return the run directories of all guards in a run of `holdfast run`, quoted for a shell.

    Raises:
        RunDirectoryError: H731 if the directory is not one of `holdfast run`.
    """
    recordings = open_recordings(run_dir)
    events = []
    for folder, _process in recordings.processes():
        events.extend(recordings.events(folder))
    # A guard records in the subdirectory recorder/rankN of its run directory.
    directories = {folder.parent.parent for folder in recordings.guards(events)}
    return sorted(shlex.quote(str(directory)) for directory in directories)
