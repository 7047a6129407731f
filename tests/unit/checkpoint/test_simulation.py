"""The simulation comes to an end, whatever times it is given: a result, or an error that says what cannot be."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.simulation import simulate_run
from holdfast.core.errors import HoldfastError

_TIMES = st.floats(-320, 12).map(lambda exponent: 10.0**exponent)


@pytest.mark.parametrize(
    "arguments",
    [
        (1e-148, 1e-300, 3600.0, 300.0),
        (1e-12, 1e-12, 86_400.0, 300.0),
        (1e-320, 1e-320, 1e-320, 1e-320),
        (1e-310, 0.0, 1e-310, 1e-310),
    ],
)
def test_saves_too_close_together_to_be_told_apart_are_refused(arguments) -> None:
    """Once a period is less than the last digit of the time of a failure, time would stand still for ever."""
    with pytest.raises(HoldfastError, match="H706"):
        simulate_run(*arguments)


@settings(max_examples=300, deadline=None)
@given(_TIMES, _TIMES, st.floats(0, 1), _TIMES, st.one_of(st.just(0.0), _TIMES))
def test_every_simulation_ends(interval, save, held, between, restart) -> None:
    """Over all sizes of floats: the shares of the time add to one, or an error of holdfast says what is wrong."""
    with contextlib.suppress(HoldfastError):
        played = simulate_run(interval, save, between, restart, stall_seconds=held * save, failures=20)
        shares = (played.ratio, played.saving, played.lost_work, played.restarting)
        assert sum(shares) == pytest.approx(1)
        assert all(-1e-9 <= share <= 1 + 1e-9 for share in shares)


def test_the_closest_saves_that_are_taken_give_their_share() -> None:
    """At the bound, half of the time trains and half of it saves, in no more work than for any other interval."""
    played = simulate_run(1e-6, 1e-6, 2e6, 0.0, failures=200)
    assert played.ratio == pytest.approx(0.5, rel=1e-6)
    assert played.saving == pytest.approx(0.5, rel=1e-6)
