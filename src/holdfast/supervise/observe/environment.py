"""The environment that makes the Python processes of a command observe themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from holdfast.recorder.run_files import ATTEMPT_VARIABLE, OBSERVE_VARIABLE

INJECTED = Path(__file__).parents[1] / "injected"


def observing(environment: Mapping[str, str], run: Path, attempt: int) -> dict[str, str]:
    """Return an environment in which every Python process, children included, records into a run directory.

    Args:
        environment: Of the command; its ``PYTHONPATH`` comes after ours. Not changed.
        run: The run directory, which exists.
        attempt: Which attempt of the supervisor this is, from 0.
    """
    theirs = environment.get("PYTHONPATH", "")  # if empty nothing, whereas an empty entry is the current directory
    entries = [entry for entry in theirs.split(os.pathsep) if entry != str(INJECTED)] if theirs else []
    path = os.pathsep.join([str(INJECTED), *entries])
    ours = {"PYTHONPATH": path, OBSERVE_VARIABLE: str(run.absolute()), ATTEMPT_VARIABLE: str(attempt)}
    return {**environment, **ours}
