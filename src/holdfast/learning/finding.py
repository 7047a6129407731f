"""`Finding`: one thing that is wrong with a run; and the order of findings in a report.

Causes come before symptoms, and a symptom that a cause explains comes last, as a note. Not here:
which findings explain others (`explanations`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from holdfast.learning.explanations import EXPLAINED_BY

Severity = Literal["error", "advice", "note"]
Kind = Literal["cause", "symptom"]

# The most important first.
SEVERITIES: tuple[Severity, ...] = ("error", "advice", "note")
# Rules about NaN or Inf, for which a guard may know the origin.
NONFINITE_RULES = frozenset({"H801", "H802", "H806"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding of the diagnosis.

    Args:
        rule: Id of the rule, such as ``"H811"``; `holdfast explain H811` says more.
        severity: ``"error"``: a contract is violated, so the run cannot be correct. ``"advice"``:
            very likely a fault. ``"note"``: worth knowing, often intended.
        kind: Whether the rule names a cause, or only a symptom that may have several.
        confidence: Between 0 and 1: how often a report of this rule is right, as measured where
            data exists.
        what: What is wrong, in one sentence.
        fix: What to do, in one sentence.
        where: The parameter, module, optimizer or call concerned, if there is one.
    """

    rule: str
    severity: Severity
    kind: Kind
    confidence: float
    what: str
    fix: str
    where: str = ""

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return (
            f"{self.what}{place}\nFix: {self.fix}\n[{self.rule}] run `holdfast explain {self.rule}`"
        )


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings, most important first, with those that others explain turned into notes.

    If a rule reports the same place several times, only the first finding is kept.
    """
    unique: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        unique.setdefault((finding.rule, finding.where), finding)
    # A note explains nothing: it is often intended.
    explaining = {finding.rule for finding in unique.values() if finding.severity != "note"}
    reported = []
    for finding in unique.values():
        is_explained = not explaining.isdisjoint(EXPLAINED_BY.get(finding.rule, ()))
        reported.append(_as_note(finding) if is_explained else finding)
    return sorted(reported, key=_importance)


def _importance(finding: Finding) -> tuple[bool, str, int, float]:
    """Return the sort key of a finding.

    A symptom with severity "error" still comes after a cause with severity "advice", since only a
    cause can be fixed.
    """
    return (
        finding.severity == "note",
        finding.kind,
        SEVERITIES.index(finding.severity),
        -finding.confidence,
    )


def _as_note(finding: Finding) -> Finding:
    if finding.severity == "note":
        return finding
    return dataclasses.replace(finding, severity="note", kind="symptom")


def with_origin(finding: Finding, origin: str | None) -> Finding:
    """Return a finding about NaN or Inf whose fix names the origin instead of the usual causes.

    Args:
        finding: Any finding; one that is not about NaN or Inf is returned unchanged.
        origin: Why the guard refused the newest such step, with the origin and the sample; None if
            nothing was traced.
    """
    if origin is None or finding.rule not in NONFINITE_RULES:
        return finding
    look = f"look at the origin of the newest such step, from the event nonfinite_origin: {origin}."
    if finding.rule == "H806":
        look = f"{finding.fix.rstrip('.')}. {look.capitalize()}"
    return dataclasses.replace(finding, fix=look)
