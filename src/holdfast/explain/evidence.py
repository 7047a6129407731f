"""The records that hold the evidence for a verdict, such as statements, endings and events.

`collecting` fills in an `Evidence` from a run directory or from a bare log. `judging` turns it into
a verdict.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from holdfast.core.events.event import Event

# This pattern is matched against ``file:function`` and recognizes code that the user did not write:
# installed packages, Python's standard library, torch and holdfast. Frozen modules have a name such
# as ``<frozen runpy>`` in place of a file. ``<string>:__init__`` is a method that `dataclass`
# generated.
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
    """A text that a process printed, or an exception that it raised."""

    # The message of an exception, which may have several lines, or one line of a log. Escape
    # sequences are removed.
    text: str
    # "exception" if the log has a traceback or the observer recorded the exception, else "line".
    kind: Literal["exception", "line"] = "line"
    # Class of the exception, without its module.
    exception: str | None = None
    # The frames of the traceback, innermost frame last.
    frames: tuple[Frame, ...] = ()
    # Where the text was found, such as ``"train.log:1041"`` or ``"process 4711"``.
    source: str = ""
    # The position of the statement in its source: the line number in a log, otherwise an index.
    position: int = 0
    unix_seconds: float | None = None
    rank: int | None = None
    pid: int | None = None
    # True if this exception, or the failure that this line reports, ended the process. False if it
    # was caught or only logged. None if unknown.
    fatal: bool | None = None
    # Whether this exception led to another exception, which makes it more likely to be the root.
    cause: bool = False
    # Whether a logger printed this exception. In that case, some code caught the exception, but may
    # have raised it again.
    logged: bool = False
    # Whether lines that show progress follow this statement. They may have been delayed in a
    # buffer, or another process may have printed them.
    overtaken: bool = False
    # Whether the process printed a retry or progress before its next exception.
    resumed: bool = False
    # For a traceback: whether no later line shows that the run continued, saved or finished. For a
    # line: whether it is the last line of the log.
    last: bool = False
    # The rule id, such as ``"H401"``, if the source recorded one.
    rule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process, or the whole command, ended."""

    # Exit code, or the negated number of a signal. None if the process is still running or its
    # status is unknown.
    status: int | None
    # The PID of the process, or None for the whole command.
    pid: int | None = None
    rank: int | None = None
    # A `ProcessInfo.role`, or "command" for the command that the supervisor started.
    role: str = "other"
    unix_seconds: float | None = None
    # How many processes of its control group the kernel killed for lack of memory while this
    # process ran (the rise of the ``oom_kill`` counter). None if unknown.
    oom_kills: int | None = None
    # Who sent the signal that ended the process: "user", "supervisor" or "scheduler". None if
    # unknown.
    sent_by: str | None = None
    # Last phase of the process, in lower case.
    phase: str | None = None
    # Number of steps that the process completed.
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LostTraining:
    """How a training run diverged: its loss or gradients exploded or became NaN for good."""

    # The values that diverged.
    what: Literal["loss", "gradients"]
    # Step of the first bad value, or its line number if `log` is set.
    since: int
    # Whether every value was bad from the beginning.
    always: bool = False
    # For a finite loss that exploded: its best level and its newest value.
    rose: tuple[float, float] | None = None
    # False if the loss only ended far above its first values, which may be legitimate.
    exploded: bool = True
    # The name of the log that contains the values; empty if they come from recorded steps.
    log: str = ""

    def sentence(self) -> str:
        """Return a clause for use within a sentence, without a capital letter or a period."""
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
    """Whether the loss of a run fell (divergence is described by `LostTraining`).

    Attributes:
        outcome: ``"fell"``; ``"flat"``; ``"rose"`` if the loss rose without diverging;
            ``"spiked"`` if it rose a thousandfold, even if it recovered; or ``"unclear"`` if the
            loss does not measure progress or is too noisy.
        first: The level of the loss at the beginning.
        last: The level of the loss at the end, or the peak of a spike.
        step: The step of the spike.
        constant: For a flat loss, whether the loss never changed.
        reason: Why the outcome is unclear, as a clause for use within a sentence.
    """

    outcome: Literal["fell", "flat", "rose", "spiked", "unclear"]
    first: float = math.nan
    last: float = math.nan
    step: int | None = None
    constant: bool = False
    reason: str = ""

    def sentence(self) -> str:
        """Return a clause for use within a sentence, without a capital letter or a period."""
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
    """How long the steps of a run waited for the loader.

    Attributes:
        share: The fraction of the steps' duration that was spent waiting, from 0 to 1.
        seconds: The total waiting time.
        steps: The number of steps. The first step of each process does not count.
    """

    share: float
    seconds: float
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardClosing:
    """How a Guard closed: the evidence for how a run ended if there is no exit status.

    Attributes:
        how: ``"finished"``; ``"stopped"`` if a stop was requested; ``"left"`` if the script left
            the loop early.
        reason: Who or what requested the stop, such as ``"SIGTERM"``; empty if not recorded.
    """

    how: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorLoss:
    """A killed supervisor, as noticed by its sentinel, which then killed the run's processes.

    Attributes:
        killed_processes: How many processes the sentinel killed.
        unix_seconds: When the sentinel noticed that the supervisor was gone.
    """

    killed_processes: int
    unix_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All evidence about one attempt of a run, or about a run of which only a log exists."""

    # The directory or log that was read, such as ``"runs/last"`` or ``"train.log"``.
    source: str = ""
    # Clauses that name evidence that could not be read or was not recorded.
    missing: tuple[str, ...] = ()

    # Exceptions and log lines from all sources, in the order in which they appeared.
    statements: tuple[Statement, ...] = ()
    # How the command and its processes ended.
    endings: tuple[Ending, ...] = ()
    # Events of the supervisor, the processes and the guards, sorted by time.
    events: tuple[Event, ...] = ()
    # The restarts that led to this attempt and the remedies that guards applied, one clause each.
    tried: tuple[str, ...] = ()
    # Environment variables that restarts set for this attempt.
    applied_changes: Mapping[str, Any] = field(default_factory=dict)

    # How the training diverged. None if it did not, or if there are no losses to tell.
    lost: LostTraining | None = None
    # Whether the loss fell. None if this was not judged; only judged after exit status 0.
    learning: Learning | None = None
    # How long steps waited for data. None if unknown; only measured after exit status 0.
    loader_wait: LoaderWait | None = None
    # Number of losses in the output. Only counted if a log is the only evidence.
    printed_losses: int = 0

    # Number of steps that the training process completed, and its last phase in lower case.
    steps: int | None = None
    phase: str | None = None
    # Whether at least one process of a supervised run was observed. None if there is no supervisor.
    observed: bool | None = None
    # Whether a process loaded torch but no step was recorded and no loss was printed.
    made_no_step: bool = False

    # Signal with which the user asked `holdfast run` to stop.
    stop_signal: int | None = None
    # How the trainer exited, "sys.exit" or "os._exit", if the script chose the exit code.
    exit_call: str | None = None
    # The message that the trainer passed to `sys.exit`.
    exit_message: str = ""
    # The last output line of a command that failed, ignoring progress bars.
    last_output_line: str = ""
    # Whether one of the last output lines says that training is done.
    output_says_done: bool = False

    # PIDs of processes of the run that are still running.
    living_pids: tuple[int, ...] = ()
    supervisor_loss: SupervisorLoss | None = None
    guard_closing: GuardClosing | None = None


def is_user_code(frame: Frame) -> bool:
    """Return whether a frame is in the user's code, not in Python, a package or holdfast."""
    return _FOREIGN.search(f"{frame.file}:{frame.function}") is None


def innermost_user_frame(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame in the user's code, or the innermost frame if there is none.

    Args:
        frames: The frames of a traceback, innermost last; at least one.
    """
    for frame in reversed(frames):
        if is_user_code(frame):
            return frame
    return frames[-1]


def library_file(frame: Frame) -> str:
    """Return a library file's path from its package on, such as ``"torch/nn/functional.py"``."""
    return _INSTALLED.sub("", frame.file)
