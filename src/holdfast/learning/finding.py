"""`Finding`: one thing that was found to be wrong with a run, and the order of findings.

The order is the diagnosis: causes before symptoms, and a symptom that a found cause explains comes
    last, as its
consequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import yaml

Severity = Literal["error", "advice", "note"]
Kind = Literal["cause", "symptom"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding of the diagnosis.

    Args:
        rule: Id of the rule, such as ``"H811"``; `holdfast explain H811` says more.
        severity: ``"error"``: a contract is broken, the run cannot be right. ``"advice"``: very
            likely a fault. ``"note"``: worth knowing, often intended.
        kind: Whether the rule names a cause, or only a symptom that may have several.
        confidence: Between 0 and 1: how often the rule is right when it speaks, as far as measured.
        what: What was found, one sentence.
        fix: What to do, one sentence.
        where: The parameter, module, optimizer or call that it is about, if it is about one.
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


_SEVERITIES: tuple[Severity, ...] = ("error", "advice", "note")


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with the most important first, and without those that others explain.

    A finding that a present cause explains (see `EXPLAINED_BY`) becomes a note at the end; of equal
    rules at equal places the first stays.
    """
    unique: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        unique.setdefault((finding.rule, finding.where), finding)
    speaking = {finding.rule for finding in unique.values() if finding.severity != "note"}
    explained = {
        rule: max(speaking & causes, default=None) for rule, causes in EXPLAINED_BY.items()
    }
    found = [demoted(finding, explained.get(finding.rule)) for finding in unique.values()]
    # A symptom of level error still comes after a cause of level advice: the cause is what can be
    # fixed.
    return sorted(
        found,
        key=lambda f: (f.severity == "note", f.kind, _SEVERITIES.index(f.severity), -f.confidence),
    )


def demoted(finding: Finding, cause: str | None) -> Finding:
    """Return a finding as a note about what follows from a cause; None: as it is."""
    if cause is None or finding.severity == "note":
        return finding
    return dataclasses.replace(finding, severity="note", kind="symptom")


def with_origin(finding: Finding, traced: str | None) -> Finding:
    """Return a finding about NaN or Inf with what was traced, in place of a list of usual causes;
    others as they are.

    `traced` says why the newest such step was not made, with the origin and the sample; None:
    nothing was traced.
    """
    if traced is None or finding.rule not in ("H801", "H802", "H806"):
        return finding
    begins = f"{finding.fix.rstrip('.')}. Look" if finding.rule == "H806" else "look"
    fix = (
        f"{begins} at the origin of the newest such step, from the event nonfinite_origin:"
        f" {traced}."
    )
    return dataclasses.replace(finding, fix=fix)


_EXPLANATIONS = (
    resources.files(__package__).joinpath("explanations.yaml").read_text(encoding="utf-8")
)
EXPLAINED_BY: Mapping[str, frozenset[str]] = {
    symptom: frozenset(causes.split()) for symptom, causes in yaml.safe_load(_EXPLANATIONS).items()
}
"""For each rule those that explain it, so that it only repeats them.

One thing is wrong, and it is reported once.
"""
