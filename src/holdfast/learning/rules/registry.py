"""`LearningRule` and `rule`: how a rule about learning is registered.

A rule is a pure function from `Observations` to findings. *Contracts* are exact: a run violates
them or not. They are judged from the first steps on. *Windows* are statistical; they are judged at
long intervals, and at the end (see `sampling`). A rule reports nothing about what was not observed.
``explain/learning_rules.md`` explains what each rule means.

A rule is kept if it states a contract, or if 95 % of its reports were right on programs that were
not used to develop it. A rule that states no contract and was wrong about a healthy program is
reported only on request (`Guard.diagnose`, `Watch.diagnose`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from holdfast.learning.finding import Finding, Kind, Severity
from holdfast.learning.observations import Observations

Tier = Literal["contract", "window"]

# Ids of removed rules. They are never reused, so that the recordings of old runs keep their
# meaning.
RETIRED = frozenset(
    {
        *("H803", "H805", "H807", "H816", "H818", "H821", "H823", "H827", "H829", "H830", "H832"),
        *("H835", "H844", "H845", "H846", "H847", "H857", "H860", "H861", "H862"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRule:
    """One rule: when it is judged, how it reports, and its check.

    Args:
        id: Such as ``"H811"``.
        tier: Whether it is a contract or a window, which decides when it is judged.
        severity: Default severity of its findings.
        kind: Whether it names a cause or a symptom.
        confidence: Default confidence of its findings.
        on_request: Whether its findings are reported only by `Guard.diagnose` and `Watch.diagnose`.
        check: Yields the findings for a run.
    """

    id: str
    tier: Tier
    severity: Severity
    kind: Kind
    confidence: float
    on_request: bool
    check: Check

    def finding(
        self,
        what: str,
        fix: str,
        where: str = "",
        *,
        severity: Severity | None = None,
        confidence: float | None = None,
    ) -> Finding:
        """Return a finding with this rule's id and defaults."""
        return Finding(
            rule=self.id,
            severity=severity or self.severity,
            kind=self.kind,
            confidence=confidence or self.confidence,
            what=what,
            fix=fix,
            where=where,
        )


Check = Callable[[Observations, LearningRule], Iterable[Finding]]

REGISTERED: dict[str, LearningRule] = {}


def rule(
    id: str,  # noqa: A002 - what it is called everywhere
    *,
    tier: Tier,
    severity: Severity,
    kind: Kind,
    confidence: float,
    on_request: bool = False,
) -> Callable[[Check], Check]:
    """Register a function as the check of a rule; the arguments are those of `LearningRule`."""
    assert id not in RETIRED
    assert id not in REGISTERED

    def register(check: Check) -> Check:
        REGISTERED[id] = LearningRule(
            id=id,
            tier=tier,
            severity=severity,
            kind=kind,
            confidence=confidence,
            on_request=on_request,
            check=check,
        )
        return check

    return register
