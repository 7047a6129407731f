"""Windows on progress: no learning, divergence, spikes, plateaus, overfitting, learning rates far off.

A threshold alone fires on healthy runs (numerics.md 4.2), so a cause is named only where the run gets nowhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.learning.finding import Finding
from holdfast.learning.rules.progress import Progress, main_losses, middle, progress_of
from holdfast.learning.rules.registry import Facts, Say, checks, each

_LARGE_STEP = 0.1
"""Length of a step relative to the weights above which training seldom survives: TheDeepChecker's upper limit."""


def ratios(facts: Facts, key: str = "ratio") -> list[float]:
    """Return the step-to-weight ratio of every matrix that has one."""
    return [layer[key] for _, layer in each(facts, "layers") if layer[key] is not None and layer["dims"] > 1]


@checks(rule="H828", tier="window", severity="advice", kind="symptom", confidence=0.9)
def no_better_than_constant(facts: Facts, say: Say) -> Iterator[Finding]:
    """The model predicts no better than a constant."""
    progress = progress_of(facts)
    if progress.state == "constant" and facts["steps"] >= 200:
        yield say(
            f"after {facts['steps']} steps the loss is {progress.best:.4g}; predicting the same for every sample "
            f"gives {progress.baseline:.4g}",
            fix=likely_reason(facts)
            or "find out whether one batch can be overfitted (H829), and whether the output "
            "depends on the input (H830).",
            evidence={"loss": progress.best, "best_constant": progress.baseline, "start": progress.start},
        )


def likely_reason(facts: Facts) -> str:
    """Return what stands out in the settings, for findings that know only the symptom; ``""`` if nothing does."""
    reasons = []
    for _, model in each(facts, "models"):
        if model["dropout"] > 0.8:
            reasons.append(f"a dropout layer drops {model['dropout']:.0%} (H857)")
    for name, given in each(facts, "inputs"):
        if far_from_unit(given) and not facts["models"][name]["normalised_input"]:
            reasons.append(f"the inputs reach {given['largest']:.3g} (H856)")
    for _, optimizer in each(facts, "optimizers"):
        if optimizer["weight_decay"] > 0.5:
            reasons.append(f"the weight decay is {optimizer['weight_decay']:g} (H858)")
    return f"look first at this: {'; '.join(reasons)}." if reasons else ""


def far_from_unit(given: Mapping[str, Any]) -> bool:
    """Return whether inputs are far from the scale that weights are initialised for."""
    large, offset = given["largest"], given["offset"]
    if large is None or offset is None or given["flat"] > 0.5 * given["calls"]:
        return False  # nothing but one value: another rule's
    return bool(large > 100 or large < 1e-3 or offset > 20)


@checks(rule="H826", tier="window", severity="advice", kind="symptom", confidence=0.9)
def diverged(facts: Facts, say: Say) -> Iterator[Finding]:
    """The loss ends far above its start."""
    progress = progress_of(facts)
    if progress.state == "diverged":
        yield say(
            f"the loss rose from {progress.start:.4g} to {progress.end:.4g}",
            fix=likely_reason(facts) or "lower the learning rate or clip the gradient; look for a sign error.",
            evidence=progress.evidence(),
        )


@checks(rule="H832", tier="window", severity="note", kind="symptom", confidence=0.5)
def plateau(facts: Facts, say: Say) -> Iterator[Finding]:
    """The loss does not change."""
    progress = progress_of(facts)
    if progress.state == "flat" and facts["steps"] >= 200:
        yield say(
            f"the loss is where it was: {progress.start:.4g} at the start, {progress.end:.4g} now",
            fix="if the run has not converged, try a larger learning rate on a copy first.",
            severity="advice" if all(loss > 0 for _, loss in main_losses(facts)) else "note",
            evidence=progress.evidence(),
        )


@checks(rule="H825", tier="window", severity="advice", kind="cause", confidence=0.8)
def learning_rate_too_high(facts: Facts, say: Say) -> Iterator[Finding]:
    """Steps change the weights by much of their length, and the loss blows up or nothing is learnt."""
    steps = ratios(facts, "largest_ratio")
    largest = middle(steps) if steps else 0.0
    if largest <= _LARGE_STEP:
        return
    progress = progress_of(facts)
    blown = _blown_up([loss for _, loss in main_losses(facts)], progress)
    if progress.state in ("diverged", "constant") or blown or (broken(facts) and largest > 1):
        yield say(
            f"in the first steps the weights moved by up to {largest:.2g} of their length at once, and the loss "
            "blew up",
            fix="lower the learning rate: by 10 at first; momentum near 1 multiplies it too.",
            evidence={"step_to_weight": largest, **progress.evidence(), **_settings(facts)},
        )


def _blown_up(losses: list[float], progress: Progress) -> bool:
    """Return whether the loss rose tenfold in the first steps, and the run has not made good for it."""
    early = losses[:30]
    high = len(early) == 30 and early[0] > 0 and max(early) > 10 * early[0]
    recovered = progress.baseline is not None and (progress.best or 0.0) < 0.3 * progress.baseline
    return high and not recovered


def broken(facts: Facts) -> bool:
    """Return whether a loss or a gradient was not finite."""
    return any(o["nonfinite_losses"] or o["nonfinite_gradients"] for _, o in each(facts, "optimizers"))


def _settings(facts: Facts) -> dict[str, Any]:
    found = [o for _, o in each(facts, "optimizers")][:1]
    return {key: optimizer[key] for optimizer in found for key in ("kind", "largest_lr", "momentum", "weight_decay")}


@checks(rule="H824", tier="window", severity="advice", kind="cause", confidence=0.8)
def learning_rate_too_low(facts: Facts, say: Say) -> Iterator[Finding]:
    """All steps together hardly move the weights, and nothing is learnt."""
    progress, steps = progress_of(facts), [*ratios(facts), *ratios(facts, "largest_ratio")]
    planned = max(facts.get("total_steps") or 0, facts["steps"])
    if progress.state not in ("flat", "constant") or not steps or facts["steps"] < 100:
        return
    path = max(steps) * planned  # were all steps in one direction: the most that can be reached
    moving = any(o["zero_gradient_steps"] == 0 and o["largest_lr"] > 0 for _, o in each(facts, "optimizers"))
    if path < 1e-2 and moving:  # a hundredth of the weights: ten times catalogue 24, since this is an upper bound
        yield say(
            f"all {planned} steps together can move the weights by at most {path:.1e} of their length",
            fix="raise the learning rate, by 10 to 100; look for a clip limit or a scheduler that makes it tiny.",
            evidence={"path_to_weight": path, **progress.evidence(), **_settings(facts)},
        )


@checks(rule="H823", tier="window", severity="note", kind="symptom", confidence=0.6)
def weights_stand_still(facts: Facts, say: Say) -> Iterator[Finding]:
    """Weights with gradients are not moved by the steps."""
    still = {}
    for name, layer in each(facts, "layers"):
        if layer["with_gradient"] >= 50 and layer["unmoved"] > 0.9 * layer["with_gradient"] and layer["elements"] > 1:
            still[name] = layer["elements"]
    whole = sum(layer["elements"] for _, layer in each(facts, "layers"))
    if still:
        share = sum(still.values()) / max(1, whole)
        # Gradients of 0 move nothing either; that is another rule's, and the end of a satisfied hinge.
        unmoving = any(
            facts["layers"][name]["zero_gradient"] > 0.5 * facts["layers"][name]["with_gradient"] for name in still
        )
        warm = any(o["low_lr_steps"] for _, o in each(facts, "optimizers"))
        yield say(
            f"{len(still)} parameter(s), {share:.0%} of the weights, do not change although they have gradients: "
            f"{', '.join(list(still)[:5])}",
            severity="advice" if share > 0.5 and not (warm or unmoving) else "note",
            fix="look for a learning rate of 0 in their group, a gradient of 0, or steps that half precision rounds "
            "away.",
            evidence={"share": share, "first": list(still)[:5]},
        )


@checks(rule="H827", tier="window", severity="note", kind="symptom", confidence=0.6)
def loss_spikes(facts: Facts, say: Say) -> Iterator[Finding]:
    """Single losses stand far out."""
    losses = [loss for _, loss in main_losses(facts)][20:]
    if len(losses) < 50 or min(losses) <= 0:
        return
    logs = [math.log(loss) for loss in losses]
    usual = middle(logs)
    spread = 1.4826 * middle([abs(value - usual) for value in logs])
    high = [i for i, value in enumerate(logs) if value > usual + max(6 * spread, math.log(3))]  # catalogue 27
    if 0 < len(high) < 0.05 * len(logs):
        yield say(
            f"{len(high)} of {len(logs)} observed losses stand far above the others",
            fix="look at these batches; clip the gradient.",
            evidence={"spikes": len(high), "usual": math.exp(usual), "largest": max(losses)},
        )


@checks(rule="H833", tier="window", severity="advice", kind="cause", confidence=0.85)
def overfitting(facts: Facts, say: Say) -> Iterator[Finding]:
    """The validation loss rises while the training loss falls."""
    seen = facts.get("validations", [])
    if len(seen) < 4 or facts.get("objective", "minimize") != "minimize":
        return
    values = [value for _, _, value in seen]
    best = values.index(min(values))
    after = values[best + 1 :]
    jumps = sorted(abs(b - a) for a, b in itertools.pairwise(values))
    noise = jumps[len(jumps) // 2]
    rising = len(after) >= 3 and min(after[-3:]) > values[best] + max(noise, 0.05 * abs(values[best]))
    then, now = seen[best][1], seen[-1][1]
    if rising and then is not None and now is not None and now <= then:
        yield say(
            f"the validation loss rose from {values[best]:.4g} to {values[-1]:.4g} while the training loss went "
            f"from {then:.4g} to {now:.4g}",
            fix=f"keep the weights of step {seen[best][0]}; use more data, augmentation, or a smaller model.",
            evidence={"best": values[best], "best_step": seen[best][0], "last": values[-1]},
        )


@checks(rule="H818", tier="window", severity="note", kind="cause", confidence=0.6)
def always_clipped(facts: Facts, say: Say) -> Iterator[Finding]:
    """Nearly every gradient is scaled down to the clip limit."""
    for name, optimizer in each(facts, "optimizers"):
        norms = [norm for norm in optimizer["gradient_norms"] if math.isfinite(norm) and norm > 0]
        if len(norms) < 40:
            continue
        limit = max(norms)
        at_limit = sum(norm > 0.999 * limit for norm in norms) / len(norms)
        known = optimizer["clipped_steps"] > 0.5 * optimizer["committed_steps"] > 0  # the guard clips, and counts
        if at_limit > 0.5 and (known or optimizer["scaled_share"] > 0.5):
            tiny = limit < 1e-3 and progress_of(facts).state in ("flat", "constant")
            # What is left of the gradient is left of the step, unless the optimizer divides by its size.
            tiny = tiny or (
                optimizer["kind"] == "SGD" and optimizer["scaled"] is not None and optimizer["scaled"] < 0.01
            )
            yield say(
                f"{at_limit:.0%} of the gradients are clipped, to a norm of {limit:.2g}",
                severity="advice" if tiny else "note",
                confidence=0.85 if tiny else 0.5,
                fix="raise the limit to the 90th percentile of the norms, or lower the learning rate.",
                evidence={"share": at_limit, "limit": limit, "scaled": optimizer["scaled"]},
                where=name,
            )


def shrunk(layers: Mapping[str, Mapping[str, Any]]) -> float:
    """Return by how much the matrices have shrunk since the start, 1 if they have not."""
    shares = [
        layer["last_weight_rms"] / layer["first_weight_rms"]
        for layer in layers.values()
        if layer["dims"] > 1 and layer["first_weight_rms"] and layer["last_weight_rms"] is not None
    ]
    return middle(shares) if shares else 1.0


@checks(rule="H858", tier="window", severity="advice", kind="cause", confidence=0.85)
def weights_decay_away(facts: Facts, say: Say) -> Iterator[Finding]:
    """Weight decay pulls the weights to zero faster than learning builds them."""
    size = shrunk(facts.get("layers", {}))
    for name, optimizer in each(facts, "optimizers"):
        decay = optimizer["weight_decay"]
        # What a step takes away; Adam without W divides it by the gradient's size, so there it says nothing.
        taken = decay * optimizer["largest_lr"] if optimizer["kind"] in ("AdamW", "SGD") else 0.0
        if taken > 0.02 or (decay > 0 and size < 0.2 and progress_of(facts).poor):
            yield say(
                f"a weight decay of {decay:g} takes {taken:.1%} of the weights in each step; they have come to "
                f"{size:.0%} of their first size",
                fix="use a weight decay of 0.0001 to 0.1.",
                evidence={"size": size, "weight_decay": decay, "taken_in_a_step": taken},
                where=name,
            )
