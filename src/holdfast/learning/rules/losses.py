"""Contract rules about losses: their arguments, and whether they are minimized or maximized."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.learning.finding import Finding
from holdfast.learning.observations import MIN_CALLS, Observations, ObservedLoss
from holdfast.learning.rules.registry import LearningRule, rule

SIGMOID_LOSS = "binary_cross_entropy_with_logits"


@rule("H831", tier="contract", severity="error", kind="cause", confidence=0.85)
def optimizer_climbs(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report an optimizer that maximizes a loss that should be minimized."""
    minimized = [loss for loss in run.losses.values() if _is_minimized(loss)]
    if not run.minimizes_one_loss or not minimized:
        return
    for name, optimizer in run.optimizers.items():
        if optimizer.maximize:
            yield rule.finding(
                f"the optimizer has maximize=True, so it increases {minimized[0].function}",
                "remove maximize=True.",
                name,
            )


def _is_minimized(loss: ObservedLoss) -> bool:
    return loss.signs.count(1) >= MIN_CALLS and -1 not in loss.signs


@rule("H840", tier="contract", severity="error", kind="cause", confidence=0.9)
def loss_with_a_minus_sign(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a loss that enters the minimized objective with a minus sign."""
    if not run.minimizes_one_loss:
        # Adversaries maximize each other's losses on purpose.
        return
    signed = {name: loss for name, loss in run.losses.items() if loss.signs}
    if any(1 in loss.signs for loss in signed.values()):
        return
    if sum(len(loss.signs) for loss in signed.values()) >= MIN_CALLS:
        name, loss = next(iter(signed.items()))
        yield rule.finding(
            f"{loss.function} enters the objective with a minus sign, so training increases it",
            "remove the minus sign.",
            name,
        )


@rule("H836", tier="contract", severity="error", kind="cause", confidence=0.95)
def softmax_twice(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a loss function that applies a softmax itself but receives probabilities."""
    for name, loss in run.losses.items():
        if loss.function == SIGMOID_LOSS or not loss.always("softmax_input"):
            continue
        yield rule.finding(
            f"{loss.function} applies a softmax itself, but receives probabilities",
            "remove the softmax from the model, or use nll_loss with log_softmax.",
            name,
            severity="advice" if loss.function == "softmax" else "error",
        )


@rule("H837", tier="contract", severity="advice", kind="cause", confidence=0.85)
def rectified_scores(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a model that ends in a ReLU, so that its scores cannot be negative."""
    for name, loss in run.losses.items():
        if loss.always("relu_source"):
            message = f"the scores passed to {loss.function} come from a ReLU, so none are negative"
        elif loss.always("beyond_relu"):
            message = (
                f"the predictions passed to {loss.function} come from a ReLU, but many targets are"
                " negative"
            )
        else:
            continue
        yield rule.finding(message, "remove the activation after the last layer.", name)


@rule("H838", tier="contract", severity="error", kind="cause", confidence=0.9)
def activation_before_scores(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a loss that expects unbounded scores but receives those of a bounded activation."""
    for name, loss in run.losses.items():
        if loss.always("sigmoid_source"):
            activation = "sigmoid"
        elif loss.always("softmax_input") and loss.function == SIGMOID_LOSS:
            activation = "softmax"
        elif loss.always("tanh_source"):
            activation = "tanh"
        else:
            continue
        yield rule.finding(
            f"{loss.function} expects unbounded scores, but receives the output of a {activation}",
            f"remove the {activation} before the loss.",
            name,
            severity="advice" if activation == "tanh" else "error",
        )


@rule("H839", tier="contract", severity="error", kind="cause", confidence=0.95)
def not_log_probabilities(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a loss function that expects log-probabilities but receives something else."""
    for name, loss in run.losses.items():
        # After a softmax over the wrong axis, rows do not sum to 1 either. H842 reports that case.
        if loss.function not in ("nll_loss", "ctc_loss") or loss.always("batch_axis"):
            continue
        if loss.mostly("positive"):
            yield rule.finding(
                f"{loss.function} expects log-probabilities, which are never above 0, but receives"
                " larger values",
                "apply log_softmax over the class axis first, or use cross_entropy.",
                name,
            )
        elif loss.always("not_normalised"):
            yield rule.finding(
                f"the log-probabilities passed to {loss.function} describe probabilities that do"
                " not sum to 1",
                "apply log_softmax over the class axis.",
                name,
                severity="advice",
                confidence=0.75,
            )


@rule("H841", tier="contract", severity="error", kind="cause", confidence=0.95)
def broadcast_targets(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report shapes whose broadcasting pairs each prediction with every target."""
    for name, loss in run.losses.items():
        if not loss.always("broadcast"):
            continue
        by_hand = loss.function == "difference"
        yield rule.finding(
            f"shapes {loss.shapes} are broadcast, so each prediction is compared with every target",
            "give both the same shape, for example with prediction.squeeze(-1).",
            name,
            severity="advice" if by_hand else "error",
            confidence=0.8 if by_hand else None,
        )


@rule("H842", tier="contract", severity="error", kind="cause", confidence=0.9)
def softmax_over_batch(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a softmax before the loss that is computed over the samples."""
    for name, loss in run.losses.items():
        if loss.always("batch_axis"):
            yield rule.finding(
                "the softmax before the loss is computed over the batch axis, so samples compete"
                " with each other",
                "apply the softmax over the class axis, dim=1 or dim=-1.",
                name,
            )


@rule("H855", tier="contract", severity="error", kind="cause", confidence=0.85)
def values_out_of_range(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report targets, predictions or scores outside the range that a loss function accepts."""
    for name, loss in run.losses.items():
        if loss.mostly("target_out_of_range"):
            binary = loss.function.startswith("binary")
            range_ = "are outside 0 to 1" if binary else "are not all 1 or -1"
            yield rule.finding(
                f"targets of {loss.function} {range_}",
                "use targets as the loss's documentation requires. For other values, use a"
                " regression loss.",
                name,
            )
        for activation in ("tanh", "sigmoid", "softmax"):
            if loss.always(f"beyond_{activation}"):
                yield rule.finding(
                    f"the predictions come from a {activation}, but many targets of"
                    f" {loss.function} are outside its range",
                    f"remove the {activation} after the last layer, or scale the targets into its"
                    " range.",
                    name,
                )
        if loss.always("clamped_scores"):
            yield rule.finding(
                f"scores are clamped to the range of {loss.function}, so clamped scores get no"
                " gradient",
                "pass the scores to binary_cross_entropy_with_logits, or use a sigmoid instead of"
                " clamp.",
                name,
            )
        if loss.function == "kl_div" and loss.mostly("positive"):
            yield rule.finding(
                "kl_div expects log-probabilities as its first argument, but receives values above"
                " 0",
                "pass log_softmax(...) as the first argument. The target must contain probabilities"
                " unless log_target=True.",
                name,
            )
