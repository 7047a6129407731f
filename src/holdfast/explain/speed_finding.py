"""`SpeedFinding`: one answer to the question why a run is slow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from holdfast.core.text import capitalized, sanitise

Cause = Literal[
    "too few workers",
    "decoding",
    "disk or network",
    "workers restart",
    "waits for data",
    "host-bound",
    "slow rank",
    "saving",
    "evaluation",
    "device-bound",
    "not known",
]
CAUSES: tuple[Cause, ...] = get_args(Cause)
_MAX_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFinding:
    """What a share of the training loop's time was spent on, and how to shorten it.

    All texts are sanitized on construction.

    Attributes:
        rule: The id of the rule, such as ``"H1627"``; empty for a plain statement.
        cause: The cause in a word or two.
        share: The share of the loop's time that this cause took, from 0 to 1.
        title: The finding as a clause with its share, such as "its steps spent 63 % of their time
            waiting for the loader".
        evidence: The numbers that support the finding, as a clause.
        fix: How to make the run faster. For a plain statement, it may be empty.
        is_problem: Whether this is a problem. A plain statement says where the time went without
            suggesting that anything is wrong.
    """

    rule: str
    cause: Cause
    share: float
    title: str
    evidence: str
    fix: str = ""
    is_problem: bool = True

    def __post_init__(self) -> None:
        """Sanitize the texts, which may quote names from the user's files."""
        for name in ("title", "evidence", "fix"):
            object.__setattr__(self, name, sanitise(getattr(self, name), most=_MAX_CHARACTERS))

    def sentence(self) -> str:
        """Return the title as a sentence that also names the cause and the evidence."""
        return f"{capitalized(self.title)} ({self.cause}): {self.evidence}."
