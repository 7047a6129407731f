"""Decide whether one run is slower than another: `holdfast compare --fail-on-regression`.

The wall-clock time between the same steps of both runs is compared, so waiting for data, saving and
evaluation count. The steps are split into stretches, and the result is the median over the
stretches. A disturbance of the machine affects a few stretches but not the median, whereas
something that recurs every few steps is in all of them.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from holdfast.core.errors import PolicyError
from holdfast.report.curves import FloatArray
from holdfast.report.page.gathered_run import GatheredRun

# The first steps are left out, because workers start, caches fill and torch compiles.
_WARM_UP_STEPS = 5
_MOST_STRETCHES = 20
_MIN_STRETCHES = 5
_MIN_STEPS_OF_STRETCH = 10
_MIN_STEPS = _MIN_STRETCHES * _MIN_STEPS_OF_STRETCH
# If both runs were equally fast, 15 or more of 20 stretches would be slower in one run of 50 (sign
# test), and the median would also have to exceed the limit.
_MIN_SLOWER_SHARE = 0.75
_PERCENTAGE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Regression:
    """How much slower a run is than another one.

    Args:
        limit: The largest tolerated slowdown, as a fraction.
        slower_by: The median slowdown over all stretches, as a fraction; negative if it is faster.
        slower_stretches: In how many stretches the run is slower.
        stretches: The number of stretches.
        steps: The number of steps that were compared.
        seconds: The median time per step of the baseline and of the other run.
    """

    limit: float
    slower_by: float
    slower_stretches: int
    stretches: int
    steps: int
    seconds: tuple[float, float]

    @property
    def is_regression(self) -> bool:
        """Return whether the run is slower by more than the limit, in most stretches."""
        is_consistent = self.slower_stretches >= _MIN_SLOWER_SHARE * self.stretches
        return self.slower_by > self.limit and is_consistent

    def as_json(self) -> dict[str, Any]:
        """Return the result for ``--json``."""
        return {**asdict(self), "is_regression": self.is_regression}

    def sentence(self, baseline: str, other: str) -> str:
        """Return the result as a sentence with the names of the two runs."""
        baseline_seconds, seconds = self.seconds
        direction = "slower" if self.slower_by >= 0 else "faster"
        sentence = (
            f"{other} is {abs(self.slower_by):.1%} {direction} than {baseline} (median of"
            f" {self.stretches} stretches of the same {self.steps:,} steps, of which"
            f" {self.slower_stretches} are slower; limit {100 * self.limit:.3g}%). The median time"
            f" per step is {_precisely(seconds)} instead of {_precisely(baseline_seconds)}."
        )
        if self.slower_by > self.limit and not self.is_regression:
            sentence += (
                f" This is not a regression, because fewer than {_MIN_SLOWER_SHARE:.0%} of the"
                " stretches are slower."
            )
        return sentence


def _precisely(seconds: float) -> str:
    """Return a time per step with three digits, since two such times are compared."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s"


def parse_limit(text: str) -> float:
    """Return a percentage such as "5%" as a fraction.

    Raises:
        PolicyError: H105 if the text is not a percentage.
    """
    match = _PERCENTAGE.fullmatch(text)
    if match is None:
        raise PolicyError(
            f"--fail-on-regression {text!r}",
            limit="the limit is a percentage of the time per step, such as 5%",
            fix="pass for example --fail-on-regression 5%.",
            rule="H105",
        )
    return float(match[1]) / 100


def measure_regression(baseline: GatheredRun, other: GatheredRun, limit: float) -> Regression:
    """Return how much slower a run is than the baseline.

    Raises:
        PolicyError: H105 if the runs have too few steps in common.
    """
    for run in (baseline, other):
        if run.tool:
            raise PolicyError(
                f"{run.path} was recorded by another tool ({run.tool})",
                limit="such records do not contain the step times that are compared",
                fix="record both runs with `holdfast run`, or omit --fail-on-regression.",
                rule="H105",
            )
    times = [_end_times(run) for run in (baseline, other)]
    steps = sorted(times[0].keys() & times[1].keys())
    # A stretch may not contain a gap, such as a restart or steps that only one run has recorded.
    stretches = _stretches(steps, times)
    if len(stretches) < _MIN_STRETCHES:
        raise PolicyError(
            f"{baseline.path} and {other.path} have {len(steps):,} recorded steps in common",
            limit=f"a comparison of their speed needs at least {_MIN_STEPS + _WARM_UP_STEPS}"
            " consecutive steps that both runs have recorded in one attempt",
            fix="compare longer runs, or omit --fail-on-regression.",
            rule="H105",
        )
    seconds = np.array(
        [[_seconds_per_step(run, stretch) for run in times] for stretch in stretches]
    )
    slower_by = seconds[:, 1] / seconds[:, 0] - 1.0
    medians = np.median(seconds, axis=0)
    return Regression(
        limit=limit,
        slower_by=float(np.median(slower_by)),
        slower_stretches=int((slower_by > 0).sum()),
        stretches=len(stretches),
        steps=sum(last - first for first, last in stretches),
        seconds=(float(medians[0]), float(medians[1])),
    )


def _end_times(run: GatheredRun) -> dict[int, tuple[int, float]]:
    """Return which process ended each step and the Unix time of that, keyed by step.

    The processes of the first rank are numbered: each attempt of the run has one.

    Only the first rank is used, because the ranks of a run wait for each other. If a step was
    repeated, the newest time counts.
    """
    ends: dict[int, tuple[int, float]] = {}
    lanes = [lane for lane in run.lanes if not lane.rank and not lane.optimizer]
    # A guard may have recorded the same steps as the observed process.
    observed = [lane for lane in lanes if not lane.of_guard]
    for number, lane in enumerate(observed or lanes):
        steps: FloatArray = lane.times.steps
        for step, seconds in zip(steps.tolist(), lane.times.unix_seconds.tolist(), strict=True):
            ends[int(step)] = (number, seconds)
    return ends


def _stretches(
    steps: list[int], times: list[dict[int, tuple[int, float]]]
) -> list[tuple[int, int]]:
    """Return the first and the last step of each stretch to compare."""
    steps = steps[_WARM_UP_STEPS:]
    size = max(_MIN_STEPS_OF_STRETCH, len(steps) // _MOST_STRETCHES)
    stretches = []
    for first in range(0, len(steps) - size, size):
        begin = steps[first]
        end = steps[first + size]
        is_whole = all(
            run[begin][0] == run[end][0] and run[end][1] > run[begin][1] for run in times
        )
        if is_whole:
            stretches.append((begin, end))
    return stretches


def _seconds_per_step(ends: dict[int, tuple[int, float]], stretch: tuple[int, int]) -> float:
    first, last = stretch
    return (ends[last][1] - ends[first][1]) / (last - first)
