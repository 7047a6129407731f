"""`Signature`: how one way to fail shows in texts, and what is known about it.

The signatures themselves are the entries of ``signatures/*.yaml``; ``judging`` makes verdicts of
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Family = Literal[
    "ended well",
    "unknown",
    "out of memory",
    "host out of memory",
    "hardware",
    "device",
    "distributed",
    "loader",
    "hang",
    "numerics",
    "autograd",
    "shape or type",
    "checkpoint",
    "storage",
    "environment",
    "preempted",
    "crash",
    "user code",
]
"""Classes of causes. The exit code of ``holdfast explain`` is 0 for the first and 10 + the index
for the others."""
FAMILIES: tuple[Family, ...] = get_args(Family)

Role = Literal["root", "cascade", "confirmation"]
"""A root can be the cause; a cascade follows from one elsewhere; a confirmation only supports
another."""

Restart = Literal["retry", "remedy", "preempted", "stop"]
"""What a supervisor may do.

Try again (transient), try again with `Signature.changes`, take one from the budget of
preemptions, or stop, since the same would happen again.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One way to fail. All texts are searched case-insensitively.

    Args:
        id: Such as ``"H901"``; never used again for another meaning.
        title: What is wrong, in a few words, lower case, without a full stop.
        family: Its class.
        patterns: Regular expressions, each searched in one statement: the message of an exception,
            which may have several lines, or one line of a log, of which the last of all has its
            line end. One of them suffices.
            None: chosen by how a process ended.
        exceptions: Bare names of exception classes, such as ``"OutOfMemoryError"``; if given, an
            exception must be of one of these (its bases do not count). A log line has no class and
            passes.
        only_exceptions: Whether lines that are no exception do not count: for words that people
            also print.
        frames: Regular expressions on ``path:function``; if given, a frame of an exception must
            match one, so that the last line of a traceback alone does not fit.
        in_frames: Further patterns that count only in an exception with a frame that matches the
            second of each pair; the innermost frame is there a second time, as ``innermost
            path:function``, with `` own`` for own code and `` self`` where that lacks an attribute;
            ``__getattr__`` is passed over.
        explains: Ids of signatures that only repeat, later and with less detail, what this one
            says.
        role: See `Role`.
        rank: Order of trust, the smaller first, when several match: 10 hardware, 20 out of memory,
            30 device assert, 40 storage and environment, 50 loader, 60 checkpoint, 70 everything
            specific, 90 generic.
        restart: See `Restart`.
        changes: Environment variables that a supervisor may set for the next attempt.
        means: What it means and why it happens, one to three sentences.
        fix: What to do, one to three sentences, in the order of what to try first.
        false_positives: When the signature is not the cause, or an empty text.
        example: A text as torch prints it: the last lines of a traceback, or a line of a log.
        also: Older or other wordings as whole texts, by where they are from, such as ``{"torch
            1.8": "..."}``.
    """

    id: str
    title: str
    family: Family
    patterns: tuple[str, ...] = ()
    exceptions: tuple[str, ...] = ()
    only_exceptions: bool = False
    frames: tuple[str, ...] = ()
    in_frames: tuple[tuple[str, str], ...] = ()
    explains: tuple[str, ...] = ()
    role: Role = "root"
    rank: int = 70
    restart: Restart = "stop"
    changes: Mapping[str, str] = field(default_factory=dict)
    means: str
    fix: str
    false_positives: str = ""
    example: str = ""
    also: Mapping[str, str] = field(default_factory=dict)
