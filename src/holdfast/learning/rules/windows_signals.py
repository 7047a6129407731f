"""Windows on the signal: what comes in, what goes out, and where it dies on the way through the layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.learning.finding import Finding
from holdfast.learning.rules.progress import middle, progress_of
from holdfast.learning.rules.registry import Facts, Say, checks, each
from holdfast.learning.rules.windows_progress import broken, far_from_unit

_BATCHES = 20
"""Observed batches before something is said about the data: numerics.md 4.4, numbers 43 and 44."""


@checks(rule="H830", tier="window", severity="advice", kind="symptom", confidence=0.85)
def output_ignores_input(facts: Facts, say: Say) -> Iterator[Finding]:
    """The model answers the same to different samples."""
    for name, given in each(facts, "inputs"):
        if given["answers"] >= 2 * _BATCHES and given["same_answers"] > 0.8 * given["answers"]:
            yield say(
                f"the model gave the same answer to every sample of {given['same_answers']} of {given['answers']} "
                "batches, though the samples differ",
                fix="look for a path that is cut: a multiplication by 0, dead units, an unused argument.",
                evidence={"same": given["same_answers"], "answers": given["answers"]},
                where=name,
            )


@checks(rule="H843", tier="window", severity="advice", kind="cause", confidence=0.85)
def sorted_labels(facts: Facts, say: Say) -> Iterator[Finding]:
    """Batches hold fewer different labels than chance would give."""
    if facts.get("objective", "minimize") != "minimize" or len(facts.get("optimizers", {})) != 1:
        return
    for place, site in each(facts, "losses"):
        expected, seen = site.get("expected_labels"), site.get("distinct_labels")
        if site["labelled_calls"] >= _BATCHES and expected and seen and expected >= 1.8 and seen < 0.6 * expected:
            yield say(
                f"a batch holds {seen:.1f} different labels, where {expected:.1f} are expected of shuffled data",
                fix="shuffle: DataLoader(..., shuffle=True).",
                evidence={"seen": seen, "expected": expected, "batches": site["labelled_calls"]},
                where=place,
            )


@checks(rule="H844", tier="window", severity="advice", kind="cause", confidence=0.8)
def nothing_to_learn(facts: Facts, say: Say) -> Iterator[Finding]:
    """All targets, or all inputs, are the same."""
    for name, given in each(facts, "inputs"):
        if given["calls"] >= _BATCHES and given["constant"] > 0.95 * given["calls"]:
            yield say(
                f"all samples of a batch are the same, in {given['constant']} of {given['calls']} observed batches",
                fix="look at the loading and the normalising of the data.",
                evidence={"constant": given["constant"], "calls": given["calls"]},
                where=name,
            )
    if facts.get("objective", "minimize") != "minimize" or len(facts.get("optimizers", {})) != 1:
        return
    for place, site in each(facts, "losses"):
        # A loss may be called once for positives and once for negatives: only all calls together are one target.
        alike = {
            other["constant_target"] for _, other in each(facts, "losses") if other["function"] == site["function"]
        }
        if len(alike) == 1 and None not in alike and site["calls"] >= _BATCHES and site["values"]:
            # Contrastive losses name the first of their scores for ever, but it stays a task.
            trivial = site["values"][-1] < 0.02 * max(site["values"][0], 1e-9)
            yield say(
                f"every target of {site['function']} in {site['calls']} observed calls is the same",
                severity="advice" if trivial else "note",
                fix="look at how labels are read and filtered.",
                evidence={"calls": site["calls"], "last_loss": site["values"][-1]},
                where=place,
            )


@checks(rule="H845", tier="window", severity="note", kind="cause", confidence=0.6)
def same_batch(facts: Facts, say: Say) -> Iterator[Finding]:
    """The same batch is used again and again."""
    for name, given in each(facts, "inputs"):
        seen = given["fingerprints"]
        if seen < 2 * _BATCHES or given["different"] > 2 or given["longest_repeat"] < 0.45 * seen:
            continue
        # Full-batch training looks the same; a batch of a loader is small and a power of two.
        classified = any(site["labelled_calls"] for _, site in each(facts, "losses"))
        loader = given["batch"] in (16, 32, 64, 128) and classified
        yield say(
            f"{seen} observed batches had {given['different']} different content(s)",
            severity="advice" if loader else "note",
            fix="iterate over the loader: next(iter(loader)) in the loop starts anew each time.",
            evidence={"batches": seen, "different": given["different"], "batch": given["batch"]},
            where=name,
        )


@checks(rule="H846", tier="window", severity="advice", kind="cause", confidence=0.7)
def workers_repeat(facts: Facts, say: Say) -> Iterator[Finding]:
    """Batches come in equal pairs, as from workers with the same random numbers."""
    for name, given in each(facts, "inputs"):
        seen, pairs = given["compared_pairs"], given["repeated_pairs"]
        if seen >= _BATCHES and 0.3 * seen < pairs < 0.9 * seen and given["different"] > 0.1 * seen:
            yield say(
                f"{pairs} of {seen} observed batches are equal to the one that the loader handed out before",
                fix="give each worker its own seed (worker_init_fn), also for numpy's random numbers.",
                evidence={"pairs": pairs, "batches": seen, "different": given["different"]},
                where=name,
            )


@checks(rule="H847", tier="window", severity="note", kind="cause", confidence=0.8)
def dead_units(facts: Facts, say: Say) -> Iterator[Finding]:
    """Rectifiers that are never active."""
    failing = progress_of(facts).failing
    windows: Mapping[str, Sequence[float]] = facts.get("dead_units", {})
    dead = {name: min(shares) for name, shares in windows.items() if len(shares) >= 3}
    bad = {name: share for name, share in dead.items() if share > 0.5}  # catalogue 47
    if bad:
        worst = max(bad, key=lambda name: bad[name])
        severe = failing and bad[worst] > 0.7
        yield say(
            f"{bad[worst]:.0%} of the units of {worst} were not active once in three windows of 20 steps",
            severity="advice" if severe or bad[worst] > 0.98 else "note",
            fix="lower the learning rate, look at the bias and the scale of the inputs, or use LeakyReLU.",
            evidence={"dead": bad},
            where=worst,
        )


@checks(rule="H848", tier="window", severity="note", kind="cause", confidence=0.85)
def depth_profile(facts: Facts, say: Say) -> Iterator[Finding]:
    """Signals or gradients vanish, explode or saturate on the way through the layers."""
    progress = progress_of(facts)
    lost = progress.failing or broken(facts)
    # What explodes is the surer cause; the others may as well follow from a learning rate that is too high.
    found = [(0.7, progress.failing, _vanishing(facts)), (0.7, progress.poor, _saturated(facts))]
    found.insert(0, (0.85, lost, _exploding(facts) if lost else None))
    confidence, loud, told = next((each for each in found if each[2] is not None), (0.0, False, None))
    if told is not None:
        what, where, evidence = told
        yield say(
            what,
            severity="advice" if loud else "note",
            confidence=confidence,
            fix="use ReLU-like activations or gates with a matching initialisation, normalisation, residual paths; "
            "clip the gradient of recurrent networks.",
            evidence=evidence,
            where=where,
        )


_Told = tuple[str, str, dict[str, Any]]


def _vanishing(facts: Facts) -> _Told | None:
    names = list(facts.get("models", {}))
    of_each = [_vanishing_within(facts, f"{name}." if len(names) > 1 else "") for name in names]
    return next((told for told in of_each if told is not None), None)


def _vanishing_within(facts: Facts, prefix: str) -> _Told | None:
    """Look at the layers of one model: those of several are no chain."""
    mine = [(name, layer) for name, layer in each(facts, "layers") if name.startswith(prefix)]
    layers = [(n, v) for n, v in mine if v["dims"] > 1 and v["gradient_rms"] is not None]
    profile = [(name, layer["gradient_rms"]) for name, layer in layers]
    if len(profile) < 3 or not profile[-1][1] > 0:
        return None
    (first, low), (last, high) = profile[0], profile[-1]
    if 1e-3 <= low / high <= 1e4:  # AutoTrainer's 1e-3; the catalogue's 1e4
        return None
    word = "vanish" if low < high else "explode"
    what = f"gradients {word} towards the input: {low:.1e} in {first}, {high:.1e} in {last}"
    return what, first, {"first": low, "last": high, "by_layer": dict(profile[:12])}


def _saturated(facts: Facts) -> _Told | None:
    shares: Mapping[str, float] = facts.get("saturated", {})
    bad = {name: share for name, share in shares.items() if share > 0.7}  # half: SageMaker Debugger
    if not bad:
        return None
    where = max(bad, key=lambda name: bad[name])
    return f"{bad[where]:.0%} of the values of {where} sit at its bounds, where no gradient passes", where, bad


def _exploding(facts: Facts) -> _Told | None:
    dropped = any(model["dropout"] > 0.8 for _, model in each(facts, "models"))
    if dropped or any(far_from_unit(given) for _, given in each(facts, "inputs")):
        return None  # large signals have another reason
    for place, site in each(facts, "losses"):
        usual = site["target_scale"] or (site["baseline"] if site["function"] != "mse_loss" else None)
        if site["first"] is not None and usual and site["first"] > 10 * usual:
            what = (
                f"signals explode on the way forward: the first loss, {site['first']:.3g}, is far above {usual:.3g}"
            )
            return what, place, {"first_loss": site["first"], "usual": usual}
    for name, optimizer in each(facts, "optimizers"):
        norms = [norm for norm in optimizer["gradient_norms"] if math.isfinite(norm)]
        if len(norms) >= 5 and max(norms) > 1e3 * max(1.0, middle(norms[:10])):
            what = f"the gradient norm reached {max(norms):.2g}, a thousand times the usual"
            return what, name, {"largest": max(norms), "usual": middle(norms[:10])}
    return None


@checks(rule="H856", tier="window", severity="note", kind="cause", confidence=0.8)
def input_scale(facts: Facts, say: Say) -> Iterator[Finding]:
    """Inputs are far from the scale that weights are initialised for."""
    poor = progress_of(facts).poor or broken(facts)
    for name, given in each(facts, "inputs"):
        normalised = facts.get("models", {}).get(name, {}).get("normalised_input", False)
        if far_from_unit(given) and not normalised:
            yield say(
                f"the inputs are not scaled: they reach {given['largest']:.3g}",
                severity="advice" if poor else "note",
                fix="scale the inputs to mean 0 and variance 1, with the training set's statistics.",
                evidence={"largest": given["largest"], "mean_to_spread": given["offset"]},
                where=name,
            )


@checks(rule="H807", tier="window", severity="advice", kind="cause", confidence=0.85)
def outlier_targets(facts: Facts, say: Say) -> Iterator[Finding]:
    """Some targets are far from all others."""
    for place, site in each(facts, "losses"):
        sizes = site.get("target_sizes", ())
        usual = middle(sizes) if len(sizes) >= _BATCHES else 0.0
        # Far beyond heavy tails: a missing value written as a number, or another unit.
        if site["function"] == "mse_loss" and usual > 0 and max(sizes) > 1e3 * usual:
            yield say(
                f"some targets reach {max(sizes):.3g}, where {usual:.3g} is the usual largest of a batch",
                fix="look for codes of missing values and other units; or use a loss that forgives, such as Huber.",
                evidence={"largest": max(sizes), "usual": usual},
                where=place,
            )
