"""Windows on progress: no learning, divergence, plateaus, overfitting, learning rates far off.

Whether a run gets anywhere is read from its losses. Their level says something only where the
objective is to make one loss small; otherwise the answer is ``"unknown"``. A threshold alone fires
on healthy runs (of the published ones all but one did, on 23), so a cause is named only where the
run gets nowhere.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.learning.facts import Facts, InputFacts, OptimizerFacts
from holdfast.learning.finding import Finding
from holdfast.learning.rules.registry import Say, advice_if, checks

State = Literal["unknown", "learning", "flat", "constant", "diverged"]
_FEWEST = 24
_CONSTANT = 0.97
"""A loss at this share of the best constant's, or above, has learnt nothing from the inputs. 0.9 of
the variance has been proposed; regressions with little to learn are healthy at 0.95, so 0.97."""
_DIVERGED = 1.5
"""End over start of a loss that diverged."""
_LARGE_STEP = 0.1
"""Length of a step relative to the weights above which training seldom survives.

TheDeepChecker's upper limit.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How the loss went."""

    state: State  # "constant": no better than the best constant prediction; "flat": as at the start
    start: float = 0.0  # median loss of the first tenth
    end: float = 0.0  # median loss of the last quarter
    # Loss of the best constant prediction, at the place that did best against it
    baseline: float | None = None
    best: float | None = None  # loss at that place

    @property
    def failing(self) -> bool:
        """Whether the run gets nowhere."""
        return self.state in ("flat", "constant", "diverged")

    @property
    def poor(self) -> bool:
        """Whether little was learnt: at least 85 % of the best constant's loss is left."""
        known = self.best is not None and self.baseline is not None
        return self.failing or (known and (self.best or 0.0) > 0.85 * (self.baseline or 0.0))


def middle(values: Sequence[float]) -> float:
    """Return the median."""
    return sorted(values)[len(values) // 2]


def main_losses(facts: Facts) -> list[float]:
    """Return the values of the one loss that drives the run, empty if there is no such."""
    found = [optimizer.losses for optimizer in facts.optimizers.values() if optimizer.losses]
    single = facts.objective == "minimize" and found and all(other == found[0] for other in found)
    return [loss for _, loss in found[0]] if single else []


def progress_of(facts: Facts) -> Progress:
    """Return how the run goes."""
    losses = main_losses(facts)
    if len(losses) < _FEWEST:
        return Progress(state="unknown")
    head, tail = losses[: max(5, len(losses) // 10)], losses[-max(10, len(losses) // 4) :]
    start, end = middle(head), middle(tail)
    noise = 1.4826 * middle([abs(loss - end) for loss in tail])  # robust spread at the end
    baseline, best = _nearest_constant(facts)
    state: State = "learning"
    if start > 0 and end > _DIVERGED * start and end - start > 2 * noise:
        state = "diverged"
    elif baseline is not None and best is not None:
        slowly = best < 0.995 * baseline and _still_falls(losses, noise)
        surely = any(
            _beats_constant(site.gains, 0.005 * baseline) for site in facts.losses.values()
        )
        state = "learning" if best < _CONSTANT * baseline or slowly or surely else "constant"
    elif abs(start - end) < max(0.02 * abs(start), 0.5 * noise):
        state = "flat"
    if facts.followed and state in ("constant", "flat"):
        state = "unknown"  # the targets move with the model, and with them the loss
    return Progress(state=state, start=start, end=end, baseline=baseline, best=best)


def _still_falls(losses: list[float], noise: float) -> bool:
    """Return whether the loss of a slow starter fell over its last half, beyond the error of a
    mean.
    """
    half = losses[len(losses) // 2 :]
    size = len(half) // 2
    before, after = sum(half[:size]) / size, sum(half[-size:]) / size
    return before - after > noise / math.sqrt(size)


def _beats_constant(gains: Sequence[float], least: float) -> bool:
    """Return whether the last half of the losses lies below the constant's on the same batches,
    by three errors.
    """
    late = gains[len(gains) // 2 :]
    error = statistics.stdev(late) / math.sqrt(len(late)) if len(late) >= 10 else math.inf
    return statistics.fmean(late or [0.0]) > max(least, 3 * error)


def _nearest_constant(facts: Facts) -> tuple[float, float] | tuple[None, None]:
    """Return the constant's loss and the loss of the place that did best against its constant."""
    known = [
        (site.baseline, middle(site.values[-max(10, len(site.values) // 4) :]))
        for site in facts.losses.values()
        if site.baseline is not None and site.baseline > 1e-6 and len(site.values) >= _FEWEST
    ]
    return min(known, key=lambda pair: pair[1] / pair[0], default=(None, None))


def far_from_unit(given: InputFacts) -> bool:
    """Return whether inputs are far from the scale that weights are initialised for."""
    if given.largest is None or given.offset is None or given.flat > 0.5 * given.examined:
        return False  # nothing but one value: another rule's
    return given.largest > 100 or given.largest < 1e-3 or given.offset > 20


@checks(rule="H828", tier="window", severity="advice", kind="symptom", confidence=0.9)
def _no_better_than_constant(facts: Facts, say: Say) -> Iterator[Finding]:
    progress = progress_of(facts)
    if progress.state == "constant" and facts.steps >= 200:
        what = (
            f"after {facts.steps} steps the loss is {progress.best:.4g}; predicting the same for"
            f" every sample gives {progress.baseline:.4g}"
        )
        fix = (
            "find out whether a fresh Adam overfits eight samples, and whether the loss changes"
            " when they are given each other's inputs."
        )
        yield say(what, fix)


@checks(rule="H826", tier="window", severity="advice", kind="symptom", confidence=0.9)
def _diverged(facts: Facts, say: Say) -> Iterator[Finding]:
    progress = progress_of(facts)
    if progress.state == "diverged":
        fix = "lower the learning rate or clip the gradient; look for a sign error."
        yield say(f"the loss rose from {progress.start:.4g} to {progress.end:.4g}", fix)


@checks(rule="H832", tier="window", severity="note", kind="symptom", confidence=0.5)
def _plateau(facts: Facts, say: Say) -> Iterator[Finding]:
    progress = progress_of(facts)
    if progress.state == "flat" and facts.steps >= 200:
        what = (
            f"the loss is where it was: {progress.start:.4g} at the start, {progress.end:.4g} now"
        )
        fix = "if the run has not converged, try a larger learning rate on a copy first."
        yield say(what, fix, severity="advice" if min(main_losses(facts)) > 0 else "note")


def _step_sizes(facts: Facts) -> tuple[list[float], list[float]]:
    """Return the usual and the largest step of each matrix, relative to its length."""
    matrices = [layer for layer in facts.layers.values() if layer.dims > 1]
    usual = [layer.ratio for layer in matrices if layer.ratio is not None]
    return usual, [layer.largest_ratio for layer in matrices if layer.largest_ratio is not None]


@checks(rule="H825", tier="window", severity="advice", kind="cause", confidence=0.8)
def _learning_rate_too_high(facts: Facts, say: Say) -> Iterator[Finding]:
    _, steps = _step_sizes(facts)
    largest = middle(steps) if steps else 0.0
    if largest <= _LARGE_STEP:
        return
    progress, losses = progress_of(facts), main_losses(facts)
    early = losses[:30]
    blown = len(early) == 30 and early[0] > 0 and max(early) > 10 * early[0]
    recovered = progress.baseline is not None and (progress.best or 0.0) < 0.3 * progress.baseline
    failed = progress.state in ("diverged", "constant") or (blown and not recovered)
    bad_data = any(given.nonfinite for given in facts.inputs.values())
    if failed or (facts.broken and largest > 1 and not bad_data):
        moved = (
            f"in the first steps the weights moved by up to {largest:.2g} of their length at once"
        )
        fix = "lower the learning rate: by 10 at first; momentum near 1 multiplies it too."
        yield say(f"{moved}, and the loss blew up", fix)


@checks(rule="H824", tier="window", severity="advice", kind="cause", confidence=0.8)
def _learning_rate_too_low(facts: Facts, say: Say) -> Iterator[Finding]:
    progress, steps = progress_of(facts), [step for sizes in _step_sizes(facts) for step in sizes]
    planned = max(facts.total_steps or 0, facts.steps)
    if progress.state not in ("flat", "constant") or not steps or facts.steps < 100:
        return
    path = max(steps) * planned  # were all steps in one direction: the most that can be reached
    moving = any(
        each.zero_gradient_steps == 0 and each.largest_lr > 0 for each in facts.optimizers.values()
    )
    # A hundredth of the weights: ten times catalogue 24, since this is an upper bound
    if path < 1e-2 and moving:
        what = (
            f"all {planned} steps together can move the weights by at most {path:.1e} of their"
            " length"
        )
        fix = (
            "raise the learning rate, by 10 to 100; look for a clip limit or a scheduler that makes"
            " it tiny."
        )
        yield say(what, fix)


@checks(rule="H823", tier="window", severity="note", kind="symptom", confidence=0.6)
def _weights_stand_still(facts: Facts, say: Say) -> Iterator[Finding]:
    still = {
        name: layer
        for name, layer in facts.layers.items()
        if layer.compared >= 12 and layer.unmoved > 0.9 * layer.compared and layer.elements > 1
    }
    if still:
        whole = sum(layer.elements for layer in facts.layers.values())
        share = sum(layer.elements for layer in still.values()) / max(1, whole)
        # Gradients of 0 move nothing either; that is another rule's, and the end of a satisfied
        # hinge.
        unmoving = any(layer.zero_gradient > 0.5 * layer.with_gradient for layer in still.values())
        warm = any(optimizer.low_lr_steps for optimizer in facts.optimizers.values())
        what = (
            f"{len(still)} parameter(s), {share:.0%} of the weights, do not change although they"
            " have gradients"
        )
        fix = (
            "look for a rate of 0 in their group, a gradient of 0, or steps that half precision"
            " rounds away."
        )
        severity = advice_if(share > 0.5 and not (warm or unmoving))
        yield say(f"{what}: {', '.join(list(still)[:5])}", fix, severity=severity)


@checks(rule="H833", tier="window", severity="advice", kind="cause", confidence=0.85)
def _overfitting(facts: Facts, say: Say) -> Iterator[Finding]:
    seen = facts.validations
    if len(seen) < 4 or facts.objective != "minimize":
        return
    values = [value for _, _, value in seen]
    best = values.index(min(values))
    after = values[best + 1 :]
    noise = middle([abs(b - a) for a, b in itertools.pairwise(values)])
    rising = len(after) >= 3 and min(after[-3:]) > values[best] + max(
        noise, 0.05 * abs(values[best])
    )
    then, now = seen[best][1], seen[-1][1]
    if rising and then is not None and now is not None and now <= then:
        what = (
            f"the validation loss rose from {values[best]:.4g} to {values[-1]:.4g} while the"
            f" training loss went from {then:.4g} to {now:.4g}"
        )
        fix = (
            f"keep the weights of step {seen[best][0]}; use more data, augmentation, or a smaller"
            " model."
        )
        yield say(what, fix)


@checks(
    rule="H818", tier="window", severity="note", kind="cause", confidence=0.5, each="optimizers"
)
def _always_clipped(
    facts: Facts, say: Say, name: str, optimizer: OptimizerFacts
) -> Iterator[Finding]:
    if optimizer.clipped_to:  # the guard clips, and counts
        limit, at_limit = (
            optimizer.clipped_to,
            optimizer.clipped_steps / max(1, optimizer.committed_steps),
        )
        seen = optimizer.committed_steps
    else:
        norms = [norm for norm in optimizer.gradient_norms if math.isfinite(norm) and norm > 0]
        limit, seen = max(norms, default=0.0), len(norms)
        at_limit = (
            sum(norm > 0.999 * limit for norm in norms) / max(1, seen)
            if optimizer.scaled_share > 0.5
            else 0.0
        )
    if seen < _FEWEST or at_limit <= 0.5:
        return
    what = f"{at_limit:.0%} of the gradients are clipped, to a norm of {limit:.2g}"
    fix = "raise the limit to the 90th percentile of the norms, or lower the learning rate."
    tiny = limit < 1e-3 and progress_of(facts).state in ("flat", "constant")
    # What is left of the gradient is left of the step, unless the optimizer divides by its size.
    if tiny or (
        optimizer.kind == "SGD" and optimizer.scaled is not None and optimizer.scaled < 0.01
    ):
        yield say(what, fix, name, severity="advice", confidence=0.85)
    else:
        yield say(what, fix, name)


@checks(rule="H858", tier="window", severity="advice", kind="cause", confidence=0.85)
def _weights_decay_away(facts: Facts, say: Say) -> Iterator[Finding]:
    shares = [
        layer.last_weight_rms / layer.first_weight_rms
        for layer in facts.layers.values()
        if layer.dims > 1 and layer.first_weight_rms and layer.last_weight_rms is not None
    ]
    size = middle(shares) if shares else 1.0
    for name, optimizer in facts.optimizers.items():
        decay = optimizer.weight_decay
        # What a step takes away; Adam without W divides it by the gradient's size, so there it says
        # nothing.
        taken = decay * optimizer.largest_lr if optimizer.kind in ("AdamW", "SGD") else 0.0
        if taken > 0.02 or (decay > 0 and size < 0.2 and progress_of(facts).poor):
            what = (
                f"a weight decay of {decay:g} takes {taken:.1%} of the weights in each step; they"
                f" have come to {size:.0%} of their first size"
            )
            yield say(what, "use a weight decay of 0.0001 to 0.1.", name)
