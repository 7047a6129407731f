"""The plan of one attempt: which fault its processes meet, and when.

`fault_plans` makes it, `trials` writes it into the trace folder of the attempt, and `injector`
reads it in every Python process of the command.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

# Files in the trace folder of an attempt.
# The plan.
PLAN_FILE = "plan.json"
# The PID of the command.
COMMAND_FILE = "command.pid"
# The PID of the process with the fault. The file is created when the fault is injected.
MET_FILE = "met"


class Moment(StrEnum):
    """When a fault happens; each moment is counted (see `Injection.count`)."""

    BACKWARD = "backward"
    BEFORE_STEP = "before"
    AFTER_STEP = "after"
    LOADER = "loader"
    FORWARD = "forward"
    EVALUATION = "eval"
    SAVE_BEGINS = "save begins"
    SAVE_ENDS = "save ends"


class Action(StrEnum):
    """What the injector does at the planned moment. `Injector` says how."""

    SIGKILL = "SIGKILL"
    SIGSTOP = "SIGSTOP"
    SIGTERM = "SIGTERM"
    USE_UP_MEMORY = "memory"
    FILL_DISK = "disk"
    FAIL_WRITE = "EIO"
    CUT_WRITE = "cut write"
    CUT_CONNECTIONS = "cut off"
    PUT_NAN = "nan"
    KILL_WORKER = "worker killed"
    STOP_WORKER = "worker stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """What happens to the processes of one attempt; by default nothing.

    Args:
        action: What the injector does; None if nothing happens at a particular moment.
        moment: When it happens.
        count: Number of steps that the process has made by then, or number of the save or
            evaluation.
        rank: The rank on which it happens.
        later_seconds: Seconds from the fault to its end: a stopped process is resumed, and a
            command that was asked to exit is killed.
        size_bytes: Size past which no file may grow.
        errno: Error with which writes or reads fail; None if none fails.
        refuse_once: Whether only the first such write or read fails.
        unreadable_file: File whose reads fail.
        clock_shift_seconds: Shift of the clock in every process, from its start.
        reseeded: Name of a random generator that is set to another state after the first step.
    """

    action: Action | None = None
    moment: Moment | None = None
    count: int = 0
    rank: int = 0
    later_seconds: float = math.inf
    size_bytes: int | None = None
    errno: int | None = None
    refuse_once: bool = False
    unreadable_file: str | None = None
    clock_shift_seconds: int = 0
    reseeded: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """Everything that the processes of one attempt need to know.

    Args:
        injection: The fault.
        trial_began: Unix time at which the trial began: newer files were written by the script.
        writable_folders: Folders in which the script may write.
    """

    injection: Injection
    trial_began: float
    writable_folders: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Write the plan into the trace folder of its attempt."""
        (folder / PLAN_FILE).write_text(json.dumps(asdict(self)))


def read_plan(folder: Path) -> AttemptPlan:
    """Return the plan that was written into the trace folder of an attempt."""
    values = json.loads((folder / PLAN_FILE).read_bytes())
    injection = values["injection"]
    for name, kind in (("action", Action), ("moment", Moment)):
        if injection[name] is not None:
            injection[name] = kind(injection[name])
    return AttemptPlan(
        injection=Injection(**injection),
        trial_began=values["trial_began"],
        writable_folders=tuple(values["writable_folders"]),
    )
