"""Every rule about learning speaks on a recording of its fault and is silent on a healthy one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.learning.observations import (
    Observations,
    ObservedInput,
    ObservedLayer,
    ObservedLoss,
    ObservedModel,
    ObservedOptimizer,
    ObservedScheduler,
)
from holdfast.learning.rules.judge import Findings, judge, learning_rules
from holdfast.learning.rules.loss_progress import measure_progress
from holdfast.learning.rules.registry import RETIRED

FALLING = [(i, 2.3 * math.exp(-i / 60) + 0.02 * (i % 3)) for i in range(200)]
STILL = [(i, 2.3 + 0.02 * (i % 3)) for i in range(200)]
RISING = [(i, 1.0 + 0.1 * i) for i in range(200)]

OPTIMIZER = ObservedOptimizer(
    kind="SGD",
    steps=400,
    observed=70,
    tensors=4,
    lr=0.1,
    largest_lr=0.1,
    with_gradient_steps=70,
    checked=8,
    moved=70,
    losses=FALLING,
    gradient_norms=[1.0, 1.5, 0.8] * 30,
)
LAYER = ObservedLayer(
    dims=2,
    steps=70,
    with_gradient=70,
    ratio=1e-3,
    largest_ratio=1e-2,
    gradient_rms=1e-2,
    first_weight_rms=0.1,
    last_weight_rms=0.1,
)
HEALTHY = {
    "optimizer": OPTIMIZER,
    "model": ObservedModel(weights=1000, changed=True, observed=70, mode_dependent=["drop"]),
    "site": ObservedLoss(
        function="cross_entropy",
        calls=70,
        examined=70,
        values=[loss for _, loss in FALLING],
        baseline=2.3,
        signs=[1] * 70,
        labelled_calls=70,
        distinct_labels=9.6,
        expected_labels=9.7,
        first=2.3,
    ),
    "input": ObservedInput(calls=70, examined=70, largest=3.0, offset=0.1),
    "scheduler": ObservedScheduler(kind="StepLR", optimizer_steps=400, advanced=10, period=30),
    "layer": LAYER,
}
FLAGS = (
    "beyond_",
    "target_out",
    "softmax_input",
    "relu_",
    "sigmoid_",
    "positive",
    "not_norm",
    "broadcast",
    "batch_axis",
    "clamped",
)


def recording(**changed: Any) -> Observations:
    """A healthy run, with some facts changed.

    ``optimizer=``, ``model=`` and so on merge into the one there is.
    """
    made: dict[str, Any] = {}
    for name, part in HEALTHY.items():
        fields = dict(changed.pop(name, {}))
        flags = {key: fields.pop(key) for key in list(fields) if key.startswith(FLAGS)}
        made[name] = replace(part, **fields)  # type: ignore[type-var]
        if flags:
            made[name].flags = type(made[name].flags)(flags)
    whole: dict[str, Any] = {
        "steps": 400,
        "ended": True,
        "backwards": 400,
        "optimizers": {"optimizer": made["optimizer"]},
        "models": {"model": made["model"]},
        "losses": {"cross_entropy#1": made["site"]},
        "inputs": {"model": made["input"]},
        "schedulers": {"scheduler": made["scheduler"]},
        "layers": {"a.weight": made["layer"], "b.weight": LAYER, "c.weight": LAYER},
    }
    return Observations(**whole | changed)


UNLEARNT: dict[str, Any] = {
    "optimizer": {"losses": STILL},
    "site": {"values": [loss for _, loss in STILL]},
}
# Worse than the best constant, as after steps that were too large.
DESTROYED: dict[str, Any] = {
    "optimizer": {"losses": STILL},
    "site": {"values": [1.1 * loss for _, loss in STILL]},
}
OVERFIT = [(40 * i, 1.0 / (i + 1), 1.0 - 0.1 * i if i < 4 else 0.5 + 0.2 * i) for i in range(9)]
FIT = [(40 * i, 1.0 / (i + 1), 1.0 - 0.1 * i) for i in range(9)]
ALIGNED = {"diagonality": 0.9, "sharpness": 0.7, "share_at_max_decoder": 0.0, "utterances": 16}
PLAYERS = {
    "critic": replace(OPTIMIZER, losses=[(i, max(0.001, 1 - i / 20)) for i in range(100)]),
    "maker": replace(OPTIMIZER, gradient_norms=[1.0] * 30 + [0.001] * 60),
}


def with_(base: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Merge one level deeper than ``|``."""
    return base | {
        key: {**base[key], **value} if key in base else value for key, value in more.items()
    }


def part(name: str) -> Callable[..., dict[str, Any]]:
    return lambda **fields: {name: fields}


optimizer, site = part("optimizer"), part("site")

# Rule, loud (error or advice), the faulty facts, and facts that are near the fault and healthy;
# more in `rules.yaml`.
TABLE: list[tuple[str, bool, dict[str, Any], dict[str, Any]]] = [
    (
        "H824",
        True,
        {**UNLEARNT, "layers": {"a": replace(LAYER, ratio=1e-09, largest_ratio=1e-08)}},
        {"layers": {"a": replace(LAYER, ratio=1e-09, largest_ratio=1e-08)}},
    ),
    (
        "H825",
        True,
        {**DESTROYED, "layers": {"a": replace(LAYER, largest_ratio=4.0)}},
        {"layers": {"a": replace(LAYER, largest_ratio=4.0)}},
    ),
    (
        "H825",
        True,
        {**DESTROYED, "layers": {"a": replace(LAYER, largest_ratio=4.0)}},
        {**UNLEARNT, "layers": {"a": replace(LAYER, largest_ratio=4.0)}},
    ),
    (
        "H825",
        True,
        optimizer(nonfinite_losses=1) | {"layers": {"a": replace(LAYER, largest_ratio=4.0)}},
        with_(
            optimizer(nonfinite_losses=1),
            input={"nonfinite": 1},
            layers={"a": replace(LAYER, largest_ratio=4.0)},
        ),
    ),
    (
        "H826",
        True,
        optimizer(losses=RISING),
        {"objective": "adversarial"} | optimizer(losses=RISING),
    ),
    ("H833", True, {"validations": OVERFIT}, {"validations": FIT}),
    ("H840", True, site(signs=[-1] * 70), site(signs=[-1, 1] * 35)),
    ("H853", True, {"objective": "adversarial", "optimizers": PLAYERS}, {"optimizers": PLAYERS}),
]


def changed(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a case of `rules.yaml`, on top of those of a run that has learnt
    nothing if it says so.
    """
    return with_(UNLEARNT, **facts) if facts.pop("unlearnt", False) else facts


CASES = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8"))
TABLE += [
    (rule, weight == "loud", changed(faulty), changed(healthy))
    for rule, weight, faulty, healthy in CASES
]


def severities(facts: Observations, rule: str) -> list[str]:
    """Return the severities of what one rule finds."""
    learning_rule = learning_rules()[rule]
    return [finding.severity for finding in learning_rule.check(facts, learning_rule)]


def everything(facts: Observations) -> list[Any]:
    return judge(facts, "contract") + judge(facts, "window")


@pytest.mark.parametrize(("rule", "loud", "faulty", "healthy"), TABLE)
def test_a_rule_speaks_on_its_fault_and_not_next_to_it(
    rule: str, loud: bool, faulty: dict[str, Any], healthy: dict[str, Any]
) -> None:
    """Each rule finds its recording, with the right weight, and is silent on a healthy
    neighbour.
    """
    found = severities(recording(**faulty), rule)
    assert found
    assert any(severity != "note" for severity in found) == loud
    assert all(severity == "note" for severity in severities(recording(**healthy), rule)), (
        "a false alarm"
    )


def test_a_healthy_recording_is_silent() -> None:
    """No rule says anything, not even a note, about the run that all others are made from."""
    assert everything(recording()) == []


def test_every_rule_has_a_recording() -> None:
    """No rule is left out of the table."""
    assert {rule for rule, *_ in TABLE} == set(learning_rules())


def test_missing_facts_make_every_rule_silent() -> None:
    """An observer that saw nothing gives no finding and no error."""
    assert everything(Observations()) == []


def test_an_ignored_rule_is_silent_and_the_others_are_not() -> None:
    """``ignore`` works by id."""
    facts = recording(optimizer={"leaks": 30, "zeroed": 60})
    assert [finding.rule for finding in judge(facts, "contract", ignore=("H811",))] == ["H817"]


def test_a_slow_starter_is_forgiven_by_the_next_judgement() -> None:
    """Contracts stay; what a window said is replaced, and each finding is new only once."""
    kept = Findings()
    kept.judge(recording(validations=OVERFIT, scheduler={"advanced_several": 399}), windows=True)
    assert {finding.rule for finding in kept.take_fresh()} == {"H820", "H833"}
    kept.judge(recording(), windows=True)
    assert [finding.rule for finding in kept.all()] == ["H820"]
    kept.judge(recording(validations=OVERFIT), windows=True)
    assert kept.take_fresh() == []


def test_what_is_not_right_often_enough_is_only_said_on_request() -> None:
    """A run that learns nothing is a finding for those who ask, and for nobody else."""
    kept = Findings()
    kept.judge(recording(**UNLEARNT), windows=True)

    assert [finding.rule for finding in kept.all()] == ["H828"]
    assert kept.reported() == []
    assert kept.take_fresh() == []


def test_an_id_is_never_used_again() -> None:
    """What an old run recorded keeps its meaning."""
    assert not RETIRED & set(learning_rules())


@pytest.mark.parametrize(
    ("change", "state"),
    [
        ({}, "learning"),
        (UNLEARNT, "constant"),
        ({"optimizer": {"losses": RISING}}, "diverged"),
        ({"optimizer": {"losses": FALLING[:20]}}, "unknown"),
        ({"objective": "adversarial", **UNLEARNT}, "unknown"),
        ({"optimizers": PLAYERS}, "unknown"),
        ({"optimizer": {"losses": STILL}, "site": {"baseline": None}}, "flat"),
        (with_(UNLEARNT, site={"gains": [0.02, 0.01] * 20}), "learning"),
        (with_(UNLEARNT, site={"gains": [0.02, -0.02] * 20}), "constant"),
    ],
)
def test_progress_is_read_from_losses_only_where_their_level_means_something(
    change: dict[str, Any], state: str
) -> None:
    """Players with losses of their own, other objectives and short runs are not judged by the
    level of a loss.
    """
    assert measure_progress(recording(**change)).state == state
