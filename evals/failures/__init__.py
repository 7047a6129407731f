"""Failures of training programs, recorded.

What each printed, how it ended, and which signature is right for it.

``recorded.jsonl`` has one failure a line, each really reproduced by a program of its own with torch
2.13 on Linux; ``healthy.jsonl`` has outputs of programs that trained well. Paths of the machine are
replaced, nothing else is. Where `Recorded.held_out`, its author had not seen the signatures and
labelled from their titles alone. A new failure is recorded by ``python -m evals.failures.record``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

RECORDED = Path(__file__).with_name("recorded.jsonl")
HEALTHY = Path(__file__).with_name("healthy.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One recorded failure.

    Args:
        name: What failed, unique.
        author: Letter of who wrote it.
        held_out: Whether its author had not seen the signatures.
        cause: Id of the signature that is right for it; ``"H1608"``: the exception itself.
        also: Ids that are as right.
        exception: Of ``"H1608"``: the class and the first line of the exception that is to be
            named, if not the last.
        status: Exit code, negative for a signal.
        silent: Whether the log says nothing of the cause, so that only the status does.
        program: Text of the program, if it is short.
        log: Its standard output and error.
    """

    name: str
    author: str
    held_out: bool
    cause: str
    also: tuple[str, ...] = ()
    exception: str = ""
    status: int
    silent: bool = False
    program: str = ""
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    """The output of a program that trained well, with the status that it ended with."""

    name: str
    status: int
    log: str


def all_failures() -> list[Recorded]:
    """Return every recorded failure, by name."""
    rows = [json.loads(line) for line in RECORDED.read_text(encoding="utf-8").splitlines()]
    return [Recorded(**{**row, "also": tuple(row.get("also", ()))}) for row in rows]


def all_healthy() -> list[Healthy]:
    """Return every recorded output of a healthy program."""
    return [
        Healthy(**json.loads(line)) for line in HEALTHY.read_text(encoding="utf-8").splitlines()
    ]
