"""The plan of one attempt: which fault to inject into its processes, and when.

`fault_plans` creates the plan, `trials` writes it into the trace folder of the attempt, and
`injector` reads it in every Python process of the command.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

# Files in the trace folder of an attempt:
# The plan.
PLAN_FILE = "plan.json"
# The PID of the command.
COMMAND_FILE = "command.pid"
# The PID of the process into which the fault was injected. The file is created at that moment.
MET_FILE = "met"


class Moment(StrEnum):
    """A kind of moment at which a fault can happen; `Injection.count` says which occurrence."""

    BACKWARD = "backward"
    BEFORE_STEP = "before"
    AFTER_STEP = "after"
    LOADER = "loader"
    FORWARD = "forward"
    EVALUATION = "eval"
    SAVE_BEGINS = "save begins"
    SAVE_ENDS = "save ends"


class Action(StrEnum):
    """What the injector does at the planned moment; `Injector` implements these actions."""

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
    """What to inject into the processes of one attempt; by default nothing.

    Args:
        action: What to do at the planned moment; None for nothing.
        moment: The kind of moment at which to act.
        count: Number of steps that the process has made at that moment. For a save or an
            evaluation, the number of this save or evaluation.
        rank: The rank on which to act.
        later_seconds: Seconds after which the fault ends: a stopped process is continued, or a
            command that was asked to exit is killed.
        size_bytes: Size beyond which no file can grow; None for no limit.
        errno: Error number with which writes or reads fail; None if they do not fail.
        refuse_once: Whether only the first such write or read fails.
        unreadable_file: File whose reads fail, or None.
        clock_shift_seconds: Shift of the clock in every process of the attempt.
        reseeded: Name of a random generator to reseed after the first step, or None.
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
    """The information that the observer needs in each process of an attempt.

    Args:
        injection: What to inject.
        trial_began: Unix time at which the trial began. Newer files were written by the script.
        writable_folders: Folders that the script may write to.
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
