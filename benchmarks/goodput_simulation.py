"""Which share of the time of a long run trains it: a closed form, and the run played event by event.

Failures come at random with a constant rate (exponential), also while the run saves or restarts.

    interval   training between two saves
    stall      how long a save holds the training loop; all of the save if it is synchronous
    save       from the beginning of a save until its checkpoint counts

The formula is derived; in the play nothing is: a training loop, a writer and a source of failures act in the order of
their times.
"""

from __future__ import annotations

import math
import random
import statistics


def effective_training_time_ratio(
    interval: float, save: float, between: float, restart: float, *, stall: float | None = None
) -> float:
    """Return the share of the wall-clock time that becomes lasting progress, 0 to 1.

    With τ the interval, s the stall (None: all of the save) and L the save, the k-th checkpoint after a restart
    counts at kτ + (k-1)s + L. Summed over the chances that no failure comes before, and divided by the mean time from
    restart to restart: ``τ exp(-(R + L + τ)/M) / (M (1 - exp(-(τ + s)/M)))``. For a synchronous save, s = L = C, this
    is the usual ``τ / (M exp(R/M) (exp((τ + C)/M) - 1))`` (Daly 2006). `between`, M, is infinite if nothing fails.
    """
    held = save if stall is None else stall
    training = interval / (interval + held)
    # Only negative powers: exp((τ + C)/M) itself is too large for a float once τ is 710 times M.
    period, away = (interval + held) / between, (restart + save + interval) / between
    return training * math.exp(-away) * (period / -math.expm1(-period) if period else 1.0)


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
