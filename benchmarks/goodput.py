"""Goodput: the formula against a discrete-event simulation, and the interval that is chosen against the best one.

How: mean times between failures from 20 minutes to 300 days, saves from 0.1 s to 10 minutes that hold the loop for
all of their time, a tenth or a hundredth of it, restarts from 10 s to 20 minutes, and intervals of a third, one and
three times the chosen one. Those settings count in which failures are at least 10 intervals and 10 restarts apart.
Each is simulated with failures of its own seed. The best interval of a setting is searched on a grid of steps of 2 %,
by the formula, with synchronous saves.

To reach: formula and simulation within 0.5 % of each other everywhere; the interval that is chosen trains for at
least 99 % of the time that the best one does. Nothing is timed.
"""

from __future__ import annotations

import itertools
import math

from benchmarks.goodput_simulation import effective_training_time_ratio, simulate_run
from benchmarks.results_file import Result, read_options
from holdfast.checkpoint.goodput import optimal_interval_seconds

_BETWEEN = (1_200.0, 11_135.0, 103_860.0, 1e6, 2.6e7)
_SAVES = (0.1, 5.0, 60.0, 600.0)
_STALLS = (1.0, 0.1, 0.01)
_RESTARTS = (10.0, 300.0, 1200.0)
_LENGTHS = (1 / 3, 1.0, 3.0)
_NEAR = 0.005
_DAY = 86_400.0
_CLUSTERS = (("Llama 3", 16_384 * 54 * _DAY / 419), ("Meta RSC-1", 8000 * _DAY / 6.5))  # seconds of one GPU


def compare_with_simulation(result: Result, failures: int) -> None:
    found, near, seed = [], 0, 0
    for between, save, share, restart in itertools.product(_BETWEEN, _SAVES, _STALLS, _RESTARTS):
        stall = save * share
        for length in _LENGTHS:
            interval = max(length * optimal_interval_seconds(stall, between, restart), save)
            if between < 10 * max(interval, restart):
                continue
            seed += 1
            exact = effective_training_time_ratio(interval, save, between, restart, stall=stall)
            played, _ = simulate_run(interval, save, between, restart, stall=stall, failures=failures, seed=seed)
            found.append(abs(played / exact - 1))
            near += found[-1] <= _NEAR
    result.add_samples("formula against simulation, relative difference", "ratio", found, digits=6)
    result.add_count("settings within 0.5 %", near, len(found), expected=len(found))


def compare_with_best(result: Result) -> None:
    shares: dict[str, list[float]] = {"chosen": [], "Young's": []}
    for between, save, restart in itertools.product(_BETWEEN, _SAVES, _RESTARTS):
        chosen = optimal_interval_seconds(save, between, restart)
        if between < 10 * max(chosen, restart):
            continue
        best = max(
            effective_training_time_ratio(chosen * 1.02**power, save, between, restart) for power in range(-150, 151)
        )
        for name, interval in (("chosen", chosen - save), ("Young's", math.sqrt(2 * save * between))):
            shares[name].append(effective_training_time_ratio(interval, save, between, restart) / best)
    for name, reached in shares.items():
        result.add_samples(f"{name} interval: ratio over the best one's", "ratio", reached, digits=6)
        good = sum(share >= 0.99 for share in reached)
        result.add_count(
            f"{name} interval: settings with 99 % of the best", good, len(reached), expected=len(reached)
        )


def show_clusters(result: Result) -> None:
    """Add the ratio at published failure rates, for a save that holds the loop and for one that hardly does."""
    for (name, between_of_one), gpus in itertools.product(_CLUSTERS, (1024, 16_384, 65_536)):
        between = between_of_one / gpus
        for stall in (5.0, 0.05):
            interval = max(optimal_interval_seconds(stall, between, 300.0) - stall, 5.0 - stall)
            played, _ = simulate_run(interval, 5.0, between, 300.0, stall=stall, failures=20_000, seed=0)
            what = f"{name}, {gpus} GPUs, save 5 s, stall {stall:g} s, restart 300 s: simulated training time"
            result.add_samples(what, "ratio", [played])


def main() -> None:
    options = read_options("goodput", __doc__ or "")
    failures = 20_000 if options.quick else 100_000
    result = Result(options=options, parameters={"failures_in_a_simulation": failures, "seeds": "1, 2, 3, ..."})
    compare_with_simulation(result, failures)
    compare_with_best(result)
    show_clusters(result)
    result.notes.append(f"standard error of a simulation: about {1 / math.sqrt(failures):.4f} of the time lost")
    result.write()


if __name__ == "__main__":
    main()
