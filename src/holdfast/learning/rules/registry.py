"""How a rule about learning is registered.

A rule is a pure function from `Facts` to findings. With ``each="models"`` it is called for each
model, with its name and its facts too. *Contracts* are exact and are judged during the first steps;
*windows* are statistical and are judged rarely, and at the end. About facts that are not known a
rule is silent. What each rule means stands in ``explain/learning_rules.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from holdfast.learning.facts import Facts
from holdfast.learning.finding import Finding, Kind, Severity

Tier = Literal["contract", "window"]


@dataclass(frozen=True, slots=True)
class Say:
    """Makes findings of one rule, with the rule's severity and confidence unless a finding says
    otherwise.
    """

    rule: str
    severity: Severity
    kind: Kind
    confidence: float

    def __call__(
        self,
        what: str,
        fix: str,
        where: str = "",
        *,
        severity: Severity | None = None,
        confidence: float | None = None,
    ) -> Finding:
        """Return a finding."""
        return Finding(
            rule=self.rule,
            severity=severity or self.severity,
            kind=self.kind,
            confidence=confidence or self.confidence,
            what=what,
            fix=fix,
            where=where,
        )


def advice_if(wrong: bool) -> Severity:  # noqa: FBT001 - a severity is asked for by a condition
    """Return ``"advice"`` if something is very likely wrong, else ``"note"``."""
    return "advice" if wrong else "note"


Check = Callable[..., Iterable[Finding]]
"""Of the facts and `Say`; with `each`, also of the name and the facts of one part."""


@dataclass(frozen=True, slots=True)
class LearningRule:
    """One rule: when it is judged, and its check."""

    tier: Tier
    say: Say
    check: Check
    each: str

    def findings(self, facts: Facts) -> list[Finding]:
        """Return what the rule finds in the facts."""
        parts = getattr(facts, self.each).items() if self.each else [()]
        return [finding for part in parts for finding in self.check(facts, self.say, *part)]


REGISTERED: dict[str, LearningRule] = {}


def checks(
    *, rule: str, tier: Tier, severity: Severity, kind: Kind, confidence: float, each: str = ""
) -> Callable[[Check], Check]:
    """Register a function as the check of a rule, of all facts or of `each` optimizer, model,
    loss and so on.
    """

    def register(check: Check) -> Check:
        REGISTERED[rule] = LearningRule(tier, Say(rule, severity, kind, confidence), check, each)
        return check

    return register
