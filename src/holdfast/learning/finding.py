"""`Finding`: one thing that was found to be wrong with a run, and the order in which findings are told.

The order is the diagnosis: causes before symptoms, and a symptom that a found cause explains is said last, as its
consequence. What the rules are lies in the modules of the rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "advice", "note"]
Kind = Literal["cause", "symptom"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding of the diagnosis.

    Args:
        rule: Id of the rule, such as ``"H811"``; `holdfast explain H811` says more.
        severity: ``"error"``: a contract is broken, the run cannot be right. ``"advice"``: very likely a fault.
            ``"note"``: worth knowing, often intended.
        kind: Whether the rule names a cause, or only a symptom that may have several.
        confidence: Between 0 and 1: how often the rule is right when it speaks, as far as measured.
        what: What was found, one sentence.
        evidence: The numbers and texts that it rests on; can be written as JSON.
        fix: What to do, one sentence.
        where: The parameter, module, optimizer or call that it is about, if it is about one.
    """

    rule: str
    severity: Severity
    kind: Kind
    confidence: float
    what: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fix: str
    where: str = ""

    def __str__(self) -> str:
        place = f" ({self.where})" if self.where else ""
        return f"{self.what}{place}\nFix: {self.fix}\n[{self.rule}] run `holdfast explain {self.rule}`"

    def as_json(self) -> dict[str, Any]:
        """Return the finding as plain data, for an event."""
        return {**dataclasses.asdict(self), "evidence": dict(self.evidence)}


_SEVERITIES: tuple[Severity, ...] = ("error", "advice", "note")


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with the most important first, and without those that others explain.

    A finding that a present cause explains (see `EXPLAINS`) becomes a note at the end; of equal rules at equal
    places the first stays.
    """
    unique: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        unique.setdefault((finding.rule, finding.where), finding)
    speaking = {finding.rule for finding in unique.values() if finding.severity != "note"}
    explained = {
        symptom: cause
        for cause in sorted(speaking)
        for symptom in EXPLAINS.get(cause, ())
        if cause not in EXPLAINS.get(symptom, ())
    }
    told = [demoted(finding, explained.get(finding.rule)) for finding in unique.values()]
    return sorted(told, key=lambda finding: _rank(finding, consequence=finding.rule in explained))


def demoted(finding: Finding, cause: str | None) -> Finding:
    """Return a finding as a note about what follows from a cause; None: as it is."""
    if cause is None or finding.severity == "note":
        return finding
    return dataclasses.replace(
        finding, severity="note", kind="symptom", evidence={**finding.evidence, "follows_from": cause}
    )


def with_origin(finding: Finding, traced: str | None) -> Finding:
    """Return a finding about NaN or Inf with what was traced, in place of a list of usual causes.

    Args:
        finding: Any; others stay as they are.
        traced: Why the newest such step was not made, with the origin and the sample; None: nothing was traced.
    """
    if traced is None or finding.rule not in ("H801", "H802", "H806"):
        return finding
    begins = f"{finding.fix.rstrip('.')}. Look" if finding.rule == "H806" else "look"
    fix = f"{begins} at what was traced for the newest such step, and lies in the event nonfinite_origin: {traced}."
    return dataclasses.replace(finding, fix=fix, evidence={**finding.evidence, "traced": traced})


def _rank(finding: Finding, *, consequence: bool) -> tuple[bool, bool, int, float]:
    # A symptom of level error still comes after a cause of level advice: the cause is what can be mended.
    aside = consequence or finding.severity == "note"
    return aside, finding.kind == "symptom", _SEVERITIES.index(finding.severity), -finding.confidence


# What a run that gets nowhere looks like, whatever the reason.
_NO_PROGRESS = ("H823", "H824", "H826", "H828", "H830", "H832")
_BROKEN = ("H801", "H802", "H804", "H805", "H827")
_DEAD = ("H815", "H847", "H848")
EXPLAINS: Mapping[str, tuple[str, ...]] = {
    "H806": (*_BROKEN, *_NO_PROGRESS),
    "H807": (*_BROKEN, *_NO_PROGRESS, "H825", "H848"),
    "H809": ("H808", "H812", "H813", *_NO_PROGRESS),
    "H810": ("H808", "H813", *_NO_PROGRESS),
    "H811": (*_BROKEN, *_NO_PROGRESS, "H825", *_DEAD),
    "H812": ("H808", *_NO_PROGRESS),
    "H813": ("H814", *_NO_PROGRESS),
    "H814": _NO_PROGRESS,
    "H817": ("H815", *_BROKEN, *_NO_PROGRESS, "H825"),
    "H818": _NO_PROGRESS,
    "H819": _NO_PROGRESS,
    "H820": ("H819", *_NO_PROGRESS),
    "H822": (*_NO_PROGRESS, *_DEAD),
    "H825": (*_BROKEN, *_NO_PROGRESS, "H815", "H847"),
    "H831": (*_BROKEN, *_NO_PROGRESS, "H825", *_DEAD),
    "H836": (*_NO_PROGRESS, *_DEAD),
    "H837": (*_NO_PROGRESS, *_DEAD),
    "H838": (*_NO_PROGRESS, *_DEAD),
    "H839": (*_BROKEN, *_NO_PROGRESS, "H825", *_DEAD),
    "H840": (*_BROKEN, *_NO_PROGRESS, "H825", *_DEAD),
    "H841": _NO_PROGRESS,
    "H842": (*_NO_PROGRESS, "H839"),
    "H843": (*_NO_PROGRESS, *_DEAD, "H825", "H827"),
    "H847": ("H815", *_NO_PROGRESS),
    "H848": ("H801", "H802", "H804", *_NO_PROGRESS, "H847"),
    "H844": ("H845", *_NO_PROGRESS),
    "H854": ("H819", *_NO_PROGRESS),
    "H855": (*_NO_PROGRESS, *_DEAD),
    "H856": (*_DEAD, "H825"),
    # Among symptoms the earlier in the chain: a loss, then its gradient, then the weights, then no progress.
    "H801": ("H802", "H804", "H805", *_NO_PROGRESS),
    "H802": ("H804", "H805", *_NO_PROGRESS),
    "H804": ("H805", "H826", "H828", "H832"),
    "H826": ("H828", "H832", "H827"),
    "H815": ("H823", "H828", "H832", "H830"),
    "H824": ("H823", "H828", "H832", "H830"),
    "H830": ("H832",),
}
"""For each rule those that then only repeat it: one thing is wrong, and it is told once."""
