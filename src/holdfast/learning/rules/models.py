"""Contract rules about models: parameters that do not learn, identical units and wrong modes."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.text import counted
from holdfast.learning.finding import Finding
from holdfast.learning.observations import Observations, ObservedModel, ObservedOptimizer
from holdfast.learning.rules.registry import LearningRule, rule

# Number of steps after which parameters in the wrong place are reported: trainable ones outside all
# optimizers, and foreign or frozen ones in an optimizer.
SETTLED_STEPS = 3
# H813 reports after this many consecutive sampled steps without any gradients.
NO_GRADIENT_STEPS = 10
# Identical units are reported after this many steps, if at least this many sampled steps changed
# weights.
SYMMETRIC_AFTER_STEPS = 20
SYMMETRIC_AFTER_MOVES = 5
# Training in evaluation mode is reported if at least this many observed steps, and more than this
# share of them, were in evaluation mode.
EVAL_STEPS = 5
EVAL_SHARE = 0.1
# Minimum number of evaluations before reporting that they run in training mode.
MIN_VALIDATIONS = 2


@rule("H808", tier="contract", severity="note", kind="cause", confidence=0.8)
def parameters_in_no_optimizer(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report trainable parameters that are not in any optimizer."""
    if run.steps < SETTLED_STEPS:
        return
    if run.strays:
        parameters = counted(run.strays, "trainable parameter")
        yield rule.finding(
            f"the forward pass uses {parameters} that belong to neither the model's modules nor an"
            " optimizer",
            "put layers into an nn.ModuleList or nn.ModuleDict instead of a list or a dict.",
            severity="advice",
        )
    for name, model in run.models.items():
        if not model.outside_count:
            continue
        share = model.outside_weights / max(1, model.weights)
        parameters = counted(model.outside_count, "trainable parameter")
        yield rule.finding(
            f"no optimizer contains {parameters} ({share:.0%} of the weights):"
            f" {', '.join(model.outside)}",
            "pass them to the optimizer, or call requires_grad_(False) on them if they should stay"
            " frozen.",
            name,
            severity="advice" if _is_forgotten(model) else "note",
        )


def _is_forgotten(model: ObservedModel) -> bool:
    """Return whether parameters outside all optimizers get gradients that nothing uses.

    Returns False if all of the model's parameters are outside or any of those outside has changed,
    because an unobserved optimizer may then be training them.
    """
    if model.outside_weights >= model.weights or model.outside_changed:
        return False
    return model.outside_with_gradient > 0


@rule("H809", tier="contract", severity="error", kind="cause", confidence=0.95)
def optimizer_of_other_parameters(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report an optimizer with parameters that the model does not have."""
    for name, optimizer in run.optimizers.items():
        # Parameters that were removed from the model are proof of this mistake. Other foreign
        # parameters may be those of an unobserved model.
        if not (optimizer.replaced or _foreign_get_no_gradient(run, optimizer)):
            continue
        is_certain = optimizer.replaced or optimizer.foreign == optimizer.tensors
        yield rule.finding(
            f"{optimizer.foreign} of the optimizer's {optimizer.tensors} parameters are not (or no"
            " longer) in the model and get no gradient",
            "create the optimizer after all changes to the model, such as .to(), deepcopy or"
            " replacing layers.",
            name,
            severity="error" if is_certain else "advice",
        )


def _foreign_get_no_gradient(run: Observations, optimizer: ObservedOptimizer) -> bool:
    """Return whether the optimizer has parameters of no model, and none of them gets a gradient."""
    if optimizer.observed < SETTLED_STEPS or run.backwards < SETTLED_STEPS:
        return False
    return optimizer.foreign > 0 and optimizer.foreign_with_gradient == 0


@rule("H810", tier="contract", severity="error", kind="cause", confidence=0.95)
def only_frozen_parameters(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report an optimizer whose parameters are all frozen."""
    for name, optimizer in run.optimizers.items():
        if optimizer.tensors == 0 or optimizer.frozen < optimizer.tensors:
            continue
        if _has_never_learnt(optimizer, run):
            yield rule.finding(
                f"all {optimizer.tensors} parameters of the optimizer have requires_grad=False",
                "call requires_grad_(True) on the parameters that should learn, before creating the"
                " optimizer.",
                name,
            )


def _has_never_learnt(optimizer: ObservedOptimizer, run: Observations) -> bool:
    # Freezing a network for a while is fine, so an optimizer is reported only if it never had a
    # gradient.
    if optimizer.with_gradient_steps:
        return False
    return optimizer.observed >= SETTLED_STEPS or run.ended


@rule("H814", tier="contract", severity="note", kind="cause", confidence=0.4)
def parameters_without_gradient(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report parameters that are in an optimizer but never get a gradient."""
    if any(
        optimizer.no_gradient_steps >= NO_GRADIENT_STEPS for optimizer in run.optimizers.values()
    ):
        # H813 already reports that no parameter gets a gradient.
        return
    for name, model in run.models.items():
        if not model.never_gradient_count:
            continue
        share = model.never_gradient_weights / max(1, model.weights)
        # If the autograd graph is cut, the first layer gets no gradient. If only an expert or a
        # head is unused, it does get one.
        cut = model.never_gradient_first or share > 0.5
        parameters = counted(model.never_gradient_count, "parameter")
        yield rule.finding(
            f"{parameters} ({share:.0%} of the weights) got no gradient in any observed step:"
            f" {', '.join(model.never_gradient)}",
            "look for .detach(), .item(), argmax, no_grad or a new tensor between these parameters"
            " and the loss. If they should not learn, pass frozen=.",
            name,
            severity="advice" if cut else "note",
            confidence=0.8 if cut else None,
        )


@rule("H822", tier="contract", severity="error", kind="cause", confidence=0.95)
def identical_units(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a layer whose units are all identical and stay identical."""
    moved = any(optimizer.moved >= SYMMETRIC_AFTER_MOVES for optimizer in run.optimizers.values())
    if not moved or run.steps < SYMMETRIC_AFTER_STEPS:
        return
    for name, model in run.models.items():
        if model.symmetric:
            yield rule.finding(
                f"after {run.steps} steps, all units of {', '.join(model.symmetric)} are still"
                " identical",
                "initialize the weights randomly. If all weights have the same value, every unit"
                " always gets the same gradient.",
                name,
            )


@rule("H834", tier="contract", severity="advice", kind="cause", confidence=0.8)
def wrong_mode(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a model that trains in evaluation mode or is evaluated in training mode."""
    for name, model in run.models.items():
        modules = ", ".join(model.mode_dependent)
        if model.eval_steps >= EVAL_STEPS and model.eval_steps > EVAL_SHARE * model.observed:
            yield rule.finding(
                f"{model.eval_steps} of {model.observed} observed steps ran with these modules in"
                f" evaluation mode: {modules}",
                "call model.train() after each evaluation.",
                name,
            )
        always = model.train_mode_validations == model.validations
        if always and model.validations >= MIN_VALIDATIONS:
            yield rule.finding(
                f"all {model.validations} evaluations ran with these modules in training mode:"
                f" {modules}",
                "call model.eval() before an evaluation and model.train() after it.",
                f"{name} in evaluation",
            )
