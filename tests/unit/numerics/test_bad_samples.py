"""Non-finite steps: which samples are bad, and what is decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.numerics.bad_samples import find_bad_samples
from holdfast.numerics.decisions import decide_after_nonfinite


def counting(bad: set[int]) -> tuple[Callable[[Sequence[int]], bool], list[list[int]]]:
    calls: list[list[int]] = []

    def is_bad(samples: Sequence[int]) -> bool:
        calls.append(list(samples))
        return not bad.isdisjoint(samples)

    return is_bad, calls


def test_a_right_hint_costs_one_call() -> None:
    """One suspect without which the batch is good is confirmed by that single question."""
    is_bad, calls = counting({5})
    assert find_bad_samples(is_bad, 32, [5]) == [5]
    assert calls == [[i for i in range(32) if i != 5]]


@pytest.mark.parametrize("hint", [[], [3], [3, 4, 5, 6], list(range(32)), [-1, 99]])
def test_a_wrong_or_wide_hint_does_no_harm(hint: list[int]) -> None:
    """Whatever was suspected, exactly the bad sample is found."""
    assert find_bad_samples(counting({5})[0], 32, hint) == [5]


@settings(deadline=None)
@given(data=st.data(), size=st.integers(2, 64))
def test_few_bad_samples_are_found_exactly(data: st.DataObject, size: int) -> None:
    """Up to three bad samples among any number of good ones are named, no more and no fewer."""
    few = max(1, min(3, size // 4))
    bad = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=few))
    is_bad, calls = counting(bad)
    assert find_bad_samples(is_bad, size) == sorted(bad)
    assert len(calls) <= 40


def test_a_batch_that_is_always_bad_blames_no_sample_and_stops_early() -> None:
    """A bad weight leads to an empty answer after few calls, although forty were allowed."""
    calls: list[Sequence[int]] = []

    def always(samples: Sequence[int]) -> bool:
        calls.append(samples)
        return True

    assert find_bad_samples(always, 1024, [7]) == []
    assert len(calls) <= 4 + 2 * 10 + 1


def test_the_answer_is_proved_by_leaving_it_out() -> None:
    """Two samples that are bad only together lose one of them, and the rest was seen to be good."""
    calls: list[list[int]] = []

    def together(samples: Sequence[int]) -> bool:
        calls.append(list(samples))
        return {2, 9} <= set(samples)

    found = find_bad_samples(together, 16)
    assert found in ([2], [9])
    assert [i for i in range(16) if i not in found] in calls


@pytest.mark.parametrize(
    ("in_a_row", "patience", "rollbacks", "most", "kind"),
    yaml.safe_load(Path(__file__).with_name("decisions.yaml").read_text(encoding="utf-8"))[
        "nonfinite"
    ],
)
def test_patience_comes_before_rollback_and_rollback_before_the_end(
    in_a_row: int, patience: int | None, rollbacks: int, most: int, kind: str
) -> None:
    """Each limit holds at its exact value, and without patience there are only skips."""
    decision = decide_after_nonfinite(
        reason="NaN in head",
        in_a_row=in_a_row,
        patience=patience,
        rollbacks_in_a_row=rollbacks,
        max_rollbacks=most,
    )
    assert type(decision).__name__ == kind
    assert decision.promise == "changes training"
    assert "NaN in head" in decision.reason


@pytest.mark.parametrize("rollbacks", [0, 1, 2])
def test_a_stop_counts_only_rollbacks_that_were_made(rollbacks: int) -> None:
    """A policy that allows no rollback is named instead of a count of zero."""
    decision = decide_after_nonfinite(
        reason="NaN in head",
        in_a_row=3,
        patience=3,
        rollbacks_in_a_row=rollbacks,
        max_rollbacks=rollbacks,
    )

    assert ("max_rollbacks=0" in decision.reason) is (rollbacks == 0)
    assert (f"{rollbacks} rollback" in decision.reason) is (rollbacks > 0)
