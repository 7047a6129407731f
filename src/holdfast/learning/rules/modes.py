"""Contract rules about training and evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.learning.finding import Finding
from holdfast.learning.observations import Observations
from holdfast.learning.rules.registry import Rule, rule

# Training in evaluation mode is a fault from this many observed steps, and from this share of them.
EVAL_STEPS = 5
EVAL_SHARE = 0.1
# How many evaluations are needed to judge their mode.
MIN_VALIDATIONS = 2


@rule("H834", tier="contract", severity="advice", kind="cause", confidence=0.8)
def wrong_mode(run: Observations, rule: Rule) -> Iterator[Finding]:
    """A model trains in evaluation mode, or is evaluated in training mode."""
    for name, model in run.models.items():
        modules = ", ".join(model.mode_dependent)
        if model.eval_steps >= EVAL_STEPS and model.eval_steps > EVAL_SHARE * model.observed:
            yield rule.finding(
                f"{model.eval_steps} of {model.observed} observed steps ran in evaluation"
                f" mode, although {modules} behave(s) differently in training",
                "call model.train() after each evaluation.",
                name,
            )
        always = model.train_mode_validations == model.validations
        if always and model.validations >= MIN_VALIDATIONS:
            yield rule.finding(
                f"all {model.validations} evaluations ran in training mode, with {modules} active",
                "call model.eval() before an evaluation and model.train() after it.",
                f"{name} in evaluation",
            )
