"""What happens to processes.

The supervisor, its watchdog and the observer in each process record these.

`attempt` counts from 0. `step` is that of the process that the event is about. See ``events``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from holdfast.core.events.event import EventData

# --- the supervisor
# ------------------------------------------------------------------------


class AttemptStarted(EventData):
    """The command was started."""

    attempt: int
    argv: tuple[str, ...]


class AttemptEnded(EventData):
    """The command ended: its wait status, and who asked for that."""

    attempt: int
    status: int
    oom_kills: int | None
    seconds: float
    steps: int | None
    signal_sent_by_us: int | None
    asked_by: int | None


class ProcessEnded(EventData):
    """A process ended: its wait status, and kills for memory that the kernel counted."""

    pid: int
    status: int
    oom_kills: int | None


class Restart(EventData):
    """The command will be started again, with changes of its environment."""

    attempt: int
    cause: str
    why: str
    delay_seconds: float
    changes: Mapping[str, str]


class Stopped(EventData):
    """The supervisor ended, and why the command is not started again."""

    why: str


class Signal(EventData):
    """A signal came, and was passed on."""

    number: int


class Verdict(EventData):
    """Why an attempt ended, with all of ``verdict.json``, which a full disk may have refused."""

    attempt: int
    verdict: Mapping[str, Any]


class NotWritten(EventData):
    """A file of the run directory could not be written."""

    file: str
    error: str


class OutputLost(EventData):
    """What the command prints is not kept any more."""

    error: str


class Leftovers(EventData):
    """Processes of the command were left when it ended, and were killed."""

    pids: tuple[int, ...]


class NotKillable(EventData):
    """Processes could not be killed: they hang in the kernel."""

    pids: tuple[int, ...]


class EndedElsewhere(EventData):
    """Another host of the same training has ended the attempt."""

    why: str


# --- the watchdog
# ------------------------------------------------------------------------


class HangSuspected(EventData):
    """A process has been in one phase for longer than its limit, in seconds."""

    pid: int
    rank: int | None
    phase: str
    step: int
    seconds: float
    limit: float


class Hang(HangSuspected):
    """A process stands still.

    `hang_kind`, with its `signature`, is how; `blamed_pid` is the process to blame, such as a
    worker or another rank, with the innermost `frame` of user code, or an empty text. `odd_one_out`
    is the rank that others wait for. `remedy` is that of ``explain.hangs.blame``. `files` are the
    stacks that were taken.
    """

    hang_kind: str
    signature: str
    confidence: float
    blamed_pid: int
    blamed_role: str
    frame: str
    odd_one_out: int | None
    sentence: str
    remedy: str
    files: tuple[str, ...] = ()


class HangOver(EventData):
    """A process that stood still goes on, or is gone."""

    pid: int
    phase: str
    step: int
    why: str


class Stacks(EventData):
    """Stacks of a process were written into files of the run directory."""

    pid: int
    files: tuple[str, ...]
    seconds: float


class ProcessStopped(EventData):
    """A signal has stopped a process."""

    pid: int
    rank: int | None
    step: int
    phase: str


class ProcessContinued(EventData):
    """A process that a signal had stopped goes on."""

    pid: int
    step: int
    seconds: float


class WatchdogSuspended(EventData):
    """Nothing ran on this machine for a while: no limit counts it."""

    seconds: float


class WatchingFailed(EventData):
    """A watcher of processes met an error and is off, or the watchdog or the verdict did."""

    what: str
    error: str


class MemoryTrend(EventData):
    """The memory of a process grows with its steps, or no longer (0 bytes a step)."""

    pid: int
    what: str
    bytes_per_step: int
    minutes_left: float | None = None
    between: tuple[int, int] | None = None
    grown_bytes: int = 0
    steps: int = 0
    signature: str | None = None


# --- the observer in each process
# ------------------------------------------------------------------------


class Guard(EventData):
    """A guard in this process records into another run directory."""

    path: str


class TorchImported(EventData):
    """torch was imported."""

    version: str


class EnvironmentsImported(EventData):
    """A package of environments for reinforcement learning was imported, so a loss need not
    measure progress.
    """

    package: str


class ExceptionRaised(EventData):
    """An exception ended a thread, or the process (`fatal`): its text, frames and causes."""

    kind: ClassVar[str] = "exception"
    type: str
    message: str
    frames: Sequence[Any]
    chain: Sequence[Any]
    thread: str
    fatal: bool


class Exiting(EventData):
    """The process ends by itself: how, its exit status, and what it said to `sys.exit`."""

    how: str
    status: int | None
    said: str | None = None


class StepsNotRecorded(EventData):
    """The curves of this process are not recorded."""

    error: str


class ScalarsNotRecorded(EventData):
    """What the script logs of its own is not recorded."""

    error: str


class Leak(EventData):
    """Something grows with every step: what, where it was allocated, and the line that holds it."""

    form: str
    what: str
    count_per_step: float
    bytes_per_step: int
    device: str
    held_by: str
    retained_at: str
    signature: str


class LeakTrace(EventData):
    """A search for leaks ended, of so many steps.

    It was asked for by the request of this number.
    """

    found: int
    steps: int
    request: int
    seconds: float | None = None
    why: str = ""
