"""When a save is due, from what saves have cost: the optimum, and what bounds it."""

from __future__ import annotations

import pytest

from holdfast.checkpoint.interval import IntervalChooser, optimal_interval_seconds

_DAY = 86_400.0


def test_the_optimum_is_that_of_the_paper() -> None:
    """C + sqrt(2 M C + C²): 2 s and a day give 590 s."""
    assert optimal_interval_seconds(2.0, _DAY) == pytest.approx(2 + (2 * _DAY * 2 + 4) ** 0.5)


@pytest.mark.parametrize(
    ("stall", "write", "cpu", "between_failures", "seconds"),
    [
        # 131 s: where saving and lost work cost least
        (0.1, 2.0, 1.0, _DAY, optimal_interval_seconds(0.1, _DAY)),
        (1.0, 2.0, 0.9, 600.0, 100.0),  # 36 s is less than 1 s / 0.01
        (0.001, 90.0, 0.1, 600.0, 90.0),  # one write
        (0.01, 2.0, 1.5, _DAY, 150.0),  # CPU time of the writer / 0.01
    ],
)
def test_each_bound_holds(
    stall: float, write: float, cpu: float, between_failures: float, seconds: float
) -> None:
    """The optimum, the budgets and the time of a write: the longest of the four counts.

    Sooner in a young run.
    """
    chooser = IntervalChooser(mean_seconds_between_failures=between_failures, most_overhead=0.01)
    # Adam has three times as much to write later
    chooser.first_save_took(50.0, cpu_seconds=cpu / 3)
    chooser.save_took(stall_seconds=stall, seconds=write, cpu_seconds=cpu)
    assert chooser.interval_seconds(age=1e9) == pytest.approx(seconds)
    assert chooser.interval_seconds(age=0.0) == pytest.approx(max(5.0, 10 * stall, 100 * cpu))


def test_the_first_save_bounds_the_cost_until_one_was_measured() -> None:
    """The synchronous save before the first step is taken for the cost.

    What is not known is not guessed.
    """
    chooser = IntervalChooser(mean_seconds_between_failures=_DAY, most_overhead=0.01)
    assert (chooser.interval_seconds(age=0.0), chooser.interval_seconds(age=1e4)) == (5.0, 1e4)
    chooser.first_save_took(5.0)
    assert chooser.interval_seconds(age=1e9) == pytest.approx(optimal_interval_seconds(5.0, _DAY))
