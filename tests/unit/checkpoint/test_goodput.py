"""The closed forms of goodput, their simulation, and failure rates as people write them."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from holdfast.checkpoint.goodput import (
    effective_training_time_ratio,
    optimal_interval_seconds,
    parse_failures,
    parse_seconds,
    young_interval_seconds,
)
from holdfast.checkpoint.simulation import simulate_run
from holdfast.core.errors import PolicyError

_META, _LLAMA = "6.5/1000 node-days", "419/54d"
# Save and restart in seconds: a slow store, a fast one, one in memory.
_COSTS = ((60.0, 1200.0), (5.0, 300.0), (0.5, 60.0))


@pytest.mark.parametrize(
    ("failures", "gpus", "simulated_elsewhere"),
    [
        (_META, 1_024, (0.955, 0.988, 0.996)),
        (_META, 16_384, (0.725, 0.918, 0.979)),
        (_LLAMA, 1_024, (0.968, 0.991, 0.997)),
        (_LLAMA, 16_384, (0.811, 0.945, 0.985)),
        (_LLAMA, 65_536, (0.525, 0.846, 0.961)),
    ],
)
def test_the_published_clusters_give_the_ratios_of_another_simulation(failures, gpus, simulated_elsewhere) -> None:
    """Formula and simulation lie within 0.0045 of a table that was simulated by other code before this one."""
    between = parse_failures(failures, gpus=gpus, counted_on=16_384)
    for (save, restart), expected in zip(_COSTS, simulated_elsewhere, strict=True):
        interval = optimal_interval_seconds(save, between, restart) - save
        exact = effective_training_time_ratio(interval, save, between, restart)
        played = simulate_run(interval, save, between, restart)
        assert exact == pytest.approx(expected, abs=0.0045)
        assert played.ratio == pytest.approx(expected, abs=0.0045 + 2 * played.standard_error)


def test_the_formula_and_the_simulation_agree() -> None:
    """Where failures are 10 intervals apart or more, they differ by less than 0.5 %, also with background saves."""
    tried = 0
    for between, (save, restart), stall, length in itertools.product(
        (3_000.0, 11_135.0, 2e7), _COSTS, (1.0, 0.01), (0.3, 2.0)
    ):
        best = optimal_interval_seconds(stall * save, between, restart)
        interval = max(length * best, save)
        if between > 10 * interval:
            tried += 1
            exact = effective_training_time_ratio(interval, save, between, restart, stall_seconds=stall * save)
            played = simulate_run(interval, save, between, restart, stall_seconds=stall * save, seed=tried)
            assert played.ratio == pytest.approx(exact, rel=0.005)
            assert played.ratio == pytest.approx(exact, abs=4 * played.standard_error)
    assert tried > 25


def test_a_period_as_long_as_the_time_between_failures_is_still_exact() -> None:
    """The exact form holds where most lives save nothing; the first-order form is far too high there."""
    exact = effective_training_time_ratio(1000.0, 300.0, 500.0, 400.0)
    played = simulate_run(1000.0, 300.0, 500.0, 400.0)
    assert played.ratio == pytest.approx(exact, abs=4 * played.standard_error)
    assert effective_training_time_ratio(1000.0, 300.0, 500.0, 400.0, first_order=True) > 2 * exact


def test_the_standard_error_is_the_spread_of_repeated_simulations() -> None:
    """Over 200 seeds the deviation from the formula, in standard errors, spreads by 1."""
    exact = effective_training_time_ratio(300.0, 60.0, 2784.0, 300.0, stall_seconds=2.0)
    runs = [
        simulate_run(300.0, 60.0, 2784.0, 300.0, stall_seconds=2.0, failures=300, seed=seed) for seed in range(200)
    ]
    deviations = [(run.ratio - exact) / run.standard_error for run in runs]
    assert abs(statistics.mean(deviations)) < 4 / math.sqrt(200)
    assert statistics.stdev(deviations) == pytest.approx(1.0, abs=0.2)


def test_each_loss_has_its_cause() -> None:
    """The four shares add to one, each as large as theory says, and the same seed gives the same run."""
    run = simulate_run(338.0, 5.0, 11_135.0, 300.0)
    assert run.ratio + run.saving + run.lost_work + run.restarting == pytest.approx(1.0)
    assert run.saving == pytest.approx(run.ratio * 5 / 338)
    assert run.restarting == pytest.approx(-math.expm1(-300 / 11_135), rel=0.03)
    assert run.lost_work == pytest.approx((338 + 5) / 2 / 11_135, rel=0.05)
    assert run == simulate_run(338.0, 5.0, 11_135.0, 300.0)
    assert run != simulate_run(338.0, 5.0, 11_135.0, 300.0, seed=1)


def test_the_interval_of_the_paper_is_as_good_as_the_best_one() -> None:
    """No interval trains for 1 % more of the time than the chosen one while failures are 10 intervals apart."""
    for between, (save, restart) in itertools.product((2784.0, 6490.0, 11_135.0, 1e5, 2e7), _COSTS):
        chosen = optimal_interval_seconds(save, between, restart)
        if between > 10 * chosen:
            best = max(
                effective_training_time_ratio(chosen * 1.1**power, save, between, restart) for power in range(-30, 31)
            )
            assert effective_training_time_ratio(chosen - save, save, between, restart) > 0.99 * best


def test_intervals_from_their_definitions() -> None:
    """The optimum maximises the paper's availability, Young's rule is its square root, and nothing costs nothing."""

    def availability(period: float) -> float:
        return (period - 60) / period * 11_135 / (11_135 + 1200 + period / 2)

    chosen = optimal_interval_seconds(60.0, 11_135.0, 1200.0)
    assert max((availability(chosen * factor), factor) for factor in (0.98, 0.99, 1.0, 1.01, 1.02))[1] == 1.0
    assert young_interval_seconds(60.0, 11_135.0) == pytest.approx(math.sqrt(2 * 60 * 11_135))
    assert optimal_interval_seconds(0.0, math.inf, 1.0) == young_interval_seconds(0.0, math.inf) == 0.0


def test_large_and_small_arguments_neither_overflow_nor_lose_digits() -> None:
    """Far beyond the range of exp the ratio is 0, 1 or its limit, and the optimum is finite where it can be."""
    assert effective_training_time_ratio(1e9, 60.0, 100.0, 5.0) == 0.0
    assert effective_training_time_ratio(10.0, 1.0, 1e-300, 5.0) == 0.0
    assert effective_training_time_ratio(100.0, 1.0, math.inf, 5.0) == pytest.approx(100 / 101)
    assert effective_training_time_ratio(100.0, 1.0, 1e17, 5.0) == pytest.approx(100 / 101)
    assert effective_training_time_ratio(1e-9, 0.0, 1e9, 0.0) == pytest.approx(1.0)
    assert optimal_interval_seconds(1e200, 1e200, 1.0) == pytest.approx((1 + math.sqrt(3)) * 1e200)


@pytest.mark.parametrize(
    ("text", "gpus", "counted_on", "hours"),
    [
        ("419/54d", 16_384, None, 54 * 24 / 419),
        (" 419 / 54 Days ", 65_536, 16_384, 54 * 24 / 419 / 4),
        ("6.5/1000 node-days", 16_384, None, 1000 * 24 / 6.5 / 2048),
        ("6.5/1000node-days", 8, 3, 1000 * 24 / 6.5),
        ("1/50000 gpu-hours", 100, None, 500),
        ("1/w", 8, None, 168),
    ],
)
def test_failure_rates_as_people_write_them(text, gpus, counted_on, hours) -> None:
    """A count per time of a job scales with its devices; one per node or device is multiplied up to the job."""
    assert parse_failures(text, gpus=gpus, counted_on=counted_on) == pytest.approx(hours * 3600)


def test_durations_as_people_write_them() -> None:
    """Units may be short or long, and a bare number is seconds."""
    texts = ("90", "1e3", "1.5min", "2 hours", "1e-1 d", "1 Week", ".5s")
    assert [parse_seconds(text) for text in texts] == [90.0, 1000.0, 90.0, 7200.0, 8640.0, 604_800.0, 0.5]


@pytest.mark.parametrize(
    "text", ["", "419", "419/0d", "0/54d", "-1/d", "419/54", "419/54m", "1/1000 rack-days", "a/b"]
)
def test_a_rate_that_cannot_be_read_is_said(text) -> None:
    """A text that is no rate, or one of nothing, is H705 with an example of each form."""
    with pytest.raises(PolicyError, match="node-days") as found:
        parse_failures(text, gpus=8)
    assert found.value.rule == "H705"


@pytest.mark.parametrize("text", ["", "h", "-3h", "3 m", "3h 20min", "nan", "inf"])
def test_a_duration_that_cannot_be_read_is_said(text) -> None:
    """A text that is no duration is H705 with an example."""
    with pytest.raises(PolicyError, match="20min") as found:
        parse_seconds(text)
    assert found.value.rule == "H705"


@pytest.mark.parametrize(
    ("arguments", "stall", "rule"),
    [
        ((0.0, 1.0, 100.0, 1.0), None, "H706"),
        ((math.inf, 1.0, 100.0, 1.0), None, "H706"),
        ((10.0, -1.0, 100.0, 1.0), None, "H706"),
        ((10.0, 1.0, 0.0, 1.0), None, "H706"),
        ((10.0, 1.0, math.nan, 1.0), None, "H706"),
        ((10.0, 1.0, 100.0, math.nan), None, "H706"),
        ((10.0, 1.0, 100.0, 1.0), 2.0, "H706"),
        ((10.0, 60.0, 100.0, 1.0), 1.0, "H709"),
    ],
)
def test_costs_that_cannot_be_are_said(arguments, stall, rule) -> None:
    """Numbers without a meaning, a stall longer than its save and a save that never ends are errors."""
    with pytest.raises(PolicyError) as found:
        effective_training_time_ratio(*arguments, stall_seconds=stall)
    assert found.value.rule == rule
    with pytest.raises(PolicyError, match="H706"):
        parse_failures("1/d", gpus=0)
