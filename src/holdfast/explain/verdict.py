"""`Verdict`: why a run ended, with the evidence and the certainty.

A verdict quotes logs and recordings, which may contain malicious text such as escape sequences.
This module sanitizes every text, so that code that prints a verdict does not have to.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import asdict, dataclass, fields
from typing import Any

from holdfast.core.text import sanitise
from holdfast.explain.certainty import Certainty
from holdfast.explain.signatures import UNJUDGED, WELL
from holdfast.explain.signatures.ids import LOSS_FELL
from holdfast.explain.signatures.signature import FAMILIES, NO_FAILURES, Family, Restart
from holdfast.explain.speed_finding import SpeedFinding

_MAX_CHARACTERS = 20_000
# Fields that keep their line breaks. In all other fields, line breaks become spaces.
_FIELDS_WITH_LINES = frozenset({"text", "summary", "fix"})
# The number of the form of `Verdict.as_json`. It changes when a field is removed, renamed or gets
# another meaning.
_JSON_VERSION = 2

# What each role means, in the words that users read. A fact speaks for itself.
_ROLES_IN_WORDS = {
    "root": "the cause",
    "cascade": "follows from another failure",
    "confirmation": "confirms the cause",
    "fact": "",
}

_SENTENCE_END = re.compile(r"(?<=\.)\s")
_MAX_ADVICE_CHARACTERS = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """One piece of evidence."""

    # The quoted text, limited to a few lines.
    text: str
    # Where the text was found, such as ``"output.log:1041"``.
    source: str
    # "root" (the original failure), "cascade" (a failure that follows from another one),
    # "confirmation", or "fact" (such as an exit status or a counter).
    role: str = "fact"
    unix_seconds: float | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        """Sanitize the texts."""
        _sanitise_fields(self)

    @property
    def role_in_words(self) -> str:
        """Return what this evidence shows, such as "the cause"; empty for a fact."""
        # A verdict that is read from a damaged file may have any role.
        return _ROLES_IN_WORDS.get(self.role, "")

    @property
    def heading(self) -> str:
        """Return the source, rank and role as text, such as ``"a.log:9, rank 1 (the cause)"``."""
        heading = self.source
        if self.rank is not None:
            heading += f", rank {self.rank}"
        if self.role_in_words:
            heading += f" ({self.role_in_words})"
        return heading


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a run ended. All texts are sanitized on construction."""

    # The id of the signature or rule, such as ``"H901"``. ``"H1600"`` means that the cause is
    # unknown.
    cause: str
    # The class of the cause, such as "out of memory".
    family: Family
    # The cause in a few words, in lower case unless it quotes an exception.
    title: str
    # One paragraph: what ended the run, when and where.
    summary: str
    # How to fix the problem, starting with the first thing to try. Empty if no fix is known.
    fix: str
    # How certain the cause is. None if the cause is unknown, or if it needs no word: an exception
    # that ended the process was seen, not inferred, and so was a good end.
    certainty: Certainty | None = None
    # The evidence, with the strongest piece first.
    evidence: tuple[Exhibit, ...] = ()
    # The id and title of the second most likely cause. None if there is none to show.
    runner_up: tuple[str, str] | None = None
    # The remedies that were already tried, one clause each.
    tried: tuple[str, ...] = ()
    # Missing evidence that would have made the verdict more certain, one clause each.
    missing: tuple[str, ...] = ()
    # Whether and how a supervisor may restart the command.
    restart: Restart = "stop"
    # Environment variables to set for the next attempt.
    changes: tuple[tuple[str, str], ...] = ()
    # The innermost frame in the user's code, as ``file:line in function``, or an empty string.
    where: str = ""
    # Rank of the process that failed first.
    rank: int | None = None
    # The number of steps that the process that failed first completed.
    step: int | None = None
    # What the training loop spent its time on: its problems, with the largest share first, or one
    # plain statement. Empty if that is not known.
    speed: tuple[SpeedFinding, ...] = ()

    def __post_init__(self) -> None:
        """Sanitize the texts."""
        _sanitise_fields(self)

    @property
    def exit_code(self) -> int:
        """Return the exit code of ``holdfast explain``."""
        if self.family in NO_FAILURES:
            return 0
        return 10 + FAMILIES.index(self.family)

    @property
    def needs_action(self) -> bool:
        """Return whether there is something to fix: the run failed, or its success is in doubt."""
        if self.family == "learning":
            return self.cause not in (LOSS_FELL, UNJUDGED.id)
        if self.family != "ended well":
            return True
        return self.fix != WELL.fix and self.cause != UNJUDGED.id

    @property
    def first_advice(self) -> str:
        """Return the first sentence of the fix, shortened to a line; empty if no fix is known."""
        sentence = _SENTENCE_END.split(self.fix, maxsplit=1)[0]
        return textwrap.shorten(sentence, _MAX_ADVICE_CHARACTERS, placeholder=" ...")

    @property
    def is_plain_success(self) -> bool:
        """Return whether the run ended well and nothing casts doubt on its success.

        If the exit status is in doubt or the training had a fault, the verdict's title differs from
        that of `WELL`.
        """
        return self.cause == WELL.id and self.title == WELL.title

    def as_json(self) -> dict[str, Any]:
        """Return the verdict and its exit code as a dictionary that can be serialized as JSON."""
        return {"version": _JSON_VERSION, **asdict(self), "exit_code": self.exit_code}


def _sanitise_fields(record: Exhibit | Verdict) -> None:
    """Sanitize every text in the fields of a frozen dataclass, in place."""
    for field in fields(record):
        keeps_lines = field.name in _FIELDS_WITH_LINES
        value = _sanitised(getattr(record, field.name), lines=keeps_lines)
        object.__setattr__(record, field.name, value)


def _sanitised(value: Any, *, lines: bool) -> Any:
    """Return a value with every text in it sanitized, including texts in nested tuples."""
    if isinstance(value, str):
        return sanitise(value, most=_MAX_CHARACTERS, lines=lines)
    if isinstance(value, tuple):
        return tuple(_sanitised(item, lines=lines) for item in value)
    return value
