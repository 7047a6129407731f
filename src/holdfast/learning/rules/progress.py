"""Window rules about a lack of progress, divergence, overfitting, attention and adversaries."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from holdfast.learning.finding import Finding
from holdfast.learning.measures import median
from holdfast.learning.observations import Observations, ObservedOptimizer
from holdfast.learning.rules.loss_progress import measure_progress
from holdfast.learning.rules.registry import LearningRule, rule

# Minimum number of steps before reporting that a run learns nothing.
MIN_STEPS = 200
# Overfitting is reported after at least this many evaluations, if the last ones are all worse than
# the best one.
MIN_VALIDATIONS = 4
WORSE_VALIDATIONS = 3
# Minimum increase of the validation loss relative to the best one.
MIN_RISE = 0.05
# Thresholds for acceptable attention (see `alignment.alignment_facts`).
MIN_UTTERANCES = 8
MIN_DIAGONALITY = 0.5
MIN_SHARPNESS = 0.2
MAX_AT_DECODER_LIMIT = 0.2
# Minimum number of losses and gradient norms of each adversary, and how many of the first and the
# last ones are compared.
MIN_PLAYED = 30
FIRST_PLAYED = 8
NEWEST_PLAYED = 15
# The winner's loss is below WON_LOSS, and was at least OPENING_LOSS at the start.
WON_LOSS = 0.02
OPENING_LOSS = 0.1
# The loser's gradient has shrunk to less than this share, or its loss has risen by this factor.
LOST_GRADIENT = 0.05
LOST_RISE = 3


@rule("H828", tier="window", severity="advice", kind="symptom", confidence=0.85, on_request=True)
def no_better_than_constant(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a model that is no better than a constant prediction."""
    progress = measure_progress(run)
    if progress.state == "constant" and run.steps >= MIN_STEPS:
        yield rule.finding(
            f"after {run.steps} steps, the loss is {progress.best:.4g}, but a constant prediction"
            f" reaches {progress.baseline:.4g}",
            "check whether a new Adam optimizer can overfit eight samples, and whether the loss"
            " changes if their inputs are swapped.",
        )


@rule("H826", tier="window", severity="advice", kind="symptom", confidence=0.5, on_request=True)
def loss_rose(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a loss that is far above its initial value."""
    progress = measure_progress(run)
    if progress.state == "diverged":
        yield rule.finding(
            f"the loss rose from {progress.start:.4g} to {progress.end:.4g}",
            "lower the learning rate or clip the gradient, and look for a sign error.",
        )


@rule("H833", tier="window", severity="advice", kind="cause", confidence=0.85)
def overfitting(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report a validation loss that rises while the training loss falls."""
    if len(run.validations) < MIN_VALIDATIONS or run.objective != "minimize":
        return
    losses = [validation for _, _, validation in run.validations]
    best = losses.index(min(losses))
    if not _rises_after(best, losses):
        return
    best_step, training_then, _ = run.validations[best]
    _, training_now, _ = run.validations[-1]
    if training_then is None or training_now is None or training_now > training_then:
        return
    yield rule.finding(
        f"the validation loss rose from {losses[best]:.4g} to {losses[-1]:.4g} while the training"
        f" loss went from {training_then:.4g} to {training_now:.4g}",
        f"keep the weights of step {best_step}. Use more data, augmentation or a smaller model.",
    )


def _rises_after(best: int, losses: list[float]) -> bool:
    after = losses[best + 1 :]
    if len(after) < WORSE_VALIDATIONS:
        return False
    noise = median([abs(later - earlier) for earlier, later in itertools.pairwise(losses)])
    limit = losses[best] + max(noise, MIN_RISE * abs(losses[best]))
    return min(after[-WORSE_VALIDATIONS:]) > limit


@rule("H852", tier="window", severity="advice", kind="symptom", confidence=0.8)
def attention_not_aligned(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report attention of a speech synthesis model that is not aligned."""
    alignment = run.alignment
    if alignment is None or alignment["utterances"] < MIN_UTTERANCES:
        return
    at_limit = alignment.get("share_at_max_decoder", 0.0)
    if (
        alignment["diagonality"] < MIN_DIAGONALITY
        or alignment["sharpness"] < MIN_SHARPNESS
        or at_limit > MAX_AT_DECODER_LIMIT
    ):
        yield rule.finding(
            f"the attention is not aligned: diagonality {alignment['diagonality']:.2f}, sharpness"
            f" {alignment['sharpness']:.2f}, and {at_limit:.0%} of the utterances reach the"
            " decoder's limit",
            "use a guided attention loss, trim silence, or increase the weight of the stop token's"
            " loss.",
        )


@rule("H853", tier="window", severity="advice", kind="symptom", confidence=0.75)
def player_has_won(run: Observations, rule: LearningRule) -> Iterator[Finding]:
    """Report an adversary that has won, so that its opponent can no longer learn."""
    if run.objective != "adversarial":
        return
    for winner, won in run.optimizers.items():
        if not _has_won(won):
            continue
        for loser, lost in run.optimizers.items():
            if loser == winner or not _has_lost(lost):
                continue
            losses = _losses_of(lost)
            yield rule.finding(
                f"{winner} has won (loss {median(_losses_of(won)[-NEWEST_PLAYED:]):.2g}):"
                f" {loser}'s loss went from {median(losses[:FIRST_PLAYED]):.2g} to"
                f" {median(losses[-NEWEST_PLAYED:]):.2g}, and its gradient norm to"
                f" {_remaining_gradient(lost):.1%} of its initial value",
                "make the winner weaker or slower, with a lower learning rate, an R1 penalty or"
                " label smoothing.",
                winner,
            )


def _losses_of(optimizer: ObservedOptimizer) -> list[float]:
    return [loss for _, loss in optimizer.losses]


def _has_won(player: ObservedOptimizer) -> bool:
    """Return whether an adversary's loss has dropped to almost 0."""
    losses = _losses_of(player)
    if len(losses) < MIN_PLAYED or losses[0] < OPENING_LOSS:
        return False
    return 0 <= median(losses[-NEWEST_PLAYED:]) < WON_LOSS


def _has_lost(player: ObservedOptimizer) -> bool:
    """Return whether an adversary's gradient has almost vanished or its loss has risen sharply."""
    losses = _losses_of(player)
    if min(len(losses), len(player.gradient_norms)) < MIN_PLAYED:
        return False
    if _remaining_gradient(player) < LOST_GRADIENT:
        return True
    # With the non-saturating GAN loss, the loser's gradient does not shrink, but its loss keeps
    # rising.
    first = median(losses[:FIRST_PLAYED])
    return median(losses[-NEWEST_PLAYED:]) > LOST_RISE * abs(first)


def _remaining_gradient(player: ObservedOptimizer) -> float:
    """Return the median of the newest gradient norms divided by the median of the first ones."""
    first = median(player.gradient_norms[:FIRST_PLAYED])
    return median(player.gradient_norms[-NEWEST_PLAYED:]) / first if first else 1.0
