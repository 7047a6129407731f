"""`Signature`: how to recognise one kind of failure in messages and logs, and what to do about it.

The signatures themselves are the entries of ``signatures/*.yaml``. `matching` finds those that
match a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

# Classes of causes. The exit code of ``holdfast explain`` is 0 for the first one, and 10 plus the
# index for the others, so the order is part of the contract.
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
FAMILIES: tuple[Family, ...] = get_args(Family)

# A root can be the cause. A cascade only follows from a failure elsewhere.
Role = Literal["root", "cascade"]

# What a supervisor may do after a failure:
#   retry      start it again: the cause is transient
#   remedy     start it again with `Signature.changes`
#   preempted  start it again, and count it as a preemption
#   stop       do not start it again: the same would happen
Restart = Literal["retry", "remedy", "preempted", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One kind of failure. All patterns are searched case-insensitively.

    Args:
        id: Such as ``"H901"``. An id is never reused with another meaning.
        title: What is wrong, in a few words, in lower case, without a full stop.
        family: The class of the cause.
        patterns: Regular expressions, one of which must be found in a statement: in the message of
            an exception, which may have several lines, or in one line of a log. The last line of a
            log includes its line end. Empty if the signature is chosen by how a process ended.
        exceptions: Names of exception classes without their module, such as ``"OutOfMemoryError"``.
            If given, an exception must be of exactly one of these classes; base classes do not
            count. A log line has no class and always passes.
        only_exceptions: Whether log lines never match, for wordings that programs also print when
            nothing failed.
        frames: Regular expressions on ``path:function``. If given, a frame of the exception must
            match one of them; so a bare last line of a traceback never matches.
        in_frames: Pairs of an additional pattern and a regular expression on frames. The pattern
            counts only for an exception with a frame that matches the expression. The innermost
            frame can also be matched as ``innermost path:function``, followed by `` own`` for the
            user's own code and by `` self`` where an attribute of ``self`` is missing; frames of
            ``__getattr__`` are skipped.
        explains: Ids of signatures that repeat this failure later and with less detail.
        role: See `Role`.
        rank: Precedence when several signatures match, the smallest first: 10 hardware, 20 out of
            memory, 30 device assert, 40 storage and environment, 50 loader, 60 checkpoint, 70
            everything specific, 90 generic.
        restart: See `Restart`.
        changes: Environment variables that a supervisor may set for the next attempt.
        means: What it means and why it happens, in one to three sentences.
        fix: What to do, in one to three sentences, starting with what to try first.
        false_positives: When the signature is not the cause, or an empty text.
        example: A text as torch prints it: the last lines of a traceback, or a line of a log.
        also: Other wordings as whole texts, by where they occur, such as ``{"torch 1.8": "..."}``.
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
