"""Contracts about what a loss is given: probabilities or scores, axes, shapes, signs, ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.learning.finding import Finding
from holdfast.learning.rules.contracts_steps import gradient_first
from holdfast.learning.rules.registry import Facts, Say, checks, each

_FEWEST = 3
"""Calls before a habit is told from a batch: catalogue 38."""


def _always(site: Mapping[str, Any], flag: str, fewest: int = _FEWEST) -> bool:
    """Return whether a flag was seen in practically all calls."""
    calls: int = site["calls"]
    seen: int = site.get(flag, 0)
    return calls >= fewest and seen >= 0.9 * calls


@checks(rule="H801", tier="contract", severity="error", kind="symptom", confidence=0.95)
def nonfinite_loss(facts: Facts, say: Say) -> Iterator[Finding]:
    """The loss is NaN or Inf."""
    for name, optimizer in each(facts, "optimizers"):
        if optimizer["nonfinite_losses"]:
            yield say(
                f"the loss was NaN or Inf in {optimizer['nonfinite_losses']} observed step(s)",
                severity="note" if gradient_first(optimizer) else "error",
                fix="look for log(0), a division by 0, an overflow, or a learning rate that is too high.",
                evidence={"steps": optimizer["nonfinite_losses"]},
                where=name,
            )


@checks(rule="H806", tier="contract", severity="error", kind="cause", confidence=0.9)
def nonfinite_input(facts: Facts, say: Say) -> Iterator[Finding]:
    """A batch holds NaN or plus infinity."""
    for name, given in each(facts, "inputs"):
        if given["nonfinite"]:
            followed = any(o["nonfinite_losses"] or o["nonfinite_gradients"] for _, o in each(facts, "optimizers"))
            yield say(
                f"{given['nonfinite']} observed batch(es) given to the model held NaN or Inf",
                severity="error" if followed else "note",  # a model may fill in what is missing
                fix="find and drop these samples; Policy(drop_nonfinite_samples=True) makes steps without them.",
                evidence={"batches": given["nonfinite"], "calls": given["calls"]},
                where=name,
            )


@checks(rule="H836", tier="contract", severity="error", kind="cause", confidence=0.95)
def softmax_twice(facts: Facts, say: Say) -> Iterator[Finding]:
    """Probabilities go into a function that takes the softmax itself."""
    for place, site in each(facts, "losses"):
        if site["function"] != "binary_cross_entropy_with_logits" and _always(site, "softmax_input"):
            yield say(
                f"{site['function']} takes the softmax itself, and is given probabilities",
                severity="advice" if site["function"] == "softmax" else "error",
                fix="remove the softmax from the model, or use nll_loss with log_softmax.",
                evidence={"calls": site["calls"], "sums_to_one": site["softmax_input"]},
                where=place,
            )


@checks(rule="H837", tier="contract", severity="advice", kind="cause", confidence=0.85)
def rectified_logits(facts: Facts, say: Say) -> Iterator[Finding]:
    """Scores that may be of either sign are cut off at 0."""
    for place, site in each(facts, "losses"):
        by_values = _always(site, "rectified", 20) and not _always(site, "softmax_input")  # whose zeros are rounded
        if _always(site, "rectified_source") or by_values:
            yield say(
                f"the scores given to {site['function']} come out of a ReLU: none is below 0",
                fix="remove the activation after the last layer.",
                evidence={"calls": site["calls"], "rectified": site.get("rectified", 0)},
                where=place,
            )
        if _always(site, "beyond_relu"):
            yield say(
                f"the predictions given to {site['function']} come out of a ReLU, and many targets are below 0",
                fix="remove the activation after the last layer.",
                evidence={"calls": site["calls"]},
                where=place,
            )


@checks(rule="H838", tier="contract", severity="error", kind="cause", confidence=0.9)
def sigmoid_twice(facts: Facts, say: Say) -> Iterator[Finding]:
    """Squashed values go into a loss that expects scores."""
    for place, site in each(facts, "losses"):
        for flag, source in (("sigmoid_source", "sigmoid"), ("softmax_input", "softmax"), ("tanh_source", "tanh")):
            if flag == "softmax_input" and site["function"] != "binary_cross_entropy_with_logits":
                continue
            if _always(site, flag):
                yield say(
                    f"{site['function']} expects scores of any size, and is given the output of a {source}",
                    severity="advice" if source == "tanh" else "error",
                    fix=f"remove the {source} before the loss.",
                    evidence={"calls": site["calls"], flag: site[flag]},
                    where=place,
                )
                break
        else:
            # Small scores lie there by chance; those of probabilities come near both ends.
            if _always(site, "unit_range", 10) and site.get("unit_spread", 0) > 0.2 * site["calls"]:
                yield say(
                    f"all scores given to {site['function']} lie between 0 and 1, as probabilities do",
                    severity="advice",
                    confidence=0.7,
                    fix="remove the activation before the loss, which applies a sigmoid itself.",
                    evidence={"calls": site["calls"]},
                    where=place,
                )


@checks(rule="H839", tier="contract", severity="error", kind="cause", confidence=0.95)
def not_log_probabilities(facts: Facts, say: Say) -> Iterator[Finding]:
    """A loss that takes log-probabilities is given something else."""
    for place, site in each(facts, "losses"):
        if site["function"] not in ("nll_loss", "ctc_loss") or _always(site, "batch_axis"):
            continue
        if site["calls"] >= _FEWEST and site.get("positive", 0) > 0.5 * site["calls"]:
            yield say(
                f"{site['function']} takes log-probabilities, which are never above 0, and is given larger values",
                fix="apply log_softmax over the class axis first, or use cross_entropy.",
                evidence={"calls": site["calls"], "positive": site["positive"]},
                where=place,
            )
        elif _always(site, "not_normalised"):
            yield say(
                f"the log-probabilities given to {site['function']} do not belong to probabilities that sum to 1",
                severity="advice",
                confidence=0.75,
                fix="apply log_softmax over the class axis.",
                evidence={"calls": site["calls"], "not_normalised": site["not_normalised"]},
                where=place,
            )


@checks(rule="H840", tier="contract", severity="error", kind="cause", confidence=0.9)
def climbs_its_loss(facts: Facts, say: Say) -> Iterator[Finding]:
    """The quantity that should fall enters the loss with a minus sign."""
    if facts.get("objective", "minimize") != "minimize" or len(facts.get("optimizers", {})) != 1:
        return  # players against each other climb each other's losses
    sites = [
        (place, site) for place, site in each(facts, "losses") if site["negative_signs"] + site["positive_signs"]
    ]
    negative = sum(site["negative_signs"] for _, site in sites)
    if negative >= _FEWEST and not any(site["positive_signs"] for _, site in sites):
        exact = any(site["function"] != "log_softmax" for _, site in sites)
        yield say(
            f"{sites[0][1]['function']} enters the loss with a minus sign: training makes it larger",
            severity="error" if exact else "advice",
            fix="remove the minus sign; for a likelihood written by hand, add one.",
            evidence={"calls": negative},
            where=sites[0][0],
        )


@checks(rule="H831", tier="contract", severity="error", kind="cause", confidence=0.85)
def optimizer_climbs(facts: Facts, say: Say) -> Iterator[Finding]:
    """The optimizer maximises a loss that is meant to fall."""
    if facts.get("objective", "minimize") != "minimize":
        return
    falling = [s for _, s in each(facts, "losses") if s["positive_signs"] >= _FEWEST and not s["negative_signs"]]
    for name, optimizer in each(facts, "optimizers"):
        if optimizer["maximize"] and falling and len(facts["optimizers"]) == 1:
            yield say(
                f"the optimizer has maximize=True and climbs {falling[0]['function']}",
                fix="remove maximize=True.",
                evidence={"calls": falling[0]["calls"]},
                where=name,
            )


@checks(rule="H841", tier="contract", severity="error", kind="cause", confidence=0.95)
def broadcast_targets(facts: Facts, say: Say) -> Iterator[Finding]:
    """Predictions and targets are paired all with all."""
    for place, site in each(facts, "losses"):
        if _always(site, "broadcast"):
            exact = site["function"] != "difference"
            yield say(
                f"shapes {site['shapes']} are broadcast: each prediction is compared with every target",
                severity="error" if exact else "advice",
                confidence=0.95 if exact else 0.8,
                fix="give both the same shape, for instance prediction.squeeze(-1).",
                evidence={"calls": site["calls"], "shapes": site["shapes"]},
                where=place,
            )


@checks(rule="H842", tier="contract", severity="error", kind="cause", confidence=0.9)
def softmax_over_batch(facts: Facts, say: Say) -> Iterator[Finding]:
    """The softmax runs over the samples instead of the classes."""
    for place, site in each(facts, "losses"):
        if _always(site, "batch_axis") or (_always(site, "batch_axis_made") and site["calls"] >= 10):
            made = not _always(site, "batch_axis")
            yield say(
                "the softmax before the loss is taken over the batch axis: samples compete with each other",
                severity="advice" if made else "error",
                confidence=0.7 if made else 0.9,
                fix="use dim=1 (or -1), the axis of the classes.",
                evidence={"calls": site["calls"]},
                where=place,
            )


@checks(rule="H855", tier="contract", severity="error", kind="cause", confidence=0.85)
def outside_of_range(facts: Facts, say: Say) -> Iterator[Finding]:
    """A loss is given values that it is not defined for."""
    for place, site in each(facts, "losses"):
        if site["calls"] >= _FEWEST and site.get("target_out_of_range", 0) > 0.5 * site["calls"]:
            yield say(
                f"targets of {site['function']} lie outside 0 to 1"
                if site["function"].startswith("binary")
                else f"targets of {site['function']} are not all 1 or -1",
                fix="use the targets that its documentation asks for; for other numbers a regression loss.",
                evidence={"calls": site["calls"], "outside": site["target_out_of_range"]},
                where=place,
            )
        for bounded in ("tanh", "sigmoid", "softmax"):
            if _always(site, f"beyond_{bounded}"):
                yield say(
                    f"the predictions come out of a {bounded}, whose range many targets of {site['function']} lie "
                    "beyond",
                    fix=f"remove the {bounded} after the last layer, or scale the targets into its range.",
                    evidence={"calls": site["calls"]},
                    where=place,
                )
        if _always(site, "clamped_scores"):
            yield say(
                f"scores are clamped into the range of {site['function']}: where they are cut, no gradient passes",
                fix="use binary_cross_entropy_with_logits on the scores, or a sigmoid instead of clamp.",
                evidence={"calls": site["calls"], "clamped": site["clamped_scores"]},
                where=place,
            )
        if (
            site["function"] == "kl_div"
            and site["calls"] >= _FEWEST
            and site.get("positive", 0) > 0.5 * site["calls"]
        ):
            yield say(
                "kl_div takes log-probabilities as its first argument, and is given values above 0",
                fix="pass log_softmax(...) first; the target is a probability unless log_target=True.",
                evidence={"calls": site["calls"], "positive": site["positive"]},
                where=place,
            )
