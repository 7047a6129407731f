"""The evidence on which a verdict rests: texts, ends of processes and events, each with its source.

`collecting` gathers an `Evidence` from a run directory or from a bare log; `judging` turns it into
a verdict. Nothing in this module judges.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from holdfast.core.events.event import Event

# Searched in ``file:function``. Matches the code that a user did not write: installed packages,
# Python's library, torch and holdfast. A frozen module has no file, and ``<string>:__init__`` is a
# method that `dataclass` generated.
_FOREIGN = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/(?:python|pypy)\d|^<(?!string>|stdin>|ipython)|^<string>:__|/tqdm/"
    r"|/torch/(?:nn|utils|optim|distributed|autograd|_ops|_tensor)|(?:^|/)runpy\.py:"
    r"|/holdfast/(?:guard|loader|forecast|memory|numerics|learning|checkpoint|supervise|recorder|core|integrations)/"
)
_INSTALLED = re.compile(r"^.*/(?:(?:site|dist)-packages|lib(?:64)?/(?:python|pypy)[\d.]+)/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One frame of a traceback."""

    file: str
    line: int
    function: str
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One text that a process printed or raised."""

    # The message of an exception, which may have several lines, or one line of a log. Escape
    # sequences are removed.
    text: str
    # "exception" if there was a traceback or the observer recorded it, otherwise "line".
    kind: Literal["exception", "line"] = "line"
    # Class of the exception, without its module.
    exception: str | None = None
    # Of the traceback, the innermost last.
    frames: tuple[Frame, ...] = ()
    # Where the text was found, such as ``"train.log:1041"`` or ``"process 4711"``.
    source: str = ""
    # Place in the order of its source; of a log the number of the line.
    position: int = 0
    unix_seconds: float | None = None
    rank: int | None = None
    pid: int | None = None
    # Whether it ended its process. False: it was caught or logged. None: unknown.
    fatal: bool | None = None
    # Whether another exception was raised from it, which makes it nearer to the root.
    cause: bool = False
    # Whether a logger printed it, so that some code had caught it, at least for a while.
    logged: bool = False
    # Whether lines of progress follow it. They may have waited in a buffer, or belong to another
    # process.
    overtaken: bool = False
    # Whether a line of a retry or of progress separates it from the next exception of its process.
    resumed: bool = False
    # Of a traceback: no later line says that the run continued, was saved or is done.
    # Of a line: it is the last one of the log.
    last: bool = False
    # Rule of holdfast such as ``"H401"``, if whoever recorded the text knew it.
    rule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one process, or the whole command, ended."""

    # Exit code, negative for a signal. None: it has not ended, or nobody knows.
    status: int | None
    # None: this is the whole command.
    pid: int | None = None
    rank: int | None = None
    # A `ProcessInfo.role`, or "command" for what the supervisor started.
    role: str = "other"
    unix_seconds: float | None = None
    # How far the counter ``oom_kill`` of the control group rose meanwhile; None if unknown.
    oom_kills: int | None = None
    # Who sent the signal that ended it: "user", "supervisor", "scheduler", or None if unknown.
    sent_by: str | None = None
    # Last phase of the process, in lower case.
    phase: str | None = None
    # Steps that the process had made.
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The training was lost before the run ended: its loss or gradients never recovered."""

    # The values that show it.
    what: Literal["loss", "gradients"]
    # Step of the first bad value, or its line if `log` is set.
    since: int
    # Whether there was never a good value.
    always: bool = False
    # Best level and newest value of a finite loss that exploded.
    rose: tuple[float, float] | None = None
    # False for a loss that merely ended far above where it began, which need not be a failure.
    exploded: bool = True
    # Name of the log that shows it; empty if the recorded steps show it.
    log: str = ""

    def sentence(self) -> str:
        """Return this as a clause without a capital letter and without a full stop."""
        since = f"since step {self.since}"
        if self.log:
            since = f"since line {self.since} of {self.log}"
        if self.rose is not None:
            best, newest = self.rose
            return f"the loss diverged: it rose from {best:.3g} to {newest:.3g}, {since}"
        subject = "the loss is"
        if self.what == "gradients":
            subject = "the gradients are"
        if self.always:
            since = "from the beginning"
        return f"{subject} not finite {since}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Whether the loss of a run fell, for a run whose loss did not diverge.

    Attributes:
        outcome: ``"fell"``; ``"flat"``; ``"rose"``, by less than a loss that diverged;
            ``"spiked"``, a thousandfold, even if it came back; or ``"unclear"``, if the loss does
            not measure progress or is too noisy.
        first: The level at the beginning.
        last: The level at the end, or the peak of a spike.
        step: The step of the spike.
        constant: For a flat loss, whether it never changed.
        reason: Why the outcome is unclear, as a clause without a capital letter and full stop.
    """

    outcome: Literal["fell", "flat", "rose", "spiked", "unclear"]
    first: float = math.nan
    last: float = math.nan
    step: int | None = None
    constant: bool = False
    reason: str = ""

    def sentence(self) -> str:
        """Return this as a clause without a capital letter and without a full stop."""
        if self.outcome == "unclear":
            return self.reason
        if self.outcome == "spiked":
            rise = f"it rose from {self.first:.3g} to {self.last:.3g}, at step {self.step}"
            return f"the loss diverged: {rise}"
        if self.constant:
            return f"the loss did not fall: it was {self.last:.3g} at every step"
        verb = {"fell": "fell", "rose": "rose", "flat": "did not fall"}[self.outcome]
        return f"the loss {verb}: {self.first:.4g} at the beginning, {self.last:.4g} at the end"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWait:
    """How long the steps of a run waited for their loader.

    Attributes:
        share: The share of the time of these steps, from 0 to 1.
        seconds: The total time.
        steps: The number of steps, without the first one of each process.
    """

    share: float
    seconds: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardClosing:
    """How a Guard closed, where nothing else recorded the end of the run.

    Attributes:
        how: ``"finished"``; ``"stopped"`` on request; or ``"left"``, by a loop that broke off.
        reason: Of a stop, what requested it, such as ``"SIGTERM"``; empty if that is not recorded.
    """

    how: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorLoss:
    """The supervisor itself was killed, and its sentinel cleaned up after it.

    Attributes:
        killed_processes: How many processes the sentinel killed.
        unix_seconds: When the sentinel noticed.
    """

    killed_processes: int
    unix_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that is known about one attempt of a run, or about the run of a bare log."""

    # What it was collected from, such as ``"runs/last"`` or ``"train.log"``.
    source: str = ""
    # What could not be had, one clause each, such as "no exit status: only a log".
    missing: tuple[str, ...] = ()

    # Texts of all sources, in the order in which they were seen.
    statements: tuple[Statement, ...] = ()
    # Of the command and of its processes.
    endings: tuple[Ending, ...] = ()
    # Of the supervisor, the processes and the guards, by time.
    events: tuple[Event, ...] = ()
    # Why earlier attempts were restarted and what guards did against trouble, one clause each.
    tried: tuple[str, ...] = ()
    # Environment variables that restarts set for this attempt.
    applied_changes: Mapping[str, Any] = field(default_factory=dict)

    # None: the training was not lost, or nobody knows.
    lost: Lost | None = None
    # Only of a run that ended with status 0. None: it was not judged.
    learning: Learning | None = None
    # Only of a run that ended with status 0. None: unknown.
    loader_wait: LoaderWait | None = None
    # How many losses its output shows; counted in a bare log only.
    printed_losses: int = 0

    # Steps that the training process had made, and the phase it was in, in lower case.
    steps: int | None = None
    phase: str | None = None
    # Whether a process of a supervised run could be observed. None: it was not supervised.
    observed: bool | None = None
    # Whether a process loaded torch, and neither a step nor a printed loss was seen.
    made_no_step: bool = False

    # Signal with which the user asked `holdfast run` to stop.
    stop_signal: int | None = None
    # How a process left that ended with an exit code of its own: "sys.exit" or "os._exit".
    exit_call: str | None = None
    # The message that it passed to `sys.exit`.
    exit_message: str = ""
    # The last line of the output of a command that failed, without progress bars.
    last_output_line: str = ""
    # Whether the last lines of the output say that the training is done.
    output_says_done: bool = False

    # Processes of the run that are still alive.
    living_pids: tuple[int, ...] = ()
    supervisor_loss: SupervisorLoss | None = None
    guard_closing: GuardClosing | None = None


def is_own_code(frame: Frame) -> bool:
    """Return whether a frame is the user's own code: not Python's, a package's or holdfast's."""
    return _FOREIGN.search(f"{frame.file}:{frame.function}") is None


def own_frame(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame of the user's own code, or the innermost frame if none is.

    `frames` has at least one frame.
    """
    for frame in reversed(frames):
        if is_own_code(frame):
            return frame
    return frames[-1]


def library_file(frame: Frame) -> str:
    """Return the path of a library's file from its package on: ``"torch/nn/functional.py"``."""
    return _INSTALLED.sub("", frame.file)
