"""Failures of other people's trainings, from public threads.

What was pasted, and the cause that the thread found.

One entry a line: the text, shortened; the link; the cause in one sentence, established by the
thread and written down before any verdict was made. ``accept``: ids of signatures that state this
cause; ``line``: words of the line of the log that states it by itself, if one does; ``classes``:
classes of causes that a fair judge accepts. Rules were written from ``design.jsonl`` alone until
``sealed.jsonl.xz`` was unpacked and looked at, once; since those first figures rules know both.
Split by project.

Logs of runs that ended with status 0, one a line, shortened, judged by reading before any verdict
was made, with why: ``healthy.jsonl`` ended well, ``dead.jsonl`` did not; its status is what the log
or the shell's last word leaves to assume. Without a link: the file is public, but its repository is
not known (``unnamed``), or the log was written for this set in the format of a real one
(``written``).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One report of a failure.

    Args:
        name: Unique.
        family: Class of the cause in the words of who collected it, short.
        log: What was pasted.
        status: Exit status, if the thread tells it; negative for a signal.
        cause: What was wrong, in one sentence.
        accept: Ids of the signatures that state the cause.
        line: Words of the line that states it by itself; None: no line does.
        classes: Classes of `holdfast.explain.signatures.signature.Family` that are right.
        link: Address of the thread.
    """

    name: str
    family: str
    log: str
    status: int | None
    cause: str
    accept: tuple[str, ...]
    line: str | None
    classes: tuple[str, ...]
    link: str

    @property
    def second_half(self) -> bool:
        """Return whether it is of the half that rules were only checked on."""
        return hashlib.sha256(self.name.encode()).digest()[0] % 2 == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """One run that ended with status 0, and why it is of its set."""

    id: str
    link: str
    project: str
    status: int
    why: str
    log: str


def all_endings(name: str) -> list[Ending]:
    """Return every run of ``"healthy"`` or ``"dead"``."""
    return [
        Ending(**json.loads(line))
        for line in (_HERE / f"{name}.jsonl").read_text("utf-8").splitlines()
    ]


def all_reports(name: str = "design") -> list[Report]:
    """Return every report of one file, ``"design"`` or ``"sealed"``; nothing if it is not there."""
    file = _HERE / f"{name}.jsonl"
    return (
        [_report(json.loads(line)) for line in file.read_text("utf-8").splitlines()]
        if file.exists()
        else []
    )


def _report(row: dict[str, object]) -> Report:
    return Report(
        name=str(row["id"]),
        family=str(row["class"]).partition(" (")[0],
        log=str(row["log"]),
        status=row["status"] if isinstance(row["status"], int) else None,
        cause=str(row["cause"]),
        accept=_texts(row["accept"]),
        line=str(row["line"]) if row["line"] else None,
        classes=_texts(row["classes"]),
        link=str(row["link"]),
    )


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(each) for each in value) if isinstance(value, list) else ()
