"""Rules of single domains: the alignment of speech synthesis, two players of which one has given up."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.learning.finding import Finding
from holdfast.learning.rules.progress import middle
from holdfast.learning.rules.registry import Facts, Say, checks

_FEWEST_UTTERANCES = 8


@checks(rule="H852", tier="window", severity="advice", kind="symptom", confidence=0.8)
def alignment_failed(facts: Facts, say: Say) -> Iterator[Finding]:
    """The attention of a speech synthesiser does not follow the text."""
    alignment = facts.get("alignment")
    if not alignment or alignment["utterances"] < _FEWEST_UTTERANCES:
        return
    at_end = alignment.get("share_at_max_decoder", 0.0)
    scattered = alignment["diagonality"] < 0.5 or alignment["sharpness"] < 0.2
    if scattered or at_end > 0.2:
        yield say(
            f"the attention is not aligned: diagonality {alignment['diagonality']:.2f}, sharpness "
            f"{alignment['sharpness']:.2f}, {at_end:.0%} of the utterances end at the decoder's limit",
            fix="guided attention loss, trimmed silence, a larger weight of the stop token's loss.",
            evidence=dict(alignment),
        )


@checks(rule="H853", tier="window", severity="advice", kind="symptom", confidence=0.75)
def players_collapsed(facts: Facts, say: Say) -> Iterator[Finding]:
    """One player has won: its loss is near zero, and the other learns nothing from it."""
    players = facts.get("optimizers", {})
    if facts.get("objective") != "adversarial" or len(players) < 2:
        return
    for winner, won in players.items():
        losses = [loss for _, loss in won["losses"]]
        if len(losses) < 60 or not 0 <= middle(losses[-30:]) < 0.02 or losses[0] < 0.1:
            continue
        for loser, lost in players.items():
            norms, theirs = lost["gradient_norms"], [loss for _, loss in lost["losses"]]
            if loser == winner or min(len(norms), len(theirs)) < 60:
                continue
            faded = middle(norms[-30:]) < 0.05 * middle(norms[:15])
            # With the loss that does not saturate the loser's gradient stays, and its loss climbs without an end.
            beaten = middle(theirs[-30:]) > 3 * abs(middle(theirs[:15]))
            if faded or beaten:
                yield say(
                    f"{winner} has won (loss {middle(losses[-30:]):.2g}): {loser}'s loss went from "
                    f"{middle(theirs[:15]):.2g} to {middle(theirs[-30:]):.2g}, its gradient to "
                    f"{middle(norms[-30:]) / max(1e-12, middle(norms[:15])):.1%}",
                    fix="make the winner weaker or slower: lower learning rate, R1 penalty, label smoothing.",
                    evidence={"loss": middle(losses[-30:]), "gradient": middle(norms[-30:])},
                    where=winner,
                )
