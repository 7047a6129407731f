"""What a verdict is made from.

Texts, the ends of processes and events, each with where and when it was seen.

Nothing here judges. Collected from a run directory or from a bare log by ``collecting``; judged by
``judging``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from holdfast.core.events.event import Event

# Looked for in ``file:function``. A frozen module has no file; ``<string>:__init__`` is what
# `dataclass` writes.
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
    """One text that somebody printed or raised."""

    # An exception's message, which may have several lines, or one line of a log, without escape
    # sequences
    text: str
    # ``"exception"`` (with a traceback, or recorded by the observer), ``"line"`` otherwise
    kind: Literal["exception", "line"] = "line"
    exception: str | None = None  # bare name of the exception class, or None
    frames: tuple[Frame, ...] = ()  # of the traceback, innermost last
    source: str = ""  # where it stands, such as ``"train.log:1041"`` or ``"process 4711"``
    position: int = 0  # order within its source
    unix_seconds: float | None = None  # when, or None if unknown
    rank: int | None = None  # of the process, or None
    pid: int | None = None  # of the process, or None
    # Whether it ended its process; False: it was caught or logged; None: unknown
    fatal: bool | None = None
    # Whether another exception was raised from it: then it is nearer to the root than that one
    cause: bool = False
    # Whether a logger printed it, so somebody had caught it, at least for a while
    logged: bool = False
    # lines of progress stand after it, but they can have waited in a buffer, or be of another
    # process
    overtaken: bool = False
    # A line of a retry or of progress stands between it and the next exception of its process
    resumed: bool = False
    # a traceback after which no line says that the run went on, was saved or is done; of lines the
    # last of the log
    last: bool = False
    rule: str | None = None  # of holdfast, where whoever recorded it knew that, such as ``"H401"``


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process or the whole command ended."""

    status: int | None  # exit code, negative for a signal; None: it did not end, or nobody knows
    pid: int | None = None  # None: the whole command
    rank: int | None = None
    # As ``ProcessInfo.role``; ``"command"`` for what the supervisor has started
    role: str = "other"
    unix_seconds: float | None = None  # when, or None
    # how far the ``oom_kill`` counter of its control group rose meanwhile; None if unknown
    oom_kills: int | None = None
    # ``"user"``, ``"supervisor"``, ``"scheduler"``, or None: who sent the signal, as far as known
    sent_by: str | None = None
    phase: str | None = None  # name of the last phase, lower case, or None
    step: int | None = None  # steps that it had made, or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """That a training was lost before its end: nothing good came after."""

    what: Literal["loss", "gradients"]  # which values say so
    since: int  # step of the first bad value; in a log its line
    always: bool = False  # whether no value before was good
    # Of a finite loss that exploded: its best level, its newest value
    rose: tuple[float, float] | None = None
    # False of one that only ended far above where it began, which need not be a failure
    exploded: bool = True
    log: str = ""  # name of the log that says so; empty: what was recorded of the steps

    def sentence(self) -> str:
        """Return this as a sentence without capital and full stop."""
        since = f"since line {self.since} of {self.log}" if self.log else f"since step {self.since}"
        if self.rose is not None:
            return (
                f"the loss diverged: it rose from {self.rose[0]:.3g} to {self.rose[1]:.3g}, {since}"
            )
        subject = "the loss is" if self.what == "loss" else "the gradients are"
        return f"{subject} not finite {'from the beginning' if self.always else since}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """Whether the loss of a run fell, if it did not diverge.

    Attributes:
        outcome: ``"fell"``; ``"flat"``; ``"rose"``, by less than a loss that diverged;
            ``"spiked"``, a thousandfold, even if it came back; or ``"unclear"``, if the loss does
            not measure progress or is too noisy.
        first: The level at the beginning.
        last: The level at the end, or the peak of a spike.
        step: The step of the spike.
        constant: For a flat loss, whether it never changed.
        reason: Why the outcome is unclear, as a sentence without capital and full stop.
    """

    outcome: Literal["fell", "flat", "rose", "spiked", "unclear"]
    first: float = math.nan
    last: float = math.nan
    step: int | None = None
    constant: bool = False
    reason: str = ""

    def sentence(self) -> str:
        """Return this as a sentence without capital and full stop."""
        if self.outcome == "unclear":
            return self.reason
        if self.outcome == "spiked":
            return (
                f"the loss diverged: it rose from {self.first:.3g} to {self.last:.3g}, at step"
                f" {self.step}"
            )
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
class Facts:
    """All that is known of a run, or of its newest attempt."""

    statements: tuple[Statement, ...] = ()  # in the order in which they were seen, of all sources
    endings: tuple[Ending, ...] = ()  # of the command and of processes
    events: tuple[Event, ...] = ()  # of the supervisor, the processes and guards, by time
    # What earlier attempts were restarted for, and what was changed, one sentence each
    tried: tuple[str, ...] = ()
    source: str = ""  # what it was collected from, such as ``"runs/last"`` or ``"train.log"``
    # What could not be had, one sentence each, such as "no exit status: only a log"
    missing: tuple[str, ...] = ()
    lost: Lost | None = None  # that its training was lost, or None: it was not, or nobody knows
    # Of a supervised run that ended with status 0; None: it was not judged
    learning: Learning | None = None
    loader_wait: LoaderWait | None = None  # of the same, or None: nobody knows, or it is no matter
    # Anything else as JSON values, such as versions
    extra: Mapping[str, Any] = field(default_factory=dict)


def is_own_code(frame: Frame) -> bool:
    """Return whether a frame is the user's own.

    Neither Python's library, nor an installed package, nor holdfast.
    """
    return _FOREIGN.search(f"{frame.file}:{frame.function}") is None


def own_frame(frames: Sequence[Frame]) -> Frame:
    """Return the innermost frame of the user's own code, else the innermost of at least one."""
    return next((frame for frame in reversed(frames) if is_own_code(frame)), frames[-1])


def library_file(frame: Frame) -> str:
    """Return the file of a library's frame from its package on, such as
    ``"torch/nn/functional.py"``.
    """
    return _INSTALLED.sub("", frame.file)
