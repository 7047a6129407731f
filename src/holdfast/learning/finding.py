"""`Finding`: a problem that the diagnosis has found in a run. `in_order` sorts findings.

Causes come before symptoms. If another finding explains a symptom, the symptom is reported last, as
a note, so that a single mistake is not reported several times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "advice", "note"]
Kind = Literal["cause", "symptom"]

# Severities, from most to least important.
SEVERITIES: tuple[Severity, ...] = ("error", "advice", "note")
# Rules about NaN or Inf, whose origin a guard may have traced.
NONFINITE_RULES = frozenset({"H801", "H802", "H806"})

# Rules that report that the optimizer does not receive the gradient of the loss, or that it
# maximizes the loss.
WRONG_GRADIENT = frozenset({"H811", "H817", "H831", "H840", "H859"})
# Rules that report that a loss function receives arguments that it is not meant for.
WRONG_ARGUMENTS = frozenset({"H836", "H837", "H838", "H839", "H855"})
# Rules that report that weights receive no usable gradient.
NOTHING_LEARNS = frozenset({"H808", "H809", "H810", "H812", "H813", "H814", "H822"})

CAUSES_OF_NONFINITE = WRONG_GRADIENT | {"H806", "H825", "H839", "H848"}
CAUSES_OF_LOST_GRADIENT = WRONG_GRADIENT | WRONG_ARGUMENTS | {"H822", "H843", "H856"}
CAUSES_OF_NO_PROGRESS = (
    WRONG_GRADIENT
    | WRONG_ARGUMENTS
    | NOTHING_LEARNS
    | {"H801", "H802", "H806", "H819", "H820", "H825", "H841", "H842", "H843", "H848", "H854"}
)

# For each rule, the rules whose findings explain its own findings. A symptom may also explain later
# symptoms, in this order: the loss, its gradient, the weights, the lack of progress.
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
    """A problem that the diagnosis has found in a run.

    Args:
        rule: Id of the rule, such as ``"H811"``. `holdfast explain H811` shows its page.
        severity: ``"error"`` if the run cannot be correct. ``"advice"`` for a very likely mistake.
            ``"note"`` for a fact that is worth knowing but often intended.
        kind: Whether the rule reports a cause, or a symptom that may have several causes.
        confidence: The share of this rule's reports that are correct, from 0 to 1. It is measured
            if there is data, and estimated otherwise.
        what: What is wrong, in one sentence.
        fix: What to do, in one sentence.
        where: The affected parameter, module, optimizer or call, or an empty string.
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
    """Sort findings by importance, after turning those that other findings explain into notes.

    If several findings have the same rule and the same `Finding.where`, only the first one is kept.
    """
    unique: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        unique.setdefault((finding.rule, finding.where), finding)
    # Notes do not explain other findings, because they are often intended.
    explaining = {finding.rule for finding in unique.values() if finding.severity != "note"}
    reported = []
    for finding in unique.values():
        is_explained = not explaining.isdisjoint(EXPLAINED_BY.get(finding.rule, ()))
        if is_explained and finding.severity != "note":
            finding = dataclasses.replace(finding, severity="note", kind="symptom")
        reported.append(finding)
    return sorted(reported, key=_importance)


def _importance(finding: Finding) -> tuple[bool, str, int, float]:
    """Return the sort key of a finding, which is lower for more important findings.

    A symptom with severity "error" comes after a cause with severity "advice", because only causes
    can be fixed.
    """
    return (
        finding.severity == "note",
        finding.kind,
        SEVERITIES.index(finding.severity),
        -finding.confidence,
    )


def with_origin(finding: Finding, origin: str | None) -> Finding:
    """Return a finding about NaN or Inf with a fix that names the traced origin.

    Args:
        finding: Any finding. If it is not about NaN or Inf, it is returned unchanged.
        origin: Why the guard rejected the last step with NaN or Inf, including the traced origin
            and the affected sample. None if no origin was traced.
    """
    if origin is None or finding.rule not in NONFINITE_RULES:
        return finding
    place = f"the origin in the most recent such step (event nonfinite_origin): {origin}."
    fix = f"look at {place}"
    if finding.rule == "H806":
        # The fix of H806 explains how to find and drop bad samples, which helps for any origin.
        fix = f"{finding.fix} Look at {place}"
    return dataclasses.replace(finding, fix=fix)
