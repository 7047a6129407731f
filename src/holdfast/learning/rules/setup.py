"""Contracts about what was put together.

Which weights an optimizer holds, how they start, modes, dropout.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.learning.facts import Facts, InputFacts, ModelFacts, OptimizerFacts
from holdfast.learning.finding import Finding
from holdfast.learning.rules.registry import Say, advice_if, checks

_SETTLED = 3
"""Steps after which a gradient that has not come will not come for another reason than a fault of
the set-up."""


@checks(rule="H808", tier="contract", severity="note", kind="cause", confidence=0.8)
def _weights_outside(facts: Facts, say: Say) -> Iterator[Finding]:
    if facts.steps < _SETTLED:
        return
    if facts.strays:
        what = f"the model computes with {facts.strays} trainable parameter(s) that are not its own"
        fix = "put layers into nn.ModuleList or nn.ModuleDict instead of a list or a dict."
        yield say(f"{what} and in no optimizer", fix, severity="advice")
    for name, model in facts.models.items():
        if not model.outside_count:
            continue
        share = model.outside_weights / max(1, model.weights)
        served = model.outside_with_gradient > 0 or (model.outside_drawn > 1 and share > 0.5)
        served = served and share < 1 and not model.outside_changed
        what = (
            f"{model.outside_count} trainable parameter(s), {share:.0%} of the weights, are in no"
            " optimizer: "
        )
        what += ", ".join(model.outside)
        fix = (
            "pass them to the optimizer, or call requires_grad_(False) on them if they are meant to"
            " stay."
        )
        yield say(what, fix, name, severity=advice_if(served))


@checks(
    rule="H860", tier="contract", severity="advice", kind="cause", confidence=0.75, each="models"
)
def _learns_beside_noise(facts: Facts, say: Say, name: str, model: ModelFacts) -> Iterator[Finding]:
    # One or two layers of random features, or a reservoir, are meant so; a backbone has more.
    if len(model.still_drawn) >= 3 and facts.steps >= _SETTLED:
        count = len(model.still_drawn)
        what = (
            f"less than 5% of the weights learn; the {count} frozen matrices are as an initialiser"
            " draws them: "
        )
        fix = (
            "load the pretrained weights before freezing, or do not freeze; name in frozen= what is"
            " meant so."
        )
        yield say(what + ", ".join(model.still_drawn[:5]), fix, name)


@checks(
    rule="H809", tier="contract", severity="error", kind="cause", confidence=0.95, each="optimizers"
)
def _foreign_parameters(
    facts: Facts, say: Say, name: str, optimizer: OptimizerFacts
) -> Iterator[Finding]:
    replaced, foreign = optimizer.replaced, optimizer.foreign
    settled = optimizer.observed >= _SETTLED and facts.backwards >= _SETTLED
    if replaced or (settled and foreign > 0 and optimizer.foreign_with_gradient == 0):
        what = (
            f"the optimizer holds {foreign} of {optimizer.tensors} tensors that the model does not"
            " have (any more) and that get no gradient"
        )
        fix = (
            "make the optimizer after the model has its final form: after .to(), deepcopy, replaced"
            " layers."
        )
        yield say(
            what,
            fix,
            name,
            severity="error" if foreign == optimizer.tensors or replaced else "advice",
        )


@checks(
    rule="H810", tier="contract", severity="error", kind="cause", confidence=0.95, each="optimizers"
)
def _only_frozen(facts: Facts, say: Say, name: str, optimizer: OptimizerFacts) -> Iterator[Finding]:
    # Phases that freeze one player for a while are healthy: it must never have had a gradient.
    idle = optimizer.with_gradient_steps == 0 and (optimizer.observed >= _SETTLED or facts.ended)
    if idle and 0 < optimizer.tensors == optimizer.frozen:
        what = f"all {optimizer.tensors} tensors of the optimizer have requires_grad=False"
        yield say(
            what,
            "call requires_grad_(True) on what shall learn before the optimizer is made.",
            name,
        )


@checks(rule="H822", tier="contract", severity="error", kind="cause", confidence=0.95)
def _symmetric_start(facts: Facts, say: Say) -> Iterator[Finding]:
    moved = any(optimizer.moved >= 5 for optimizer in facts.optimizers.values())
    for name, model in facts.models.items():
        if model.symmetric and moved and facts.steps >= 20:
            what = (
                f"after {facts.steps} steps all units of {', '.join(model.symmetric)} are still"
                " identical"
            )
            fix = (
                "start from random weights: zeros or one constant give every unit the same gradient"
                " for ever."
            )
            yield say(what, fix, name)


@checks(
    rule="H834", tier="contract", severity="advice", kind="cause", confidence=0.8, each="models"
)
def _wrong_mode(_: Facts, say: Say, name: str, model: ModelFacts) -> Iterator[Finding]:
    modal = ", ".join(model.modal)
    if model.eval_steps >= 5 and model.eval_steps > 0.1 * model.observed:
        what = (
            f"{model.eval_steps} of {model.observed} observed steps were made in evaluation mode,"
            f" although {modal} behave(s) differently in training"
        )
        yield say(what, "call model.train() after each evaluation.", name)
    if model.train_mode_validations >= 2 and model.train_mode_validations == model.validations:
        what = f"all {model.validations} evaluations ran in training mode, with {modal} active"
        fix = "call model.eval() before an evaluation and model.train() after it."
        yield say(what, fix, f"{name} in evaluation")


@checks(
    rule="H835", tier="contract", severity="advice", kind="cause", confidence=0.7, each="inputs"
)
def _normalised_alone(facts: Facts, say: Say, name: str, given: InputFacts) -> Iterator[Finding]:
    if facts.models[name].batch_norm and given.calls >= 10 and 0 < given.largest_batch < 4:
        what = f"batch norm computes its statistics from {given.largest_batch} sample(s)"
        yield say(
            what, "use larger batches, or GroupNorm, which does not depend on the batch.", name
        )


@checks(
    rule="H857", tier="contract", severity="advice", kind="cause", confidence=0.8, each="models"
)
def _nearly_all_dropped(_: Facts, say: Say, name: str, model: ModelFacts) -> Iterator[Finding]:
    # UMLAUT warns from 0.5, which healthy models use; 0.85 and more keep one unit in seven.
    if model.dropout >= 0.85 and model.observed > model.eval_steps:
        what = f"a dropout layer drops {model.dropout:.0%} of its inputs"
        yield say(
            what,
            "p is the share that is dropped, not the share that is kept: use 0.1 to 0.5.",
            name,
        )
