"""How often to save, and which share of the time of a long run trains it: closed forms.

Time is lost to saving, to work that was done after the newest checkpoint when a failure came, and to restarting.
Failures come at random with a constant rate (exponential), also while the run saves or restarts. Stdlib only. The
same run, played event by event, is in ``benchmarks/goodput.py``.

    interval   training between two saves
    stall      how long a save holds the training loop; all of the save if it is synchronous
    save       from the beginning of a save until its checkpoint counts
"""

from __future__ import annotations

import math

from holdfast.core.errors import PolicyError


def optimal_interval_seconds(
    save_seconds: float, mean_seconds_between_failures: float, restart_seconds: float
) -> float:
    """Return the time from one save to the next that makes the run train for most of its time.

    ``C + sqrt(2 (M + R) C + C²)``, arXiv 2410.18124. As there, it runs from the beginning of a save to the beginning
    of the next, so the training in between is this less `save_seconds`.

    Args:
        save_seconds: C, how long a save holds the loop; of one in the background its stall alone.
        mean_seconds_between_failures: M, of the whole job; infinite gives an infinite interval.
        restart_seconds: R, from a failure until training goes on.

    Raises:
        PolicyError: H706, for a number that is negative or no number, or an M of 0.

    Example:
        >>> round(optimal_interval_seconds(60, 11_135, 1200))
        1278
    """
    _check_costs(save_seconds, mean_seconds_between_failures, restart_seconds)
    if save_seconds == 0:
        return 0.0
    # The root is taken of the factors, whose product may be too large for a float.
    wait = 2 * (mean_seconds_between_failures + restart_seconds) + save_seconds
    return save_seconds + math.sqrt(save_seconds) * math.sqrt(wait)


def effective_training_time_ratio(
    interval_seconds: float,
    save_seconds: float,
    mean_seconds_between_failures: float,
    restart_seconds: float,
    *,
    stall_seconds: float | None = None,
) -> float:
    """Return the share of the wall-clock time that becomes lasting progress, 0 to 1.

    With τ the interval, s the stall and L the save, the k-th checkpoint after a restart counts at kτ + (k-1)s + L.
    Summed over the chances that no failure comes before, and divided by the mean time from restart to restart:
    ``τ exp(-(R + L + τ)/M) / (M (1 - exp(-(τ + s)/M)))``. For a synchronous save, s = L = C, this is the usual
    ``τ / (M exp(R/M) (exp((τ + C)/M) - 1))`` (Daly 2006).

    A `mean_seconds_between_failures` is infinite if nothing ever fails, a `stall_seconds` of None is all of the save.

    Raises:
        PolicyError: H706 for a number that cannot be, H709 for a save that is not over when the next is due.
    """
    stall = save_seconds if stall_seconds is None else stall_seconds
    _check_interval(interval_seconds, save_seconds, stall)
    _check_costs(save_seconds, mean_seconds_between_failures, restart_seconds)
    training = interval_seconds / (interval_seconds + stall)
    # Only negative powers: exp((τ + C)/M) itself is too large for a float once τ is 710 times M.
    period = (interval_seconds + stall) / mean_seconds_between_failures
    away = (restart_seconds + save_seconds + interval_seconds) / mean_seconds_between_failures
    return training * math.exp(-away) * (period / -math.expm1(-period) if period else 1.0)


def _check_interval(interval: float, save: float, stall: float) -> None:
    if not 0 < interval < math.inf:
        raise _impossible("interval_seconds", interval, "the training between two saves takes some time")
    if not 0 <= stall <= save:
        raise _impossible("stall_seconds", stall, f"it is part of the save, which takes {save:g} s")
    # The last digits of a sum and of a difference of floats are not the same.
    if save > (interval + stall) * (1 + 1e-9):
        raise PolicyError(
            f"an interval of {interval:g} s of training with saves that take {save:g} s",
            limit="one save is written at a time, so the next begins after it",
            fix=f"choose an interval of at least {save - stall:g} s.",
            rule="H709",
        )


def _check_costs(save: float, between_failures: float, restart: float) -> None:
    for name, value in (("save_seconds", save), ("restart_seconds", restart)):
        if not 0 <= value < math.inf:
            raise _impossible(name, value, "it takes 0 seconds or more")
    if not between_failures > 0:
        raise _impossible("mean_seconds_between_failures", between_failures, "it is above 0 seconds")


def _impossible(name: str, value: float, limit: str) -> PolicyError:
    return PolicyError(f"{name}={value:g}", limit=limit, fix="pass what was measured, in seconds.", rule="H706")
