"""The order of findings: causes first, and what they explain last."""

from __future__ import annotations

from typing import Any

from holdfast.learning.finding import EXPLAINED_BY, Finding, in_order
from holdfast.learning.rules.judge import learning_rules


def found(rule: str, severity: Any = "advice", kind: Any = "cause", **fields: Any) -> Finding:
    return Finding(
        rule=rule,
        severity=severity,
        kind=kind,
        **{"confidence": 0.9, **fields},
        what="This.",
        fix="That.",
    )


def test_a_chain_of_symptoms_is_reported_by_its_root() -> None:
    """Of a NaN sample, its loss, its gradient and its weights only the sample stays loud."""
    chain = [found(rule, "error", "symptom") for rule in ("H804", "H802", "H801")]
    found_all = in_order([*chain, found("H806", "error")])
    assert found_all[0].rule == "H806"
    assert [finding.severity for finding in found_all] == ["error", "note", "note", "note"]


def test_a_note_explains_nothing() -> None:
    """What is only worth knowing does not silence a symptom."""
    found_all = in_order([found("H814", "note"), found("H828", kind="symptom")])
    assert [(finding.rule, finding.severity) for finding in found_all] == [
        ("H828", "advice"),
        ("H814", "note"),
    ]


def test_causes_come_before_symptoms_and_errors_before_advice() -> None:
    """The first line is what can be fixed."""
    given = [
        found("H843"),
        found("H801", "error", "symptom"),
        found("H836", "error"),
        found("H814", "note"),
    ]
    assert [finding.rule for finding in in_order(given)] == ["H836", "H843", "H801", "H814"]


def test_the_same_rule_at_the_same_place_is_reported_once() -> None:
    """A finding of every judgement is one finding."""
    assert len(in_order([found("H811"), found("H811"), found("H811", where="critic")])) == 2


def test_explanations_name_rules_that_exist_and_have_no_circle() -> None:
    """The table of explanations is made of real rules, and none explains what explains it."""
    known = learning_rules().keys()
    assert {*EXPLAINED_BY, *(rule for rules in EXPLAINED_BY.values() for rule in rules)} <= known
    assert not [
        (a, b) for a, rules in EXPLAINED_BY.items() for b in rules if a in EXPLAINED_BY.get(b, ())
    ]
