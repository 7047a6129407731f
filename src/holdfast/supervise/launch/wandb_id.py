"""Choose the id under which a W&B run continues in all attempts of a supervised run.

In the training process, ``observe.wandb_run`` makes sure that only one W&B run uses the id.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from holdfast.core.durable import replace_file
from holdfast.core.files import read_file
from holdfast.recorder.run_files import WANDB_VARIABLE

# The file in the run directory that contains the id.
_FILE = "wandb.json"
# If one of these is set, the user or an agent of a W&B sweep has chosen the run.
_CHOSEN_BY_USER = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID")
_ID = re.compile(r"[a-z0-9]{4,64}")


def wandb_variables(environment: Mapping[str, str], run_path: Path) -> dict[str, str]:
    """Return the environment variables with which W&B continues the run of earlier attempts.

    They are empty if the user has chosen the run, or if the id cannot be stored.

    Args:
        environment: The environment of the command.
        run_path: The run directory.
    """
    if any(name in environment for name in _CHOSEN_BY_USER):
        return {}
    file = run_path / _FILE
    run_id = _read(file)
    if run_id is None:
        run_id = uuid.uuid4().hex[:8]
        try:
            replace_file(file, json.dumps({"id": run_id}).encode())
        except OSError:
            # The disk is full. Without a stored id, a later start could not continue the run.
            return {}
    return {"WANDB_RUN_ID": run_id, "WANDB_RESUME": "allow", WANDB_VARIABLE: run_id}


def _read(file: Path) -> str | None:
    """Return the id in a file, or None if the file is missing or damaged."""
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
        run_id = json.loads(read_file(file))["id"]
        if isinstance(run_id, str) and _ID.fullmatch(run_id):
            return run_id
    return None
