"""`LearningRule`, and the decorator `rule` that registers one.

A rule is a pure function from `Observations` to findings. *Contract* rules are exact, because a run
either violates a contract or does not. They are applied from the first steps on. *Window* rules are
statistical. They are applied at long intervals and at the end of the run (see `sampling`). A rule
reports nothing if the measurements that it needs are missing. ``explain/learning_rules.md`` has a
page about each rule.

A rule is kept if it checks a contract, or if 95% of its reports were correct for programs that were
not used to develop the rule. The findings of a window rule that has reported a healthy program are
shown only on request (`Guard.diagnose`, `Watch.diagnose`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from holdfast.learning.finding import Finding, Kind, Severity
from holdfast.learning.observations import Observations

Tier = Literal["contract", "window"]

# Ids of removed rules. They are never reused, so that recordings of old runs keep their meaning.
RETIRED = frozenset(
    {
        *("H803", "H805", "H807", "H816", "H818", "H821", "H823", "H827", "H829", "H830", "H832"),
        *("H835", "H844", "H845", "H846", "H847", "H857", "H860", "H861", "H862"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRule:
    """A rule: when it is applied, how its findings are reported, and its check.

    Args:
        id: Id of the rule, such as ``"H811"``.
        tier: ``"contract"`` or ``"window"``, which determines when the rule is applied.
        severity: Default severity of its findings.
        kind: Whether the rule reports a cause or a symptom.
        confidence: Default confidence of its findings.
        on_request: Whether its findings are reported only by `Guard.diagnose` and `Watch.diagnose`.
        check: The function that yields the findings, given a run's observations and this rule.
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
        """Create a finding with this rule's id, and with its default severity and confidence."""
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
    id: str,  # noqa: A002 - `id` is the name of the field in `LearningRule`
    *,
    tier: Tier,
    severity: Severity,
    kind: Kind,
    confidence: float,
    on_request: bool = False,
) -> Callable[[Check], Check]:
    """Return a decorator that registers a rule's check. For the arguments, see `LearningRule`."""
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
