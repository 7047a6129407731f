"""Every rule about learning speaks on a recording of its fault and is silent on a healthy one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from holdfast.learning.facts import (
    Facts,
    InputFacts,
    LayerFacts,
    LossFacts,
    ModelFacts,
    OptimizerFacts,
    SchedulerFacts,
)
from holdfast.learning.rules.judge import Findings, judge, learning_rules
from holdfast.learning.rules.progress import progress_of

FALLING = [(i, 2.3 * math.exp(-i / 60) + 0.02 * (i % 3)) for i in range(200)]
STILL = [(i, 2.3 + 0.02 * (i % 3)) for i in range(200)]
RISING = [(i, 1.0 + 0.1 * i) for i in range(200)]

OPTIMIZER = OptimizerFacts(
    kind="SGD", steps=400, observed=70, tensors=4, lr=0.1, largest_lr=0.1, with_gradient_steps=70, clean_starts=30,
    scaled=1.0, moved=70, losses=FALLING, gradient_norms=[1.0, 1.5, 0.8] * 30,
)  # fmt: skip
LAYER = LayerFacts(
    elements=100, dims=2, steps=70, with_gradient=70, ratio=1e-3, largest_ratio=1e-2, gradient_rms=1e-2,
    first_weight_rms=0.1, last_weight_rms=0.1,
)  # fmt: skip
HEALTHY = {
    "optimizer": OPTIMIZER,
    "model": ModelFacts(weights=1000, changed=True, observed=70, modal=["drop"], dropout=0.1, batch_norm=True),
    "site": LossFacts(
        function="cross_entropy", calls=70, values=[loss for _, loss in FALLING], baseline=2.3, signs=[1] * 70,
        labelled_calls=70, distinct_labels=9.6, expected_labels=9.7, first=2.3, target_sizes=[1.0] * 70,
    ),
    "input": InputFacts(
        calls=70, batch=32, largest_batch=32, different=70, fingerprints=70, compared_pairs=70, longest_repeat=1,
        largest=3.0, offset=0.1, answers=70,
    ),
    "scheduler": SchedulerFacts(kind="StepLR", optimizer_steps=400, advanced=10, period=30),
    "layer": LAYER,
}  # fmt: skip
FLAGS = (
    "beyond_", "target_out", "softmax_input", "rectified", "sigmoid_", "unit_", "positive", "not_norm", "broadcast",
    "batch_axis", "clamped",
)  # fmt: skip


def recording(**changed: Any) -> Facts:
    """A healthy run, with some facts changed: ``optimizer=``, ``model=`` and so on merge into the one there is."""
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
    return Facts(**whole | changed)


UNLEARNT: dict[str, Any] = {"optimizer": {"losses": STILL}, "site": {"values": [loss for _, loss in STILL]}}
OVERFIT = [(40 * i, 1.0 / (i + 1), 1.0 - 0.1 * i if i < 4 else 0.5 + 0.2 * i) for i in range(9)]
FIT = [(40 * i, 1.0 / (i + 1), 1.0 - 0.1 * i) for i in range(9)]
ALIGNED = {"diagonality": 0.9, "sharpness": 0.7, "share_at_max_decoder": 0.0, "utterances": 16}
PLAYERS = {
    "critic": replace(OPTIMIZER, losses=[(i, max(0.001, 1 - i / 20)) for i in range(100)]),
    "maker": replace(OPTIMIZER, gradient_norms=[1.0] * 30 + [0.001] * 60),
}


def with_(base: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Merge one level deeper than ``|``."""
    return {key: {**base.get(key, {}), **more[key]} if key in more else base[key] for key in {**base, **more}}


def part(name: str) -> Callable[..., dict[str, Any]]:
    return lambda **fields: {name: fields}


optimizer, model, site, given = part("optimizer"), part("model"), part("site"), part("input")
scheduler, layer = part("scheduler"), part("layer")

# rule, loud (error or advice), the faulty facts, and facts that are near the fault and healthy
TABLE: list[tuple[str, bool, dict[str, Any], dict[str, Any]]] = [
    ("H801", True, optimizer(nonfinite_losses=2, first_nonfinite_loss=5), {}),
    ("H802", True, optimizer(nonfinite_gradients=1, first_nonfinite_gradient=5), {}),
    ("H804", True, layer(nonfinite=True), {}),
    ("H804", True, model(nonfinite_buffers=["bn.running_var"]), {}),
    ("H805", True, optimizer(nonfinite_state=["exp_avg_sq"]), {}),
    ("H806", True, given(nonfinite=1) | optimizer(nonfinite_losses=1), given(nonfinite=1)),
    ("H807", True, site(function="mse_loss", target_sizes=[2.0] * 60 + [99999.0]),
     site(function="mse_loss", target_sizes=[2.0] * 60 + [200.0])),
    ("H808", True, model(outside_count=2, outside_weights=800, outside_with_gradient=2, outside=["a"]),
     model(outside_count=2, outside_weights=800, outside_with_gradient=2, outside_changed=True)),
    ("H808", True, {"strays": 4}, {"strays": 0}),
    ("H837", True, site(function="mse_loss", beyond_relu=70), site(beyond_relu=5)),
    ("H855", True, site(function="mse_loss", beyond_tanh=70), site(beyond_tanh=5)),
    ("H855", True, site(function="cosine_embedding_loss", target_out_of_range=70), {}),
    ("H809", True, optimizer(foreign=4), optimizer(foreign=2, foreign_with_gradient=2)),
    ("H809", True, optimizer(foreign=1, replaced=1, foreign_with_gradient=1), {}),
    ("H810", True, optimizer(frozen=4, with_gradient_steps=0), optimizer(frozen=4)),
    ("H811", True, optimizer(leaks=30), optimizer(leaks=30, closure=True)),
    ("H812", True, {"steps": 0, "backwards_since_step": 50} | model(changed=False),
     {"steps": 400, "backwards_since_step": 3}),
    ("H813", True, optimizer(no_gradient_steps=10, with_gradient_steps=0), optimizer(no_gradient_steps=10)),
    ("H814", True, model(never_gradient_count=1, never_gradient_weights=10, never_gradient_first=True), {}),
    ("H815", True, optimizer(zero_gradient_steps=10), optimizer(zero_gradient_steps=3)),
    ("H817", True, optimizer(reversed=60), optimizer(reversed=3)),
    ("H817", True, optimizer(zeroed=60), {}),
    ("H818", False, optimizer(gradient_norms=[1.0] * 60, scaled_share=1.0), {}),
    ("H818", True,
     with_(UNLEARNT, optimizer={"gradient_norms": [1e-6] * 60, "clipped_steps": 9, "committed_steps": 9}),
     optimizer(gradient_norms=[1.0] * 60)),
    ("H818", True, optimizer(gradient_norms=[0.1] * 60, scaled_share=1.0, scaled=0.001),
     optimizer(kind="Adam", gradient_norms=[0.1] * 60, scaled_share=1.0, scaled=0.001)),
    ("H819", True, optimizer(zero_lr_steps=300), optimizer(zero_lr_steps=1, low_lr_steps=20)),
    ("H819", True, {"total_steps": 1000, "ended": False} | optimizer(zero_lr_steps=20), {}),
    ("H820", True, scheduler(before_first=1, every_step=399), scheduler(every_step=399, period=400, advanced=400)),
    ("H820", True, scheduler(every_step=399, advanced=400) | optimizer(low_lr_steps=300),
     scheduler(every_step=399, advanced=400)),
    ("H820", True, scheduler(several=399), {}),
    ("H821", True, scheduler(several=8, every_step=390), scheduler(several=1, every_step=398)),
    ("H822", True, model(symmetric=["0.weight"]), {"steps": 10} | model(symmetric=["0.weight"])),
    ("H823", True, layer(unmoved=70, elements=900), layer(unmoved=20, elements=900)),
    ("H824", True, {**UNLEARNT, "layers": {"a": replace(LAYER, ratio=1e-09, largest_ratio=1e-08)}},
     {"layers": {"a": replace(LAYER, ratio=1e-09, largest_ratio=1e-08)}}),
    ("H825", True, {**UNLEARNT, "layers": {"a": replace(LAYER, largest_ratio=4.0)}},
     {"layers": {"a": replace(LAYER, largest_ratio=4.0)}}),
    ("H826", True, optimizer(losses=RISING), {"objective": "adversarial"} | optimizer(losses=RISING)),
    ("H827", False, optimizer(losses=[*STILL[:150], (150, 400.0), *STILL[151:]]), {}),
    ("H828", True, UNLEARNT, {"objective": "reinforcement", **UNLEARNT}),
    ("H830", True, given(same_answers=70), given(same_answers=20)),
    ("H831", True, optimizer(maximize=True), {"objective": "adversarial"} | optimizer(maximize=True)),
    ("H832", True, optimizer(losses=STILL) | site(baseline=None), site(baseline=None)),
    ("H832", False, optimizer(losses=[(i, loss - 2.31) for i, loss in STILL]) | site(baseline=None), {}),
    ("H833", True, {"validations": OVERFIT}, {"validations": FIT}),
    ("H834", True, model(eval_steps=60), model(eval_steps=2)),
    ("H834", True, model(validations=5, train_mode_validations=5), model(validations=5, train_mode_validations=1)),
    ("H835", True, given(largest_batch=2), given(largest_batch=2) | model(batch_norm=False)),
    ("H836", True, site(softmax_input=70), site(softmax_input=5)),
    ("H837", True, site(rectified_source=70), site(rectified=10)),
    ("H837", True, site(rectified=70), site(rectified=70, softmax_input=70)),
    ("H838", True, site(function="binary_cross_entropy_with_logits", sigmoid_source=70),
     site(function="binary_cross_entropy_with_logits", unit_range=30)),
    ("H838", True, site(function="binary_cross_entropy_with_logits", unit_range=70, unit_spread=40),
     site(function="binary_cross_entropy_with_logits", unit_range=70)),
    ("H839", True, site(function="nll_loss", positive=70), site(function="nll_loss")),
    ("H839", True, site(function="nll_loss", not_normalised=70), {}),
    ("H840", True, site(signs=[-1] * 70), site(signs=[-1, 1] * 35)),
    ("H841", True, site(broadcast=70, shapes="(8, 1) and (8,)"), site(broadcast=1)),
    ("H842", True, site(batch_axis=70), site(batch_axis=1)),
    ("H843", True, site(distinct_labels=1.2), site(distinct_labels=8.0)),
    ("H844", True, given(constant=70), given(constant=10)),
    ("H844", True, site(constant_target=1.0, values=[2.3, 1.0, 0.001]),
     {"objective": "adversarial"} | site(constant_target=1.0, values=[2.3, 0.001])),
    ("H845", True, given(different=1, longest_repeat=70), given(different=35, longest_repeat=2)),
    ("H845", False, given(different=1, longest_repeat=70, batch=500), {}),
    ("H846", True, given(repeated_pairs=35, different=35), given(repeated_pairs=5)),
    ("H847", False, {"dead_units": {"1": [0.6, 0.7, 0.7]}}, {"dead_units": {"1": [0.9, 0.9]}}),
    ("H847", True, {"dead_units": {"1": [0.8, 0.9, 0.9]}, **UNLEARNT}, {"dead_units": {"1": [0.2, 0.9, 0.9]}}),
    ("H848", False, layer(gradient_rms=1e-07), layer(gradient_rms=0.0001)),
    ("H848", True, {**UNLEARNT} | layer(gradient_rms=1e-07), {}),
    ("H848", True, {"saturated": {"1": 0.95}, **UNLEARNT}, {"saturated": {"1": 0.4}, **UNLEARNT}),
    ("H848", True, with_(UNLEARNT, site={"first": 40.0}), site(first=40.0)),
    ("H852", True, {"alignment": {**ALIGNED, "diagonality": 0.2}}, {"alignment": ALIGNED}),
    ("H853", True, {"objective": "adversarial", "optimizers": PLAYERS}, {"optimizers": PLAYERS}),
    ("H854", True, scheduler(kind="ReduceLROnPlateau", every_step=399),
     scheduler(kind="ReduceLROnPlateau", every_step=10)),
    ("H855", True, site(function="binary_cross_entropy_with_logits", target_out_of_range=70),
     site(function="binary_cross_entropy_with_logits")),
    ("H855", True, site(function="kl_div", positive=70), site(function="kl_div")),
    ("H855", True, site(function="binary_cross_entropy", clamped_scores=70), {}),
    ("H856", True, {**UNLEARNT} | given(largest=255.0), model(normalised_input=True)),
    ("H856", False, given(largest=255.0), given(largest=60.0)),
    ("H857", True, model(dropout=0.95), model(dropout=0.7)),
    ("H858", True, optimizer(weight_decay=10.0), optimizer(weight_decay=0.1)),
]  # fmt: skip


def severities(facts: Facts, rule: str) -> list[str]:
    """Return the severities of what one rule finds."""
    return [finding.severity for finding in learning_rules()[rule].findings(facts)]


def everything(facts: Facts) -> list[Any]:
    return judge(facts, "contract") + judge(facts, "window")


@pytest.mark.parametrize(("rule", "loud", "faulty", "healthy"), TABLE)
def test_a_rule_speaks_on_its_fault_and_not_next_to_it(
    rule: str, loud: bool, faulty: dict[str, Any], healthy: dict[str, Any]
) -> None:
    """Each rule finds its recording, with the right weight, and is silent on a healthy neighbour."""
    found = severities(recording(**faulty), rule)
    assert found
    assert any(severity != "note" for severity in found) == loud
    assert all(severity == "note" for severity in severities(recording(**healthy), rule)), "a false alarm"


def test_a_healthy_recording_is_silent() -> None:
    """No rule says anything, not even a note, about the run that all others are made from."""
    assert everything(recording()) == []


def test_every_rule_has_a_recording() -> None:
    """No rule is left out of the table."""
    assert {rule for rule, *_ in TABLE} == set(learning_rules())


def test_missing_facts_make_every_rule_silent() -> None:
    """An observer that saw nothing gives no finding and no error."""
    assert everything(Facts()) == []


def test_an_ignored_rule_is_silent_and_the_others_are_not() -> None:
    """``ignore`` works by id."""
    facts = recording(optimizer={"leaks": 30, "zeroed": 60})
    assert [finding.rule for finding in judge(facts, "contract", ignore=("H811",))] == ["H817"]


def test_a_slow_starter_is_forgiven_by_the_next_judgement() -> None:
    """Contracts stay; what a window said is replaced, and each finding is new only once."""
    kept = Findings()

    def add(facts: Facts) -> None:
        kept.add(judge(facts, "contract"), judge(facts, "window"))

    add(recording(**UNLEARNT, scheduler={"several": 399}))
    assert {finding.rule for finding in kept.take_fresh()} == {"H820", "H828"}
    add(recording())
    assert [finding.rule for finding in kept.all()] == ["H820"]
    add(recording(**UNLEARNT))
    assert kept.take_fresh() == []


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
    ],
)
def test_progress_is_read_from_losses_only_where_their_level_means_something(
    change: dict[str, Any], state: str
) -> None:
    """Players with losses of their own, other objectives and short runs are not judged by the level of a loss."""
    assert progress_of(recording(**change)).state == state
