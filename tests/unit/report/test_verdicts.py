"""How sure a verdict is, in the same words wherever it is told."""

from __future__ import annotations

from tests.unit.report.made_runs import VERDICT

from holdfast.report.verdicts import how_sure, verdict_from


def test_how_sure_is_said_in_words_and_as_a_number():
    """Each tier of evidence has its word; of an unknown cause there is neither, since it would mislead."""
    tiers = {
        0.97: "almost certain (97%)",
        0.80: "very likely (80%)",
        0.70: "likely (70%)",
        0.40: "a guess (40%)",
        0.0: "a weak guess (0%)",
    }
    for confidence, words in tiers.items():
        assert how_sure(verdict_from({**VERDICT, "confidence": confidence})) == words
        assert how_sure(verdict_from({**VERDICT, "confidence": confidence, "family": "unknown"})) == ""
