"""A long run with random failures, played event by event, for the formulas of ``checkpoint.goodput``.

The formulas are derived; here nothing is: a training loop, a writer and a source of failures act in the order of
their times.
"""

from __future__ import annotations

import math
import random
import statistics


def simulate_run(
    interval: float, save: float, between: float, restart: float, *, stall: float, failures: int, seed: int
) -> tuple[float, float]:
    """Play a run until it has failed so many times; the times are those of `effective_training_time_ratio`.

    Returns:
        The share of the time that is training in a checkpoint, and its standard error.
    """
    chance = random.Random(seed)
    useful, walls = [], []
    for _ in range(failures):
        spent = 0.0
        while (failure := chance.expovariate(1 / between)) < restart:
            spent += failure  # the restart is hit, and begins anew
        useful.append(interval * _checkpoints(failure - restart, interval, save, stall))
        walls.append(spent + failure)
    wall = math.fsum(walls)
    ratio = math.fsum(useful) / wall
    residuals = [trained - ratio * lasted for trained, lasted in zip(useful, walls, strict=True)]
    return ratio, statistics.stdev(residuals) * math.sqrt(failures) / wall  # of a ratio of two means


def _checkpoints(failure: float, interval: float, save: float, stall: float) -> int:
    """Return how many checkpoints counted before a failure, all times from the end of the restart.

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
