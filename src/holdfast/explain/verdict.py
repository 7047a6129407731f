"""`Verdict`: why a run ended, in plain words, with its evidence and how certain it is.

A verdict quotes logs and recordings, which may be hostile. Here, and only here, their texts are
made harmless, so that whoever prints a verdict need not think of it.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from holdfast.core.text import sanitise
from holdfast.explain.signature import FAMILIES, Family, Restart

_MOST_CHARACTERS = 20_000
# Texts that keep their line breaks; in all others they become spaces.
_FIELDS_WITH_LINES = frozenset({"text", "summary", "fix"})
# Causes that are the words of an exception: one that no signature knows (`endings.UNCAUGHT`), and
# the rules of holdfast's own errors. The ids of signatures begin at H900.
_IN_ITS_OWN_WORDS = re.compile(r"H1608|H[1-8]\d\d")
# Least confidence in an exception that ended the process while nothing contradicts it: the smallest
# share of `candidate.SHARES` for an exception that no signature knows. Whatever contradicts (a
# signal from outside, another failure, progress after the exception) takes more away.
_UNDISPUTED = 0.65


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """One piece of evidence."""

    # Quoted as it was seen, cut to a few lines.
    text: str
    # Where it was seen, such as ``"output.log:1041"``.
    source: str
    # "root", "cascade", "confirmation", or "fact" (an exit status, a counter, a last step).
    role: str = "fact"
    unix_seconds: float | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        """Sanitise the texts."""
        _sanitise_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a run ended. All of its texts are `sanitise`d, whoever makes it."""

    # Id of the signature or rule, such as ``"H901"``; ``"H1600"`` is "unknown".
    cause: str
    # Class of the cause.
    family: Family
    # A few words, in lower case unless it quotes an exception.
    title: str
    # One paragraph: what stopped the run, when and where.
    summary: str
    # What to do, what to try first at the beginning. Empty if nothing specific is known.
    fix: str
    # That this is the cause, between 0 and 1; 0 for "unknown", which names none.
    confidence: float
    # That the cause is of this class, between 0 and 1.
    class_confidence: float = 0.0
    # The strongest first.
    evidence: tuple[Exhibit, ...] = ()
    # Id, title and confidence of the next best cause.
    runner_up: tuple[str, str, float] | None = None
    # What was tried already, one clause each.
    tried: tuple[str, ...] = ()
    # What would have made the verdict more certain, one clause each.
    missing: tuple[str, ...] = ()
    # What a supervisor may do.
    restart: Restart = "stop"
    # Environment variables for the next attempt.
    changes: tuple[tuple[str, str], ...] = ()
    # Innermost frame of the user's own code, ``file:line in function``, or an empty text.
    where: str = ""
    # Rank of the process that failed first.
    rank: int | None = None
    # Steps that it had made.
    step: int | None = None

    def __post_init__(self) -> None:
        """Sanitise the texts."""
        _sanitise_fields(self)

    @property
    def exit_code(self) -> int:
        """Return what ``holdfast explain`` exits with."""
        if self.family == "ended well":
            return 0
        return 10 + FAMILIES.index(self.family)

    @property
    def names_an_exception(self) -> bool:
        """Return whether the cause is an exception as it was raised, and nothing contradicts it.

        Such a cause is a fact that was seen rather than one that was inferred, so no probability
        is shown beside it.
        """
        if not _IN_ITS_OWN_WORDS.fullmatch(self.cause):
            return False
        return self.confidence >= _UNDISPUTED

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return {**asdict(self), "exit_code": self.exit_code}


def _sanitise_fields(record: Exhibit | Verdict) -> None:
    """Sanitise every text in the fields of a frozen record."""
    for field in fields(record):
        keeps_lines = field.name in _FIELDS_WITH_LINES
        value = _sanitised(getattr(record, field.name), lines=keeps_lines)
        object.__setattr__(record, field.name, value)


def _sanitised(value: Any, *, lines: bool) -> Any:
    if isinstance(value, str):
        return sanitise(value, most=_MOST_CHARACTERS, lines=lines)
    if isinstance(value, tuple):
        return tuple(_sanitised(item, lines=lines) for item in value)
    return value
