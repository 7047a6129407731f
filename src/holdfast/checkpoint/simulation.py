"""Play a long run with random failures event by event, and count where its time goes. Stdlib only.

The formulas in ``checkpoint.goodput`` are derived; here nothing is: a training loop, a writer and a source of
failures act in the order of their times. The two must agree, and the tests say how well.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from dataclasses import dataclass

from holdfast.checkpoint.goodput import check_interval
from holdfast.core.errors import PolicyError

# Of the time between failures: shorter ones are lost in the last digits of a float, and time would stand still.
_SHORTEST_PERIOD = 1e-12
_LONGEST_RESTART = 5  # in times between failures: one restart of 150 succeeds, so 0.7 % of the time is left to train


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """Where the time of a simulated run went, as shares of its wall-clock time; the four shares add to 1.

    Args:
        ratio: Training that a checkpoint holds.
        standard_error: Of `ratio`.
        saving: The loop held by saves whose checkpoint counts.
        lost_work: Everything between the newest checkpoint that counts and the failure.
        restarting: From failures until training went on.
        failures: How many there were.
    """

    ratio: float
    standard_error: float
    saving: float
    lost_work: float
    restarting: float
    failures: int


def simulate_run(
    interval_seconds: float,
    save_seconds: float,
    mean_seconds_between_failures: float,
    restart_seconds: float,
    *,
    stall_seconds: float | None = None,
    failures: int = 20_000,
    seed: int = 0,
) -> SimulatedRun:
    """Play a run until it has failed so many times.

    Args:
        interval_seconds: Training between two saves, above 0.
        save_seconds: From the beginning of a save until its checkpoint counts.
        mean_seconds_between_failures: Of the whole job, finite. Failures also hit saves and restarts.
        restart_seconds: From a failure until training goes on; one that is hit begins anew.
        stall_seconds: How long a save holds the loop; None is all of `save_seconds`.
        failures: Lives to play, at least 2; the standard error falls with their square root.
        seed: Of the failures.

    Raises:
        PolicyError: H706 or H709, as `effective_training_time_ratio`; H706 too for restarts so long that hardly any
            succeeds, and for saves so close together that floats cannot tell their times apart.
    """
    assert failures >= 2, "one life has no standard error"
    assert math.isfinite(mean_seconds_between_failures), "a run that never fails has no end"
    stall = save_seconds if stall_seconds is None else stall_seconds
    check_interval(interval_seconds, save_seconds, stall)
    period, between = interval_seconds + stall, mean_seconds_between_failures
    if not period >= _SHORTEST_PERIOD * between >= sys.float_info.min:
        raise PolicyError(
            f"{period:g} s from one save to the next with a failure every {between:g} s",
            limit=f"saves at least {_SHORTEST_PERIOD:g} times the time between failures apart can be simulated",
            fix="check what a save takes, the interval, and how often the job fails.",
            rule="H706",
        )
    if not 0 <= restart_seconds <= _LONGEST_RESTART * mean_seconds_between_failures:
        raise PolicyError(
            f"restart_seconds={restart_seconds:g} with a failure every {mean_seconds_between_failures:g} s",
            limit=f"a restart takes from 0 to {_LONGEST_RESTART} times the time between failures",
            fix="check both; a job that fails so often does not train.",
            rule="H706",
        )
    chance = random.Random(seed)  # noqa: S311 - no secret
    rate = 1 / mean_seconds_between_failures
    useful, walls, stalls, restarts = [], [], [], []
    for _ in range(failures):
        restarting, up = _restart(chance, rate, restart_seconds)
        counted = _checkpoints(up, interval_seconds, save_seconds, stall)
        useful.append(counted * interval_seconds)
        stalls.append(counted * stall)
        walls.append(restarting + up)
        restarts.append(restarting)
    wall = math.fsum(walls)
    ratio, saving, restarting = (math.fsum(part) / wall for part in (useful, stalls, restarts))
    residuals = [trained - ratio * lasted for trained, lasted in zip(useful, walls, strict=True)]
    return SimulatedRun(
        ratio=ratio,
        standard_error=statistics.stdev(residuals) * math.sqrt(failures) / wall,  # of a ratio of two means
        saving=saving,
        lost_work=1 - ratio - saving - restarting,
        restarting=restarting,
        failures=failures,
    )


def _restart(chance: random.Random, rate: float, restart_seconds: float) -> tuple[float, float]:
    """Return the time until a restart succeeds, failed ones included, and how long the life then lasts."""
    spent = 0.0
    while (failure := chance.expovariate(rate)) < restart_seconds:
        spent += failure
    return spent + restart_seconds, failure - restart_seconds


def _checkpoints(failure: float, interval: float, save: float, stall: float) -> int:
    """Return how many checkpoints of a life counted before its failure, all times from the end of its restart.

    The loop trains and is held in turns; the writer works from the beginning of a save on, beside the loop once the
    stall is over. Periods that end well before the failure are all the same, so they are counted at once.
    """
    period = interval + stall
    counted = max(0, int(failure / period) - 2)
    loop_due, training, writer_due = counted * period + interval, True, math.inf
    if counted:
        writer_due = (counted - 1) * period + interval + save  # the newest of them may still be in flight
        counted -= 1
    while True:
        now = min(loop_due, writer_due)
        if failure < now:
            return counted
        if writer_due <= loop_due:
            counted, writer_due = counted + 1, math.inf
        elif training:
            loop_due, training, writer_due = now + stall, False, now + save
        else:
            loop_due, training = now + interval, True
