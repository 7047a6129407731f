"""`Finding`: one thing that is wrong with a run. Also the order of findings in a report.

Causes come before symptoms. A symptom that another finding explains is reported last, as a note,
so that one mistake is reported once: a run that learns nothing looks the same whatever the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "advice", "note"]
Kind = Literal["cause", "symptom"]

# The most important first.
SEVERITIES: tuple[Severity, ...] = ("error", "advice", "note")
# Rules about NaN or Inf, for which a guard may know the origin.
NONFINITE_RULES = frozenset({"H801", "H802", "H806"})

# The optimizer does not receive the gradient of the loss, or it maximises the loss.
WRONG_GRADIENT = frozenset({"H811", "H817", "H831", "H840", "H859"})
# The loss receives arguments that it does not accept.
WRONG_ARGUMENTS = frozenset({"H836", "H837", "H838", "H839", "H855"})
# Weights receive no usable gradient.
NOTHING_LEARNS = frozenset({"H808", "H809", "H810", "H812", "H813", "H814", "H822"})

CAUSES_OF_NONFINITE = WRONG_GRADIENT | {"H806", "H825", "H839", "H848"}
CAUSES_OF_LOST_GRADIENT = WRONG_GRADIENT | WRONG_ARGUMENTS | {"H822", "H843", "H856"}
CAUSES_OF_NO_PROGRESS = (
    WRONG_GRADIENT
    | WRONG_ARGUMENTS
    | NOTHING_LEARNS
    | {"H801", "H802", "H806", "H819", "H820", "H825", "H841", "H842", "H843", "H848", "H854"}
)

# For each rule, the rules whose findings explain it. Among symptoms the earlier one explains the
# later: first the loss, then its gradient, then the weights, then the lack of progress.
EXPLAINED_BY: Mapping[str, frozenset[str]] = {
    "H801": CAUSES_OF_NONFINITE,
    "H802": CAUSES_OF_NONFINITE | {"H801"},
    "H804": CAUSES_OF_NONFINITE | {"H801", "H802"},
    "H808": frozenset({"H809", "H810", "H812"}),
    "H812": frozenset({"H809"}),
    "H813": frozenset({"H809", "H810"}),
    "H814": frozenset({"H813"}),
    "H815": CAUSES_OF_LOST_GRADIENT | {"H825"},
    "H819": frozenset({"H820", "H854"}),
    "H824": CAUSES_OF_NO_PROGRESS,
    "H825": WRONG_GRADIENT | {"H839", "H843", "H855", "H856"},
    "H826": CAUSES_OF_NO_PROGRESS | {"H804", "H824", "H856", "H858"},
    "H828": CAUSES_OF_NO_PROGRESS | {"H804", "H815", "H824", "H826", "H856", "H858"},
    "H839": frozenset({"H842"}),
    "H848": CAUSES_OF_LOST_GRADIENT | {"H815"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding of the diagnosis.

    Args:
        rule: Id of the rule, such as ``"H811"``; `holdfast explain H811` says more.
        severity: ``"error"``: a contract is violated, so the run cannot be correct. ``"advice"``:
            very likely a fault. ``"note"``: worth knowing, often intended.
        kind: Whether the rule names a cause, or only a symptom that may have several.
        confidence: The share of reports of this rule that are right, from 0 to 1; measured where
            there are data, otherwise estimated.
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
    """Return findings, most important first; those explained by others become notes.

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
        if is_explained and finding.severity != "note":
            finding = dataclasses.replace(finding, severity="note", kind="symptom")
        reported.append(finding)
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


def with_origin(finding: Finding, origin: str | None) -> Finding:
    """Return a finding about NaN or Inf whose fix names the origin instead of the usual causes.

    Args:
        finding: Any finding; one that is not about NaN or Inf is returned unchanged.
        origin: Why the guard refused the newest such step, with the origin and the sample; None if
            nothing was traced.
    """
    if origin is None or finding.rule not in NONFINITE_RULES:
        return finding
    place = f"the origin of the newest such step, from the event nonfinite_origin: {origin}."
    fix = f"look at {place}"
    if finding.rule == "H806":
        # Its fix says how to find and drop the samples, whatever the origin is.
        fix = f"{finding.fix} Look at {place}"
    return dataclasses.replace(finding, fix=fix)
