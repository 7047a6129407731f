"""Windows on the signal.

What comes in, what goes out, where it is lost in the layers, and who wins among players.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from holdfast.learning.facts import Facts, InputFacts, LossFacts
from holdfast.learning.finding import Finding
from holdfast.learning.rules.progress import far_from_unit, middle, progress_of
from holdfast.learning.rules.registry import Say, advice_if, checks

_BATCHES, _EXAMINED = 20, 12
"""Observed batches, and those looked at closely, before something is said about the data."""
_FEWEST_UTTERANCES, _PLAYED = 8, 30  # the latter: losses and gradients of each player


@checks(
    rule="H830", tier="window", severity="advice", kind="symptom", confidence=0.85, each="inputs"
)
def _output_ignores_input(_: Facts, say: Say, name: str, given: InputFacts) -> Iterator[Finding]:
    if given.answers >= _EXAMINED and given.same_answers > 0.8 * given.answers:
        what = (
            f"the model gave the same answer to every sample of {given.same_answers} of"
            f" {given.answers} batches, though the samples differ"
        )
        yield say(
            what,
            "look for a path that is cut: a multiplication by 0, dead units, an unused argument.",
            name,
        )


@checks(rule="H843", tier="window", severity="advice", kind="cause", confidence=0.85, each="losses")
def _sorted_labels(facts: Facts, say: Say, place: str, site: LossFacts) -> Iterator[Finding]:
    expected, seen = site.expected_labels or 0.0, site.distinct_labels or 0.0
    few = expected >= 1.8 and 0 < seen < 0.6 * expected
    if facts.minimizes_one_loss and site.labelled_calls >= _EXAMINED and few:
        what = (
            f"a batch holds {seen:.1f} different labels, where {expected:.1f} are expected of"
            " shuffled data"
        )
        yield say(what, "shuffle: DataLoader(..., shuffle=True).", place)


@checks(rule="H844", tier="window", severity="advice", kind="cause", confidence=0.8)
def _nothing_to_learn(facts: Facts, say: Say) -> Iterator[Finding]:
    for name, given in facts.inputs.items():
        if given.examined >= _EXAMINED and given.constant > 0.95 * given.examined:
            what = (
                f"all samples of a batch are the same, in {given.constant} of {given.examined}"
                " observed batches"
            )
            yield say(what, "look at the loading and the normalising of the data.", name)
    if not facts.minimizes_one_loss:
        return
    for place, site in facts.losses.items():
        # A loss may be called once for positives and once for negatives: only all calls together
        # are one target.
        alike = {
            other.constant_target
            for other in facts.losses.values()
            if other.function == site.function
        }
        if len(alike) == 1 and None not in alike and site.calls >= _BATCHES and site.values:
            # Contrastive losses name the first of their scores for ever, but it stays a task.
            trivial = site.values[-1] < 0.02 * max(site.values[0], 1e-9)
            what = f"every target of {site.function} in {site.calls} observed calls is the same"
            fix = "look at how labels are read and filtered."
            yield say(what, fix, place, severity=advice_if(trivial))


@checks(rule="H845", tier="window", severity="note", kind="cause", confidence=0.6)
def _same_batch(facts: Facts, say: Say) -> Iterator[Finding]:
    # Full-batch training looks the same; a batch of a loader is small and a power of two.
    classified = any(site.labelled_calls for site in facts.losses.values())
    for name, given in facts.inputs.items():
        seen = given.fingerprints
        if seen >= _BATCHES and given.different <= 2 and given.longest_repeat >= 0.45 * seen:
            what = f"{seen} observed batches had {given.different} different content(s)"
            fix = "iterate over the loader: next(iter(loader)) in the loop starts anew each time."
            loader = classified and given.batch in (16, 32, 64, 128)
            yield say(what, fix, name, severity=advice_if(loader))


@checks(rule="H847", tier="window", severity="note", kind="cause", confidence=0.8)
def _dead_units(facts: Facts, say: Say) -> Iterator[Finding]:
    dead = {name: min(shares) for name, shares in facts.dead_units.items() if len(shares) >= 2}
    bad = {name: share for name, share in dead.items() if share > 0.5}  # catalogue 47
    if bad:
        worst = max(bad, key=lambda name: bad[name])
        severe = bad[worst] > 0.98 or (bad[worst] > 0.7 and progress_of(facts).failing)
        what = (
            f"{bad[worst]:.0%} of the units of {worst} were not active once in several windows of"
            " observed steps"
        )
        fix = (
            "lower the learning rate, look at the bias and the scale of the inputs, or use"
            " LeakyReLU."
        )
        yield say(what, fix, worst, severity=advice_if(severe))


_Lost = tuple[str, str]  # what is said, and where


@checks(rule="H848", tier="window", severity="note", kind="cause", confidence=0.7)
def _depth_profile(facts: Facts, say: Say) -> Iterator[Finding]:
    progress = progress_of(facts)
    lost = progress.failing or facts.broken
    # What explodes is the surer cause; the others may as well follow from a learning rate that is
    # too high.
    found = [
        (0.85, lost, _exploding(facts) if lost else None),
        (0.7, progress.failing, _vanishing(facts)),
        (0.7, progress.poor, _saturated(facts)),
    ]
    fix = (
        "use ReLU-like activations or gates with a matching initialisation, normalisation, residual"
        " paths; clip the gradient of recurrent networks."
    )
    for confidence, loud, signal in found:
        if signal is not None:
            what, where = signal
            severity = advice_if(loud)
            yield say(what, fix, where, severity=severity, confidence=confidence)
            return


def _vanishing(facts: Facts) -> _Lost | None:
    prefixes = [f"{name}." if len(facts.models) > 1 else "" for name in facts.models]
    found = (_vanishing_within(facts, prefix) for prefix in prefixes)
    return next((signal for signal in found if signal is not None), None)


def _vanishing_within(facts: Facts, prefix: str) -> _Lost | None:
    """Look at the layers of one model: those of several are no chain."""
    profile = [
        (name, layer.gradient_rms)
        for name, layer in facts.layers.items()
        if name.startswith(prefix) and layer.dims > 1 and layer.gradient_rms is not None
    ]
    if len(profile) < 3 or not profile[-1][1] > 0:
        return None
    (first, low), (last, high) = profile[0], profile[-1]
    if 1e-3 <= low / high <= 1e4:  # AutoTrainer's 1e-3; the catalogue's 1e4
        return None
    word = "vanish" if low < high else "explode"
    return f"gradients {word} towards the input: {low:.1e} in {first}, {high:.1e} in {last}", first


def _saturated(facts: Facts) -> _Lost | None:
    # Half: SageMaker Debugger
    bad = {name: share for name, share in facts.saturated.items() if share > 0.7}
    if not bad:
        return None
    where = max(bad, key=lambda name: bad[name])
    return (
        f"{bad[where]:.0%} of the values of {where} sit at its bounds, where no gradient passes",
        where,
    )


def _exploding(facts: Facts) -> _Lost | None:
    dropped = any(model.dropout > 0.8 for model in facts.models.values())
    if dropped or any(map(far_from_unit, facts.inputs.values())):
        return None  # large signals have another reason
    for place, site in facts.losses.items():
        usual = site.target_scale or (site.baseline if site.function != "mse_loss" else None)
        if site.first is not None and usual and site.first > 10 * usual:
            first = f"the first loss, {site.first:.3g}, is far above {usual:.3g}"
            return f"signals explode on the way forward: {first}", place
    for name, optimizer in facts.optimizers.items():
        norms = [norm for norm in optimizer.gradient_norms if math.isfinite(norm)]
        if len(norms) >= 5 and max(norms) > 1e3 * max(1.0, middle(norms[:10])):
            what = f"the gradient norm reached {max(norms):.2g}, a thousand times the usual"
            return what, name
    return None


@checks(rule="H856", tier="window", severity="note", kind="cause", confidence=0.8, each="inputs")
def _input_scale(facts: Facts, say: Say, name: str, given: InputFacts) -> Iterator[Finding]:
    if far_from_unit(given) and not facts.models[name].normalised_input:
        what = f"the inputs are not scaled: they reach {given.largest:.3g}"
        fix = "scale the inputs to mean 0 and variance 1, with the training set's statistics."
        severity = advice_if(progress_of(facts).poor or facts.broken)
        yield say(what, fix, name, severity=severity)


@checks(rule="H852", tier="window", severity="advice", kind="symptom", confidence=0.8)
def _alignment_failed(facts: Facts, say: Say) -> Iterator[Finding]:
    alignment = facts.alignment
    if not alignment or alignment["utterances"] < _FEWEST_UTTERANCES:
        return
    at_end = alignment.get("share_at_max_decoder", 0.0)
    if alignment["diagonality"] < 0.5 or alignment["sharpness"] < 0.2 or at_end > 0.2:
        what = (
            f"the attention is not aligned: diagonality {alignment['diagonality']:.2f}, sharpness"
            f" {alignment['sharpness']:.2f}, {at_end:.0%} of the utterances end at the decoder's"
            " limit"
        )
        fix = "guided attention loss, trimmed silence, a larger weight of the stop token's loss."
        yield say(what, fix)


@checks(rule="H853", tier="window", severity="advice", kind="symptom", confidence=0.75)
def _player_has_won(facts: Facts, say: Say) -> Iterator[Finding]:
    players = facts.optimizers if facts.objective == "adversarial" else {}
    for winner, won in players.items():
        losses = [loss for _, loss in won.losses]
        if len(losses) < _PLAYED or not 0 <= middle(losses[-15:]) < 0.02 or losses[0] < 0.1:
            continue
        for loser, lost in players.items():
            norms, theirs = lost.gradient_norms, [loss for _, loss in lost.losses]
            if loser == winner or min(len(norms), len(theirs)) < _PLAYED:
                continue
            first, last = middle(theirs[:8]), middle(theirs[-15:])
            left = middle(norms[-15:]) / middle(norms[:8]) if middle(norms[:8]) else 1.0
            # With the loss that does not saturate the loser's gradient stays, and its loss climbs
            # without an end.
            if left < 0.05 or last > 3 * abs(first):
                what = (
                    f"{winner} has won (loss {middle(losses[-15:]):.2g}): {loser}'s loss went from"
                    f" {first:.2g} to {last:.2g}, its gradient to {left:.1%}"
                )
                fix = (
                    "make the winner weaker or slower: lower learning rate, R1 penalty, label"
                    " smoothing."
                )
                yield say(what, fix, winner)
