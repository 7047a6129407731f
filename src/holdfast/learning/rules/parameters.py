"""Contracts about parameters: which are optimized, which get a gradient, how they start."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.learning.finding import Finding
from holdfast.learning.observations import Observations, ObservedModel, ObservedOptimizer
from holdfast.learning.rules.registry import Rule, rule

# Steps after which a gradient that is missing is no coincidence.
SETTLED_STEPS = 3
# Sampled steps in a row without any gradient, which H813 reports.
NO_GRADIENT_STEPS = 10
# Steps, and sampled steps that moved weights, after which units that are still equal stay so.
SYMMETRIC_AFTER_STEPS = 20
SYMMETRIC_AFTER_MOVES = 5


@rule("H808", tier="contract", severity="note", kind="cause", confidence=0.8)
def parameters_in_no_optimizer(run: Observations, rule: Rule) -> Iterator[Finding]:
    """Trainable parameters are in no optimizer."""
    if run.steps < SETTLED_STEPS:
        return
    if run.strays:
        yield rule.finding(
            f"the model computes with {run.strays} trainable parameter(s) that are not its own and"
            " in no optimizer",
            "put layers into nn.ModuleList or nn.ModuleDict instead of a list or a dict.",
            severity="advice",
        )
    for name, model in run.models.items():
        if not model.outside_count:
            continue
        share = model.outside_weights / max(1, model.weights)
        yield rule.finding(
            f"{model.outside_count} trainable parameter(s), {share:.0%} of the weights, are in no"
            f" optimizer: {', '.join(model.outside)}",
            "pass them to the optimizer, or call requires_grad_(False) on them if they are meant to"
            " stay.",
            name,
            severity="advice" if _is_forgotten(model) else "note",
        )


def _is_forgotten(model: ObservedModel) -> bool:
    """Return whether parameters outside get gradients that nobody uses.

    If all parameters are outside, another optimizer may train the model, and so it may if they have
    changed.
    """
    if model.outside_weights >= model.weights or model.outside_changed:
        return False
    return model.outside_with_gradient > 0


@rule("H809", tier="contract", severity="error", kind="cause", confidence=0.95)
def optimizer_of_other_parameters(run: Observations, rule: Rule) -> Iterator[Finding]:
    """The optimizer holds parameters that the model does not have."""
    for name, optimizer in run.optimizers.items():
        settled = optimizer.observed >= SETTLED_STEPS and run.backwards >= SETTLED_STEPS
        useless = settled and optimizer.foreign > 0 and optimizer.foreign_with_gradient == 0
        if not (optimizer.replaced or useless):
            continue
        sure = optimizer.replaced or optimizer.foreign == optimizer.tensors
        yield rule.finding(
            f"the optimizer holds {optimizer.foreign} of {optimizer.tensors} tensors that the model"
            " does not have (any more) and that get no gradient",
            "make the optimizer when the model has its final form: after .to(), deepcopy and"
            " replaced layers.",
            name,
            severity="error" if sure else "advice",
        )


@rule("H810", tier="contract", severity="error", kind="cause", confidence=0.95)
def only_frozen_parameters(run: Observations, rule: Rule) -> Iterator[Finding]:
    """Everything in the optimizer is frozen."""
    for name, optimizer in run.optimizers.items():
        if optimizer.tensors == 0 or optimizer.frozen < optimizer.tensors:
            continue
        if _has_never_learnt(optimizer, run):
            yield rule.finding(
                f"all {optimizer.tensors} tensors of the optimizer have requires_grad=False",
                "call requires_grad_(True) on what should learn before making the optimizer.",
                name,
            )


def _has_never_learnt(optimizer: ObservedOptimizer, run: Observations) -> bool:
    # Phases that freeze one player for a while are healthy: it must never have had a gradient.
    if optimizer.with_gradient_steps:
        return False
    return optimizer.observed >= SETTLED_STEPS or run.ended


@rule("H814", tier="contract", severity="note", kind="cause", confidence=0.4)
def parameters_without_gradient(run: Observations, rule: Rule) -> Iterator[Finding]:
    """Some parameters of the optimizer never get a gradient."""
    if any(o.no_gradient_steps >= NO_GRADIENT_STEPS for o in run.optimizers.values()):
        return  # nothing gets a gradient, which H813 reports
    for name, model in run.models.items():
        if not model.never_gradient_count:
            continue
        share = model.never_gradient_weights / max(1, model.weights)
        # An unused expert or head lies beside the path; a path that is cut loses its beginning.
        cut = model.never_gradient_first or share > 0.5
        yield rule.finding(
            f"{model.never_gradient_count} parameter(s), {share:.0%} of the weights, got no"
            f" gradient in any observed step: {', '.join(model.never_gradient)}",
            "look for .detach(), .item(), argmax, no_grad or a new tensor between them and the"
            " loss; or pass frozen= if they are meant not to learn.",
            name,
            severity="advice" if cut else "note",
            confidence=0.8 if cut else None,
        )


@rule("H822", tier="contract", severity="error", kind="cause", confidence=0.95)
def identical_units(run: Observations, rule: Rule) -> Iterator[Finding]:
    """All units of a layer are equal, and stay so."""
    moved = any(o.moved >= SYMMETRIC_AFTER_MOVES for o in run.optimizers.values())
    if not moved or run.steps < SYMMETRIC_AFTER_STEPS:
        return
    for name, model in run.models.items():
        if model.symmetric:
            yield rule.finding(
                f"after {run.steps} steps all units of {', '.join(model.symmetric)} are still"
                " identical",
                "start from random weights: with zeros or one constant every unit gets the same"
                " gradient forever.",
                name,
            )
