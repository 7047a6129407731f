"""`Signature`: how to recognize one kind of failure in messages and logs, and how to fix it.

Most signatures are entries in ``signatures/*.yaml``. `matching` finds the signatures that match a
text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from holdfast.explain.certainty import Certainty

# The classes of causes. The exit code of ``holdfast explain`` is 0 for the classes in `NO_FAILURES`
# and 10 plus the index in this list for any other class, so their order must not change. The class
# "learning" is what the record of another tool shows if nothing has failed.
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
    "learning",
]
FAMILIES: tuple[Family, ...] = get_args(Family)
NO_FAILURES: tuple[Family, ...] = ("ended well", "learning")

# A root can be the original failure. A cascade is always the consequence of a failure elsewhere.
Role = Literal["root", "cascade"]

# What a supervisor may do after a failure:
#   retry      restart the command, because the cause is transient
#   remedy     restart the command with `Signature.changes`
#   preempted  restart the command, and count the failure as a preemption
#   stop       do not restart the command, because it would fail again
Restart = Literal["retry", "remedy", "preempted", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """One kind of failure, and the case-insensitive patterns that recognize it.

    Args:
        id: The id, such as ``"H901"``. An id is never reused with another meaning.
        title: The failure in a few words, in lower case, without a period.
        family: The class of the cause.
        patterns: Regular expressions. A statement matches if one of them is found in it: in the
            message of an exception, which may have several lines, or in a log line. The last line
            of a log includes its line terminator. Empty if the signature is chosen according to how
            a process ended.
        exceptions: Names of exception classes without their module, such as ``"OutOfMemoryError"``.
            If given, the class of an exception must be one of these; subclasses do not count. This
            condition does not apply to log lines, which have no class.
        only_exceptions: If True, log lines never match. Use this for messages that programs also
            print when nothing has failed.
        frames: Regular expressions for ``path:function``. If given, a frame of the exception must
            match one of these expressions, so an exception without frames never matches.
        in_frames: Pairs of an additional pattern and a regular expression for frames. The pattern
            applies only to an exception with a frame that matches the expression. The innermost
            frame is also available as ``innermost path:function``, followed by `` own`` if the
            frame is in user code and by `` self`` if an attribute of ``self`` is missing. Frames in
            ``__getattr__`` are not considered innermost.
        explains: Ids of signatures that report the same failure again, later and with less detail.
        role: Whether this can be the original failure; see `Role`.
        rank: The precedence if several signatures match. The smallest rank wins: 10 hardware, 20
            out of memory, 30 device assert, 40 storage and environment, 50 loader, 60 checkpoint,
            70 any other specific failure, 90 generic.
        certainty: How often the failure that a text reports is also the cause that an expert would
            name. "certain" if the text itself states the cause, "a guess" if the text reports a
            symptom that has many causes.
        restart: What a supervisor may do after the failure; see `Restart`.
        changes: Environment variables that a supervisor may set for the next attempt.
        means: What the failure means and why it happens, in one to three sentences.
        fix: How to fix the problem, in one to three sentences. The first thing to try comes first.
        false_positives: When the signature matches although it is not the cause; empty if unknown.
        example: A typical text that matches: the last lines of a traceback, or a log line.
        also: Other texts that match, keyed by where they occur, such as ``{"torch 1.8": "..."}``.
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
    certainty: Certainty = "likely"
    restart: Restart = "stop"
    changes: Mapping[str, str] = field(default_factory=dict)
    means: str
    fix: str
    false_positives: str = ""
    example: str = ""
    also: Mapping[str, str] = field(default_factory=dict)
