"""Goodput: closed forms against a simulation that derives nothing, and the interval that follows from measures."""

from __future__ import annotations

import itertools
import math

import pytest
from benchmarks.goodput_simulation import effective_training_time_ratio, simulate_run
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.goodput import optimal_interval_seconds
from holdfast.checkpoint.interval import IntervalChooser, SaveInterval
from holdfast.core.errors import PolicyError

_DAY = 86_400.0
# Save and restart in seconds: a slow store, a fast one, one in memory.
_COSTS = ((60.0, 1200.0), (5.0, 300.0), (0.5, 60.0))


@pytest.mark.parametrize(
    ("days", "simulated_elsewhere"),
    [
        (8000 / 6.5 / 1_024, (0.955, 0.988, 0.996)),
        (8000 / 6.5 / 16_384, (0.725, 0.918, 0.979)),
        (54 / 419, (0.811, 0.945, 0.985)),
        (54 / 1676, (0.525, 0.846, 0.961)),
    ],
)
def test_the_published_clusters_give_the_ratios_of_another_simulation(days, simulated_elsewhere) -> None:
    """The formula lies within 0.0045 of a table that was simulated by other code before this one."""
    between = days * _DAY
    for (save, restart), expected in zip(_COSTS, simulated_elsewhere, strict=True):
        interval = optimal_interval_seconds(save, between, restart) - save
        assert effective_training_time_ratio(interval, save, between, restart) == pytest.approx(expected, abs=0.0045)


def test_the_formula_and_the_simulation_agree() -> None:
    """Where failures are 10 intervals apart or more, they differ by less than 0.5 %, also with background saves."""
    tried = 0
    for between, (save, restart), share, length in itertools.product(
        (3_000.0, 11_135.0, 2e7), _COSTS, (1.0, 0.01), (0.3, 2.0)
    ):
        stall = share * save
        interval = max(length * optimal_interval_seconds(stall, between, restart), save)
        if between > 10 * interval:
            tried += 1
            exact = effective_training_time_ratio(interval, save, between, restart, stall=stall)
            costs = (interval, save, between, restart)
            played, error = simulate_run(*costs, stall=stall, failures=20_000, seed=tried)
            assert played == pytest.approx(exact, rel=0.005)
            assert played == pytest.approx(exact, abs=4 * error)
    assert tried > 25


@pytest.mark.parametrize(
    "arguments", [(-1.0, 100.0, 1.0), (1.0, 0.0, 1.0), (1.0, math.nan, 1.0), (1.0, 100.0, math.nan)]
)
def test_costs_that_cannot_be_are_said(arguments) -> None:
    """Numbers without a meaning are errors."""
    with pytest.raises(PolicyError) as found:
        optimal_interval_seconds(*arguments)
    assert found.value.rule == "H706"


class _Steps:
    """A clock that a chooser sees move by steps."""

    def __init__(self, chooser: IntervalChooser) -> None:
        self.chooser, self.now = chooser, 0.0
        chooser.resumes(0.0)

    def make(self, count: int, seconds: float, *, writing: bool = False) -> None:
        for _ in range(count):
            self.now += seconds
            self.chooser.boundary(self.now, writing=writing)


def _chooser(between_failures: float = _DAY, overhead: float = 0.01) -> IntervalChooser:
    return IntervalChooser(mean_seconds_between_failures=between_failures, most_overhead=overhead)


def _decided(
    step: float,
    stall: float,
    write: float,
    *,
    cpu: float = 0.0,
    between_failures: float = _DAY,
    overhead: float = 0.01,
) -> tuple[IntervalChooser, SaveInterval | None]:
    chooser = _chooser(between_failures, overhead)
    _Steps(chooser).make(20, step)
    chooser.save_took(stall_seconds=stall, seconds=write, cpu_seconds=cpu)
    return chooser, chooser.decide()


def test_the_first_save_bounds_the_cost_until_one_was_measured() -> None:
    """The synchronous save before the first step is taken for the cost, and forgotten as soon as there is another."""
    chooser = _chooser()
    chooser.first_save_took(5.0)
    steps = _Steps(chooser)
    steps.make(10, 0.1)
    first = chooser.decide()
    assert first is not None
    assert first.seconds == pytest.approx(optimal_interval_seconds(5.0, _DAY, 0.0), rel=0.01)
    chooser.save_took(stall_seconds=0.05, seconds=2.0)
    second = chooser.decide()
    assert second is not None
    assert second.seconds == pytest.approx(optimal_interval_seconds(0.05, _DAY, 0.0), rel=0.01)


@pytest.mark.parametrize(
    ("stall", "write", "cpu", "between_failures", "binding"),
    [
        (0.1, 2.0, 1.0, _DAY, "cost least"),  # sqrt(2 * 86400 * 0.1) = 131 s
        (1.0, 2.0, 0.9, 600.0, "cost of saving at 0.01 of the time"),  # 36 s is less than 1 s / 0.01
        (0.001, 90.0, 0.1, 600.0, "as one write"),
        (0.01, 2.0, 1.5, _DAY, "CPU time of saving at 0.01 of the time"),
    ],
)
def test_each_bound_holds(stall: float, write: float, cpu: float, between_failures: float, binding: str) -> None:
    """The optimum, the budgets and the time of a write: the longest of the four is taken, and said."""
    _, decision = _decided(0.5, stall, write, cpu=cpu, between_failures=between_failures)
    assert decision is not None
    assert binding in decision.reason
    longest = max(optimal_interval_seconds(stall, between_failures, 0.0), stall / 0.01, write, cpu / 0.01)
    assert decision.steps == math.ceil(longest / 0.5)


@settings(max_examples=100, deadline=None)
@given(st.floats(1e-3, 100), st.floats(1e-3, 100), st.floats(0, 1000), st.floats(60, 1e8), st.floats(0.001, 0.5))
def test_no_measurement_breaks_the_budget(
    step: float, stall: float, longer: float, between_failures: float, overhead: float
) -> None:
    """Whatever was measured: saves take at most their share, and one ends before the next is due."""
    chooser, decision = _decided(step, stall, stall + longer, between_failures=between_failures, overhead=overhead)
    if decision is not None:
        seconds = chooser.steps * step
        assert stall <= overhead * seconds * (1 + 1e-9)
        assert stall + longer <= seconds * (1 + 1e-9)


def test_slower_steps_while_a_save_is_written_are_part_of_its_cost() -> None:
    """Ten steps that took twice their time cost ten steps; one evaluation in between costs nothing."""
    chooser = _chooser()
    steps = _Steps(chooser)
    steps.make(20, 0.1)
    steps.make(9, 0.2, writing=True)
    steps.make(1, 30.0, writing=True)
    chooser.save_took(stall_seconds=0.01, seconds=2.0)
    decision = chooser.decide()
    assert decision is not None
    assert decision.save_costs_seconds == pytest.approx(1.01)
    assert decision.step_seconds == pytest.approx(0.1)


def test_the_interval_follows_the_steps_but_not_their_noise() -> None:
    """Steps that become four times as slow make it four times as short; a tenth changes nothing."""
    chooser = _chooser()
    steps = _Steps(chooser)
    steps.make(20, 0.1)
    chooser.save_took(stall_seconds=0.1, seconds=1.0)
    assert chooser.decide() is not None
    before = chooser.steps
    steps.make(128, 0.11)
    assert chooser.decide() is None
    steps.make(128, 0.4)
    assert chooser.decide() is not None
    assert chooser.steps == pytest.approx(before / 4, rel=0.02)
