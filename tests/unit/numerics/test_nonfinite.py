"""Non-finite steps: skip, then roll back, then stop."""

from __future__ import annotations

import pytest

from holdfast.core.events import RollBack, SkipStep, Stop
from holdfast.numerics.nonfinite import decide_after_nonfinite, describe_nonfinite


@pytest.mark.parametrize(
    ("in_a_row", "patience", "rollbacks", "most", "kind"),
    [
        (1, 3, 0, 2, SkipStep),
        (2, 3, 2, 2, SkipStep),
        (3, 3, 0, 2, RollBack),
        (3, 3, 1, 2, RollBack),
        (3, 3, 2, 2, Stop),
        (4, 3, 0, 2, RollBack),
        (1, 1, 0, 0, Stop),
        (10_000, None, 0, 0, SkipStep),
    ],
)
def test_patience_comes_before_rollback_and_rollback_before_the_end(
    in_a_row: int, patience: int | None, rollbacks: int, most: int, kind: type
) -> None:
    """Each limit holds at its exact value, and without patience there are only skips."""
    decision = decide_after_nonfinite(
        reason="NaN in head",
        in_a_row=in_a_row,
        patience=patience,
        rollbacks_in_a_row=rollbacks,
        max_rollbacks=most,
    )
    assert type(decision) is kind
    assert decision.promise == "changes training"
    assert "NaN in head" in decision.reason


@pytest.mark.parametrize(
    ("loss", "culprits", "count", "text"),
    [
        (float("nan"), [], 0, "non-finite loss (nan)"),
        (float("-inf"), [], 0, "non-finite loss (-inf)"),
        (2.5, ["a"], 1, "non-finite gradient (loss 2.5) in a"),
        (2.5, ["a", "b"], 2, "non-finite gradient (loss 2.5) in a, b"),
        (2.5, ["a", "b"], 7, "non-finite gradient (loss 2.5) in a, b and 5 more parameter(s)"),
    ],
)
def test_the_description_names_what_is_known(loss: float, culprits: list[str], count: int, text: str) -> None:
    """A bad loss is shown as it is, and bad gradients by the names of their parameters."""
    assert describe_nonfinite(loss, culprits, count) == text
