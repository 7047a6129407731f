"""Choose the ID under which a W&B run continues in all attempts of a supervised run.

In the training process, ``observe.wandb_run`` makes sure that only one W&B run uses the ID.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from holdfast.core.durable import replace_file
from holdfast.core.files import make_folder, read_file
from holdfast.recorder.run_files import TRACKER_FOLDER, WANDB_VARIABLE

# The file in the run directory that contains the ID.
_FILE = "wandb.json"
# If one of these variables is set, the user or the agent of a W&B sweep has chosen the run.
_CHOSEN_BY_USER = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID")
_ID = re.compile(r"[a-z0-9]{4,64}")
# W&B writes what a run has logged to a file at this interval. In offline mode, whatever is not in
# the file when the process is killed is lost. W&B's default is 15 s.
_FLUSH_VARIABLE = "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL"
_FLUSH_SECONDS = "0.2"


def wandb_variables(environment: Mapping[str, str], run_path: Path) -> dict[str, str]:
    """Return the environment variables with which W&B continues the run of earlier attempts.

    The run is not continued if the user has chosen one, or if its ID cannot be stored.

    Args:
        environment: The environment of the command.
        run_path: The run directory.
    """
    variables = {_FLUSH_VARIABLE: environment.get(_FLUSH_VARIABLE, _FLUSH_SECONDS)}
    if any(name in environment for name in _CHOSEN_BY_USER):
        return variables
    run_id = _read_or_choose_id(run_path)
    if run_id is not None:
        variables["WANDB_RUN_ID"] = run_id
        variables["WANDB_RESUME"] = "allow"
        variables[WANDB_VARIABLE] = run_id
    return variables


def _read_or_choose_id(run_path: Path) -> str | None:
    """Return the ID of the W&B run, or None if it can be neither read nor stored."""
    file = run_path / TRACKER_FOLDER / _FILE
    run_id = _read_id(file)
    if run_id is not None:
        return run_id
    run_id = uuid.uuid4().hex[:8]
    try:
        make_folder(run_path, TRACKER_FOLDER)
        replace_file(file, json.dumps({"id": run_id}).encode())
    except OSError:
        # The disk is full. Without a stored ID, a later start could not continue the run.
        return None
    return run_id


def _read_id(file: Path) -> str | None:
    """Return the ID in a file, or None if the file is missing or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        run_id = json.loads(read_file(file))["id"]
        if isinstance(run_id, str) and _ID.fullmatch(run_id):
            return run_id
    return None
