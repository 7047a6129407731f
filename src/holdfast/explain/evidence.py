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
from holdfast.explain.flight_finding import FlightFinding
from holdfast.explain.speed_finding import SpeedFinding

# This pattern is searched for in ``file:function`` and recognizes code that the user did not write:
# installed packages, Python's standard library, torch and holdfast. The file of a frozen module is
# a name such as ``<frozen runpy>``. ``<string>:__init__`` is a method that `dataclass` generated.
_FOREIGN = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/(?:python|pypy)\d|^<(?!string>|stdin>|ipython)|^<string>:__|/tqdm/"
    r"|/torch/(?:nn|utils|optim|distributed|autograd|_ops|_tensor)|(?:^|/)runpy\.py:"
)
# The parts of holdfast that run in the process of a training loop.
_HOLDFAST = re.compile(
    r"/holdfast/(?:guard|loader|forecast|memory|numerics|learning|checkpoint|supervise|recorder|core|integrations)/"
)
_INSTALLED = re.compile(r"^.*/(?:(?:site|dist)-packages|lib(?:64)?/(?:python|pypy)[\d.]+)/")


# The entry of `Evidence.missing` for a log whose exit status is not known.
NO_STATUS = "the exit status of the command: `--status N`, or `--status 0` if it succeeded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One frame of a traceback."""

    file: str
    line: int
    function: str
    code: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A message that a process printed, or an exception that it raised."""

    # The message of an exception, which may have several lines, or a single line of a log. Escape
    # sequences have been removed.
    text: str
    # "exception" if the log has a traceback or the observer recorded the exception, else "line".
    kind: Literal["exception", "line"] = "line"
    # The class name of the exception, without its module.
    exception: str | None = None
    # The frames of the traceback, with the innermost frame last.
    frames: tuple[Frame, ...] = ()
    # Where the text was found, such as ``"train.log:1041"`` or ``"process 4711"``.
    source: str = ""
    # The position of the statement in its source: the line number in a log, or the index of the
    # statement in any other source.
    position: int = 0
    unix_seconds: float | None = None
    rank: int | None = None
    pid: int | None = None
    # True if this exception, or the failure that this line reports, ended the process. False if the
    # exception was caught or only logged. None if unknown.
    fatal: bool | None = None
    # Whether this exception led to another exception, which makes it more likely to be the root
    # cause.
    led_to_another: bool = False
    # Whether the script raised this exception on purpose, with a `raise` statement, while it was
    # handling the previous one of its chain. Its message then says more than the first one.
    replaces_previous: bool = False
    # Whether a logger printed this exception. If so, some code caught the exception, although it
    # may have raised the exception again.
    logged: bool = False
    # Whether lines that show progress follow this statement. These lines do not prove that the run
    # continued: a buffer may have delayed them, or another process may have printed them.
    followed_by_progress: bool = False
    # Whether the process printed a retry or progress before its next exception.
    continued_before_next: bool = False
    # For a traceback: True if no later line shows that the run continued, saved a checkpoint or
    # finished. For a line: True if it is the last line of the log.
    ends_output: bool = False
    # The id of the rule that reported this failure, such as ``"H401"``, if the source recorded one.
    rule: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process or the supervised command ended."""

    # The exit code, or the negated signal number. None if the process is still running or its
    # status is unknown.
    status: int | None
    # The PID of the process, or None for the whole command.
    pid: int | None = None
    rank: int | None = None
    # A `ProcessInfo.role`, or "command" for the command that the supervisor started.
    role: str = "other"
    unix_seconds: float | None = None
    # How many processes in its control group the kernel killed for lack of memory while this
    # process ran (the increase in the ``oom_kill`` counter). None if unknown.
    oom_kills: int | None = None
    # Who sent the signal that ended the process: "user", "supervisor" or "scheduler". None if
    # unknown.
    sent_by: str | None = None
    # The last phase of the process in lower case, such as "data wait".
    phase: str | None = None
    # Number of steps that the process completed.
    step: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """How a training run diverged: its loss exploded, or its loss or gradients became NaN or Inf.

    A run that recovered has not diverged.
    """

    # The values that diverged.
    quantity: Literal["loss", "gradients"]
    # The step of the first bad value, or the line number of that value if `log` is set.
    since: int
    # Whether every value was bad from the beginning.
    always: bool = False
    # For a finite loss that exploded: its lowest level and its newest value.
    rose: tuple[float, float] | None = None
    # False if the loss merely ended far above its first values, which may be intended.
    exploded: bool = True
    # The name of the log that contains the values; empty if they come from recorded steps.
    log: str = ""

    def clause(self) -> str:
        """Return a clause for use within a sentence, without a capital letter or a period."""
        since = f"since step {self.since}"
        if self.log:
            since = f"since line {self.since} of {self.log}"
        if self.rose is not None:
            best, newest = self.rose
            return f"the loss diverged: it rose from {best:.3g} to {newest:.3g}, {since}"
        subject = "the loss is"
        if self.quantity == "gradients":
            subject = "the gradients are"
        if self.always and self.log:
            # The log may begin in the middle of the training.
            since = f"on any line of {self.log}"
        elif self.always:
            since = "from the beginning"
        return f"{subject} not finite {since}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Whether the loss of a run fell (for divergence, see `Divergence`).

    Attributes:
        outcome: ``"fell"``; ``"flat"``; ``"rose"`` if the loss rose without diverging;
            ``"spiked"`` if it rose a thousandfold, even if it recovered; or ``"unclear"`` if the
            loss does not measure progress or is too noisy.
        first: The level of the loss at the beginning.
        last: The level of the loss at the end, or the peak if the loss spiked.
        step: The step of the spike, or None if there was no spike.
        constant: For a flat loss, whether the loss never changed.
        reason: Why the outcome is unclear, as a clause for use within a sentence; otherwise empty.
    """

    outcome: Literal["fell", "flat", "rose", "spiked", "unclear"]
    first: float = math.nan
    last: float = math.nan
    step: int | None = None
    constant: bool = False
    reason: str = ""

    def clause(self) -> str:
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
class GuardClosing:
    """How a Guard closed, which shows how a run ended if there is no exit status.

    Attributes:
        how: ``"finished"``; ``"stopped"`` if a stop was requested; ``"left"`` if the script left
            the loop early.
        reason: Who or what requested the stop, such as ``"SIGTERM"``; empty if not recorded.
    """

    how: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisorLoss:
    """The death of the supervisor, after which its sentinel process killed the run's processes.

    Attributes:
        killed_processes: How many processes the sentinel killed.
        unix_seconds: When the sentinel noticed that the supervisor had died.
    """

    killed_processes: int
    unix_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All evidence about one attempt of a run, or about a run that left only a log."""

    # The directory or log that was read, such as ``"runs/last"`` or ``"train.log"``.
    source: str = ""
    # One clause for each piece of evidence that could not be read or was not recorded.
    missing: tuple[str, ...] = ()

    # Exceptions and log lines from all sources, in the order in which they appeared.
    statements: tuple[Statement, ...] = ()
    # How the command and its processes ended.
    endings: tuple[Ending, ...] = ()
    # Events that the supervisor, the processes and the Guards recorded, sorted by time.
    events: tuple[Event, ...] = ()
    # The restarts that led to this attempt and the remedies that Guards applied, one clause each.
    tried: tuple[str, ...] = ()
    # The environment variables that the supervisor set when it restarted the command for this
    # attempt.
    applied_changes: Mapping[str, Any] = field(default_factory=dict)

    # How the training diverged. None if it did not, or if no losses were recorded.
    divergence: Divergence | None = None
    # The newest printed loss if it is NaN and `divergence` is None. One NaN does not show that the
    # training diverged, because the script may skip such a batch, but it explains why the user
    # stopped a run.
    nan_at_end: Divergence | None = None
    # Whether the loss fell. It is judged only if the exit status is 0, and is None otherwise.
    learning: Learning | None = None
    # What the training loop spent its time on: its problems, or one plain statement. Empty if that
    # was not recorded or if the loop was too short to be judged.
    speed: tuple[SpeedFinding, ...] = ()
    # The collective in which ranks differ, according to the dumps of torch's flight recorder.
    flight: FlightFinding | None = None
    # Number of losses in the output. They are counted only if a log is the only evidence.
    printed_loss_count: int = 0

    # Number of steps that the training process completed, and the last phase of this process, in
    # lower case.
    steps: int | None = None
    phase: str | None = None
    # Whether holdfast observed at least one process of a supervised run. None if the run had no
    # supervisor.
    observed: bool | None = None
    # Whether a process loaded torch but no step was recorded and no loss was printed.
    made_no_step: bool = False

    # Signal with which the user asked `holdfast run` to stop.
    stop_signal: int | None = None
    # How the training process exited if its script chose the exit code: "sys.exit" or "os._exit".
    exit_call: str | None = None
    # The message that the training process passed to `sys.exit`.
    exit_message: str = ""
    # The last output line of a command that failed, not counting progress bars.
    last_output_line: str = ""
    # Whether one of the last output lines says that training is done.
    output_says_done: bool = False

    # PIDs of the run's processes that are still running.
    living_pids: tuple[int, ...] = ()
    supervisor_loss: SupervisorLoss | None = None
    guard_closing: GuardClosing | None = None


def is_user_code(frame: Frame) -> bool:
    """Return whether a frame is in the user's code, not in Python's or a package's."""
    is_foreign = _FOREIGN.search(f"{frame.file}:{frame.function}") is not None
    return not is_foreign and not is_holdfast_code(frame)


def is_holdfast_code(frame: Frame) -> bool:
    """Return whether a frame is in the code of holdfast itself."""
    return _HOLDFAST.search(frame.file) is not None


def innermost_user_frame(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame in user code, or the innermost frame if none is in user code.

    Args:
        frames: The frames of a traceback, with the innermost frame last. There must be at least
            one frame.
    """
    for frame in reversed(frames):
        if is_user_code(frame):
            return frame
    return frames[-1]


def library_file(frame: Frame) -> str:
    """Return a path relative to ``site-packages``, such as ``"torch/nn/functional.py"``.

    Paths in Python's standard library are returned relative to that library; other paths are
    returned unchanged.
    """
    return _INSTALLED.sub("", frame.file)
