"""`Verdict`: why a run ended, in plain words, with what it rests on and how sure it is.

Here, and only here, what a log or a recording said is made harmless: see `Verdict`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from holdfast.core.text import sanitise
from holdfast.explain.signature import FAMILIES, Family, Restart


@dataclass(frozen=True, slots=True, kw_only=True)
class Exhibit:
    """One piece of evidence."""

    text: str  # quoted as it was seen, cut to a few lines
    source: str  # where, such as ``"output.log:1041"``
    # ``"root"``, ``"cascade"``, ``"confirmation"`` or ``"fact"`` (an exit status, a counter, a last
    # step)
    role: str = "fact"
    unix_seconds: float | None = None  # when, or None
    rank: int | None = None  # of the process, or None

    def __post_init__(self) -> None:
        """Sanitise the texts."""
        _sanitise_texts(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Why a run ended. Its texts are `holdfast.core.text.sanitise`d, whoever makes it."""

    cause: str  # id of the signature or rule, such as ``"H901"``; ``"H1600"`` is "unknown"
    family: Family  # its class
    title: str  # A few words
    summary: str  # what happened, one paragraph in plain words: what stopped it, when and where
    fix: str  # what to do, in the order of what to try first
    confidence: float  # that this is the cause, between 0 and 1; 0 for "unknown", which names none
    class_confidence: float = 0.0  # that it is of this class
    evidence: tuple[Exhibit, ...] = ()  # what it rests on, the strongest first
    # id and title of the next best cause with its confidence, or None
    runner_up: tuple[str, str, float] | None = None
    tried: tuple[str, ...] = ()  # what was tried already
    missing: tuple[str, ...] = ()  # what would have made it surer
    restart: Restart = "stop"  # what a supervisor may do
    changes: tuple[tuple[str, str], ...] = ()  # environment variables for the next attempt
    # Innermost frame of the user's own code, ``file:line in function``, or an empty text
    where: str = ""
    rank: int | None = None  # of the process that failed first, or None
    step: int | None = None  # steps that it had made, or None

    def __post_init__(self) -> None:
        """Sanitise the texts."""
        _sanitise_texts(self)

    @property
    def exit_code(self) -> int:
        """Return what ``holdfast explain`` exits with."""
        return 0 if self.family == "ended well" else 10 + FAMILIES.index(self.family)

    def as_json(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return {**asdict(self), "exit_code": self.exit_code}


def _sanitise_texts(made: Exhibit | Verdict) -> None:
    """Replace every text in the fields of a verdict or an exhibit by one that does nothing to
    who prints it.
    """
    for field in fields(made):
        clean = _sanitised(
            getattr(made, field.name), lines=field.name in ("text", "summary", "fix")
        )
        object.__setattr__(made, field.name, clean)


def _sanitised(value: Any, *, lines: bool) -> Any:
    if isinstance(value, str):
        return sanitise(value, most=20_000, lines=lines)
    return (
        tuple(_sanitised(each, lines=lines) for each in value)
        if isinstance(value, tuple)
        else value
    )
