"""The RUN_DIR argument of the commands that read a guard's run directory.

This module does not import torch.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from holdfast.checkpoint.store import Store
from holdfast.core.errors import RunDirectoryError
from holdfast.explain.runs.recordings import open_recordings

GuardDirectory = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run directory that was passed to Guard.")
]


def open_store(run_dir: Path) -> Store:
    """Return the checkpoint store in a guard's run directory.

    Raises:
        RunDirectoryError: H731 if the directory was not written by a guard. If it was written by
            `holdfast run`, the error names the run directories of the guards in that run.
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
    """Return the shell-quoted run directories of all guards that ran under `holdfast run`.

    Raises:
        RunDirectoryError: H731 if the directory was not written by `holdfast run`.
    """
    recordings = open_recordings(run_dir)
    events = []
    for folder, _process in recordings.processes():
        events.extend(recordings.events(folder))
    # A guard records to recorder/rankN in its run directory, which is therefore two levels up.
    directories = {folder.parent.parent for folder in recordings.guards(events)}
    return sorted(shlex.quote(str(directory)) for directory in directories)
