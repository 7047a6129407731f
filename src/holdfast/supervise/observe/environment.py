"""The environment that makes the Python processes of a command observe themselves.

Does not: start anything (``supervise.launching`` does).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from holdfast.recorder.run_files import ATTEMPT_VARIABLE, OBSERVE_VARIABLE

INJECTED = Path(__file__).parents[1] / "injected"
_PATH = "PYTHONPATH"


def observing(environment: Mapping[str, str], run: Path, attempt: int) -> dict[str, str]:
    """Return an environment in which every Python process, children included, records into a run directory.

    Args:
        environment: Of the command; its ``PYTHONPATH`` comes after ours. Not changed.
        run: The run directory, which exists.
        attempt: Which attempt of the supervisor this is, from 0.
    """
    ours = str(INJECTED)
    theirs = [entry for entry in environment.get(_PATH, "").split(os.pathsep) if entry != ours]
    if theirs == [""]:
        theirs = []  # unset or empty: nothing, whereas an empty entry among others is the current directory
    return {
        **environment,
        _PATH: os.pathsep.join([ours, *theirs]),
        OBSERVE_VARIABLE: str(run.absolute()),
        ATTEMPT_VARIABLE: str(attempt),
    }
