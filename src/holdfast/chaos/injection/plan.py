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
# The plan of the attempt.
PLAN_FILE = "plan.json"
# The PID of the command.
COMMAND_FILE = "command.pid"
# The PID of the process into which the fault was injected. The file is created just before the
# injection.
MET_FILE = "met"
# An empty file, which is created when the changes that a save makes to files are no longer watched.
WATCH_ENDED_FILE = "watch ended"


class Moment(StrEnum):
    """The kinds of moments at which a fault can be injected.

    `Injection.count` selects one moment of a kind.
    """

    BACKWARD = "backward"
    BEFORE_STEP = "before"
    AFTER_STEP = "after"
    LOADER = "loader"
    FORWARD = "forward"
    EVALUATION = "eval"
    SAVE_BEGINS = "save begins"
    SAVE_ENDS = "save ends"


class Action(StrEnum):
    """The actions that the injector can perform at the planned moment; see `Injector`."""

    SIGKILL = "SIGKILL"
    SIGSTOP = "SIGSTOP"
    SIGTERM = "SIGTERM"
    USE_UP_MEMORY = "memory"
    FILL_DISK = "disk"
    FAIL_WRITE = "EIO"
    CUT_WRITE = "cut write"
    WATCH_CHANGES = "watch changes"
    CUT_CONNECTIONS = "cut off"
    PUT_NAN = "nan"
    KILL_WORKER = "worker killed"
    STOP_WORKER = "worker stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """What to inject into the processes of one attempt; by default nothing.

    Args:
        action: The action to perform at the planned moment; None for no action.
        moment: The kind of moment at which to act.
        count: The number of steps that the process has taken at that moment. For a save or an
            evaluation, the number of this save or evaluation, counted from 1.
        rank: The rank on which to act.
        later_seconds: The number of seconds after which the fault ends: a stopped process is
            continued, or a command that was asked to exit is killed.
        size_bytes: The size beyond which no file can grow; None for no limit.
        errno: The error number with which writes or reads fail; None if they do not fail.
        refuse_once: Whether only the first affected write or read fails.
        unreadable_file: The file whose reads fail, or None.
        change_number: With `Action.WATCH_CHANGES`, the number of the system call before which the
            process is killed, counted from 1 among the calls by which the save changes files. None
            only lists these calls.
        clock_shift_seconds: By how much the clock is shifted in every process of the attempt.
        reseeded: The name of a random generator to reseed after the first step, or None.
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
    change_number: int | None = None
    clock_shift_seconds: int = 0
    reseeded: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """The information that the observer needs in each process of an attempt.

    Args:
        injection: What to inject into the process.
        trial_began: The Unix time at which the trial began. Newer files were written by the script.
        writable_folders: The folders that the script may write to.
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
