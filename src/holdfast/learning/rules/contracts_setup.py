"""Contracts about what was put together: which weights an optimizer holds, how they start, how much is dropped."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.learning.finding import Finding
from holdfast.learning.rules.registry import Facts, Say, checks, each

_SETTLED = 3
"""Steps after which a gradient that has not come will not come for another reason than a fault of the set-up."""


@checks(rule="H808", tier="contract", severity="note", kind="cause", confidence=0.5)
def weights_outside(facts: Facts, say: Say) -> Iterator[Finding]:
    """Some trainable weights are in no optimizer."""
    if facts.get("steps", 0) < _SETTLED:
        return
    strays = facts.get("strays", 0)
    if strays:
        yield say(
            f"the model computes with {strays} trainable parameter(s) that are not its own and in no optimizer",
            severity="advice",
            fix="put layers into nn.ModuleList or nn.ModuleDict instead of a list or a dict.",
            evidence={"count": strays},
        )
    for name, model in each(facts, "models"):
        if not model["outside_count"]:
            continue
        share = model["outside_weights"] / max(1, model["weights"])
        served = model["outside_with_gradient"] > 0 and share > 0.5 and not model["outside_changed"]
        yield say(
            f"{model['outside_count']} trainable parameter(s), {share:.0%} of the weights, are in no optimizer",
            severity="advice" if served and share < 1 else "note",
            fix="pass them to the optimizer, or call requires_grad_(False) on them if they are meant to stay.",
            evidence={"first": model["outside"], "share": share, "with_gradient": model["outside_with_gradient"]},
            where=name,
        )


@checks(rule="H809", tier="contract", severity="error", kind="cause", confidence=0.95)
def foreign_parameters(facts: Facts, say: Say) -> Iterator[Finding]:
    """An optimizer moves tensors that the model does not use."""
    for name, optimizer in each(facts, "optimizers"):
        replaced, foreign = optimizer["replaced"], optimizer["foreign"]
        settled = optimizer["observed"] >= _SETTLED and facts.get("backwards", 0) >= _SETTLED
        useless = settled and foreign > 0 and optimizer["foreign_with_gradient"] == 0
        if not (replaced or useless):
            continue
        whole = foreign == optimizer["tensors"] or replaced > 0
        yield say(
            f"the optimizer holds {foreign} of {optimizer['tensors']} tensors that the model does not have "
            "(any more) and that get no gradient",
            severity="error" if whole else "advice",
            fix="make the optimizer after the model has its final form: after .to(), deepcopy, replaced layers.",
            evidence={"foreign": foreign, "tensors": optimizer["tensors"], "replaced": replaced},
            where=name,
        )


@checks(rule="H810", tier="contract", severity="error", kind="cause", confidence=0.95)
def only_frozen(facts: Facts, say: Say) -> Iterator[Finding]:
    """An optimizer has nothing that could learn."""
    for name, optimizer in each(facts, "optimizers"):
        # Phases that freeze one player for a while are healthy: it must never have had a gradient.
        idle = optimizer["with_gradient_steps"] == 0 and (optimizer["observed"] >= _SETTLED or facts.get("ended"))
        if idle and 0 < optimizer["tensors"] == optimizer["frozen"]:
            yield say(
                f"all {optimizer['tensors']} tensors of the optimizer have requires_grad=False",
                fix="call requires_grad_(True) on what shall learn before the optimizer is made.",
                evidence={"tensors": optimizer["tensors"]},
                where=name,
            )


@checks(rule="H822", tier="contract", severity="error", kind="cause", confidence=0.95)
def symmetric_start(facts: Facts, say: Say) -> Iterator[Finding]:
    """The units of a layer started equal and stay equal."""
    moved = any(optimizer["moved"] >= 10 for _, optimizer in each(facts, "optimizers"))
    if facts.get("steps", 0) < 20 or not moved:
        return
    for name, model in each(facts, "models"):
        if model["symmetric"]:
            yield say(
                f"after {facts['steps']} steps all units of {', '.join(model['symmetric'])} are still identical",
                fix="start from random weights: zeros or one constant give every unit the same gradient for ever.",
                evidence={"parameters": model["symmetric"]},
                where=name,
            )


@checks(rule="H857", tier="contract", severity="advice", kind="cause", confidence=0.8)
def nearly_all_dropped(facts: Facts, say: Say) -> Iterator[Finding]:
    """Dropout leaves next to nothing."""
    for name, model in each(facts, "models"):
        # UMLAUT warns from 0.5 (numerics.md 4.1), which healthy models use; 0.85 and more keep one unit in seven.
        if model["dropout"] >= 0.85 and model["observed"] > model["eval_steps"]:
            yield say(
                f"a dropout layer drops {model['dropout']:.0%} of its inputs",
                fix="p is the share that is dropped, not the share that is kept: use 0.1 to 0.5.",
                evidence={"dropout": model["dropout"]},
                where=name,
            )


@checks(rule="H835", tier="contract", severity="advice", kind="cause", confidence=0.7)
def normalised_alone(facts: Facts, say: Say) -> Iterator[Finding]:
    """Batch norm sees too few samples."""
    for name, model in each(facts, "models"):
        given = facts.get("inputs", {}).get(name, {})
        if not model["batch_norm"] or given.get("calls", 0) < 10 or not 0 < given["largest_batch"] < 4:
            continue
        yield say(
            f"batch norm computes its statistics from {given['largest_batch']} sample(s)",
            fix="use larger batches, or GroupNorm, which does not depend on the batch.",
            evidence={"batch": given["largest_batch"]},
            where=name,
        )
