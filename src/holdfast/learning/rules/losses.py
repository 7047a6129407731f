"""Contracts about what a loss is given: probabilities or scores, axes, shapes, signs, ranges."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.learning.facts import Facts, InputFacts, LossFacts, OptimizerFacts
from holdfast.learning.finding import Finding
from holdfast.learning.rules.optimizers import gradient_first
from holdfast.learning.rules.registry import Say, advice_if, checks

_FEWEST = 3
"""Calls before a habit is known from a batch: catalogue 38."""
_WITH_SIGMOID = "binary_cross_entropy_with_logits"
_DROP_ACTIVATION = "remove the activation after the last layer."


@checks(
    rule="H801",
    tier="contract",
    severity="error",
    kind="symptom",
    confidence=0.95,
    each="optimizers",
)
def _nonfinite_loss(_: Facts, say: Say, name: str, optimizer: OptimizerFacts) -> Iterator[Finding]:
    if optimizer.nonfinite_losses:
        what = f"the loss was NaN or Inf in {optimizer.nonfinite_losses} observed step(s)"
        fix = "look for log(0), a division by 0, an overflow, or a learning rate that is too high."
        yield say(what, fix, name, severity="note" if gradient_first(optimizer) else "error")


@checks(rule="H806", tier="contract", severity="error", kind="cause", confidence=0.9, each="inputs")
def _nonfinite_input(facts: Facts, say: Say, name: str, given: InputFacts) -> Iterator[Finding]:
    if given.nonfinite:
        what = f"{given.nonfinite} observed batch(es) given to the model held NaN or Inf"
        fix = (
            "find and drop these samples; Policy(drop_nonfinite_samples=True) makes steps without"
            " them."
        )
        # A model may fill in what is missing.
        yield say(what, fix, name, severity="error" if facts.broken else "note")


@checks(
    rule="H836", tier="contract", severity="error", kind="cause", confidence=0.95, each="losses"
)
def _softmax_twice(_: Facts, say: Say, place: str, site: LossFacts) -> Iterator[Finding]:
    if site.function != _WITH_SIGMOID and site.always("softmax_input"):
        what = f"{site.function} takes the softmax itself, and is given probabilities"
        fix = "remove the softmax from the model, or use nll_loss with log_softmax."
        yield say(what, fix, place, severity="advice" if site.function == "softmax" else "error")


@checks(
    rule="H837", tier="contract", severity="advice", kind="cause", confidence=0.85, each="losses"
)
def _rectified_scores(_: Facts, say: Say, place: str, site: LossFacts) -> Iterator[Finding]:
    # Whose zeros are rounded
    by_values = site.always("rectified", 10) and not site.always("softmax_input")
    if site.always("rectified_source") or by_values:
        what = f"the scores given to {site.function} come out of a ReLU: none is below 0"
        yield say(what, _DROP_ACTIVATION, place)
    elif site.always("beyond_relu"):
        what = (
            f"the predictions given to {site.function} come out of a ReLU, and many targets are"
            " below 0"
        )
        yield say(what, _DROP_ACTIVATION, place)


@checks(rule="H838", tier="contract", severity="error", kind="cause", confidence=0.9)
def _sigmoid_twice(facts: Facts, say: Say) -> Iterator[Finding]:
    sources = {"sigmoid_source": "sigmoid", "softmax_input": "softmax", "tanh_source": "tanh"}
    for place, site in facts.losses.items():
        flags = [
            flag for flag in sources if flag != "softmax_input" or site.function == _WITH_SIGMOID
        ]
        source = next((sources[flag] for flag in flags if site.always(flag)), None)
        if source is not None:
            what = (
                f"{site.function} expects scores of any size, and is given the output of a {source}"
            )
            fix = f"remove the {source} before the loss."
            yield say(what, fix, place, severity="advice" if source == "tanh" else "error")
        # Small scores lie there by chance; those of probabilities come near both ends.
        elif (
            site.always("unit_range", 10) and site.flags.get("unit_spread", 0) > 0.2 * site.examined
        ):
            what = f"all scores given to {site.function} lie between 0 and 1, as probabilities do"
            fix = "remove the activation before the loss, which applies a sigmoid itself."
            yield say(what, fix, place, severity="advice", confidence=0.7)


@checks(
    rule="H839", tier="contract", severity="error", kind="cause", confidence=0.95, each="losses"
)
def _not_log_probabilities(_: Facts, say: Say, place: str, site: LossFacts) -> Iterator[Finding]:
    if site.function not in ("nll_loss", "ctc_loss") or site.always("batch_axis"):
        return
    if site.mostly("positive"):
        what = (
            f"{site.function} takes log-probabilities, which are never above 0, and is given larger"
            " values"
        )
        yield say(what, "apply log_softmax over the class axis first, or use cross_entropy.", place)
    elif site.always("not_normalised"):
        what = (
            f"the log-probabilities given to {site.function} do not belong to probabilities that"
            " sum to 1"
        )
        fix = "apply log_softmax over the class axis."
        yield say(what, fix, place, severity="advice", confidence=0.75)


@checks(rule="H840", tier="contract", severity="error", kind="cause", confidence=0.9)
def _climbs_its_loss(facts: Facts, say: Say) -> Iterator[Finding]:
    if not facts.minimizes_one_loss:
        return  # players against each other climb each other's losses
    signed = {place: site for place, site in facts.losses.items() if site.signs}
    negative = sum(site.signs.count(-1) for site in signed.values())
    if negative >= _FEWEST and not any(1 in site.signs for site in signed.values()):
        place, site = next(iter(signed.items()))
        exact = any(site.function != "log_softmax" for site in signed.values())
        what = f"{site.function} enters the loss with a minus sign: training makes it larger"
        fix = "remove the minus sign; for a likelihood written by hand, add one."
        yield say(what, fix, place, severity="error" if exact else "advice")


@checks(rule="H831", tier="contract", severity="error", kind="cause", confidence=0.85)
def _optimizer_climbs(facts: Facts, say: Say) -> Iterator[Finding]:
    falling = [
        site
        for site in facts.losses.values()
        if site.signs.count(1) >= _FEWEST and -1 not in site.signs
    ]
    for name, optimizer in facts.optimizers.items():
        if optimizer.maximize and falling and facts.minimizes_one_loss:
            what = f"the optimizer has maximize=True and climbs {falling[0].function}"
            yield say(what, "remove maximize=True.", name)


@checks(
    rule="H841", tier="contract", severity="error", kind="cause", confidence=0.95, each="losses"
)
def _broadcast_targets(_: Facts, say: Say, place: str, site: LossFacts) -> Iterator[Finding]:
    if site.always("broadcast"):
        what = f"shapes {site.shapes} are broadcast: each prediction is compared with every target"
        fix = "give both the same shape, for instance prediction.squeeze(-1)."
        if site.function == "difference":
            yield say(what, fix, place, severity="advice", confidence=0.8)
        else:
            yield say(what, fix, place)


@checks(rule="H842", tier="contract", severity="error", kind="cause", confidence=0.9)
def _softmax_over_batch(facts: Facts, say: Say) -> Iterator[Finding]:
    what = (
        "the softmax before the loss is taken over the batch axis: samples compete with each other"
    )
    fix = "use dim=1 (or -1), the axis of the classes."
    for place, site in facts.losses.items():
        if site.always("batch_axis"):
            yield say(what, fix, place)
        elif site.always("batch_axis_made", 10):
            yield say(what, fix, place, severity="advice", confidence=0.7)


@checks(
    rule="H855", tier="contract", severity="error", kind="cause", confidence=0.85, each="losses"
)
def _outside_of_range(_: Facts, say: Say, place: str, site: LossFacts) -> Iterator[Finding]:
    if site.mostly("target_out_of_range"):
        wanted = (
            "lie outside 0 to 1" if site.function.startswith("binary") else "are not all 1 or -1"
        )
        fix = (
            "use the targets that its documentation asks for; for other numbers a regression loss."
        )
        yield say(f"targets of {site.function} {wanted}", fix, place)
    for bounded in ("tanh", "sigmoid", "softmax"):
        if site.always(f"beyond_{bounded}"):
            beyond = f"many targets of {site.function} lie beyond its range"
            fix = f"remove the {bounded} after the last layer, or scale the targets into its range."
            yield say(f"the predictions come out of a {bounded}; {beyond}", fix, place)
    if site.always("clamped_scores"):
        what = (
            f"scores are clamped into the range of {site.function}: where they are cut, no gradient"
            " passes"
        )
        fix = "use binary_cross_entropy_with_logits on the scores, or a sigmoid instead of clamp."
        yield say(what, fix, place)
    if site.function == "kl_div" and site.mostly("positive"):
        what = "kl_div takes log-probabilities as its first argument, and is given values above 0"
        fix = "pass log_softmax(...) first; the target is a probability unless log_target=True."
        yield say(what, fix, place)


@checks(rule="H862", tier="window", severity="note", kind="cause", confidence=0.8, each="losses")
def _targets_are_the_inputs(_: Facts, say: Say, place: str, site: LossFacts) -> Iterator[Finding]:
    if site.always("copied_tokens", 5):
        # An autoencoder means it, but has to press its input through something narrow.
        copied = site.first is not None and site.values[-1] < 0.1 * site.first
        what = (
            "every target is the input token at its own position: the model has to copy, not to"
            " predict"
        )
        fix = "shift: tokens[:, :-1] are the inputs, tokens[:, 1:] the targets."
        yield say(what, fix, place, severity=advice_if(copied))


@checks(rule="H807", tier="window", severity="advice", kind="cause", confidence=0.85, each="losses")
def _outlier_targets(_: Facts, say: Say, place: str, site: LossFacts) -> Iterator[Finding]:
    sizes = sorted(site.target_sizes)
    usual, largest = (sizes[len(sizes) // 2], sizes[-1]) if len(sizes) >= 20 else (0.0, 0.0)
    # Far beyond heavy tails: a missing value written as a number, or another unit.
    if site.function == "mse_loss" and usual > 0 and largest > 1e3 * usual:
        what = (
            f"some targets reach {largest:.3g}, where {usual:.3g} is the usual largest of a batch"
        )
        fix = (
            "look for codes of missing values and other units; or use a loss that forgives, such as"
            " Huber."
        )
        yield say(what, fix, place)
