"""How often to save, and which share of the time of a long run trains it: closed forms, and failure rates as text.

Time is lost to saving, to work that was done after the newest checkpoint when a failure came, and to restarting.
Failures come at random with a constant rate (exponential), also while the run saves or restarts. Stdlib only; the
same run, simulated, is in ``checkpoint.simulation``.

    interval   training between two saves
    stall      how long a save holds the training loop; all of the save if it is synchronous
    save       from the beginning of a save until its checkpoint counts
"""

from __future__ import annotations

import math
import re

from holdfast.core.errors import PolicyError

_NUMBER = r"(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+)"
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0, "y": 31_557_600.0}
_WORDS = {
    "s": "s", "sec": "s", "second": "s", "min": "min", "minute": "min", "h": "h", "hour": "h", "d": "d", "day": "d",
    "w": "w", "week": "w", "y": "y", "year": "y",
}  # fmt: skip
_DURATION = re.compile(rf"{_NUMBER}\s*([a-z]+)")
_RATE = re.compile(rf"{_NUMBER}\s*/\s*{_NUMBER}?\s*(?:(gpu|node)[- ]?)?([a-z]+)")


def optimal_interval_seconds(
    save_seconds: float, mean_seconds_between_failures: float, restart_seconds: float
) -> float:
    """Return the time from one save to the next that makes the run train for most of its time.

    ``C + sqrt(2 (M + R) C + C²)``, arXiv 2410.18124. As there, it runs from the beginning of a save to the beginning
    of the next, so the training in between is this less `save_seconds`.

    Args:
        save_seconds: C, how long a save holds the loop. Of one in the background this is its stall alone; the
            interval is then at least as long as the writer takes.
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


def young_interval_seconds(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Return Young's interval of training between two saves, ``sqrt(2 C M)`` (Young 1974): the usual rule.

    Args:
        save_seconds: C, how long a save holds the loop.
        mean_seconds_between_failures: M, of the whole job.

    Raises:
        PolicyError: H706, as `optimal_interval_seconds`.
    """
    _check_costs(save_seconds, mean_seconds_between_failures, 0.0)
    if save_seconds == 0:
        return 0.0
    return math.sqrt(2 * save_seconds) * math.sqrt(mean_seconds_between_failures)


def effective_training_time_ratio(
    interval_seconds: float,
    save_seconds: float,
    mean_seconds_between_failures: float,
    restart_seconds: float,
    *,
    stall_seconds: float | None = None,
    first_order: bool = False,
) -> float:
    """Return the share of the wall-clock time that becomes lasting progress, 0 to 1.

    With τ the interval, s the stall and L the save, the k-th checkpoint of a life counts at kτ + (k-1)s + L. Summed
    over the chances that a life lasts so long, and divided by the mean of a life and the restarts before it:
    ``τ exp(-(R + L + τ)/M) / (M (1 - exp(-(τ + s)/M)))``. For a synchronous save, s = L = C, this is the usual
    ``τ / (M exp(R/M) (exp((τ + C)/M) - 1))`` (Daly 2006).

    Args:
        interval_seconds: Training between two saves, above 0.
        save_seconds: From the beginning of a save until its checkpoint counts.
        mean_seconds_between_failures: Of the whole job; infinite if nothing ever fails.
        restart_seconds: From a failure until training goes on.
        stall_seconds: How long a save holds the loop; None is all of `save_seconds`.
        first_order: Whether to return ``1 / ((1 + s/τ)(1 + (R + τ/2 + L - s)/M))`` instead: the same while M is far
            above the rest, and too high otherwise (by 0.02 at M = 7τ, where restarts are long).

    Raises:
        PolicyError: H706 for a number that cannot be, H709 for a save that is not over when the next is due.
    """
    stall = save_seconds if stall_seconds is None else stall_seconds
    check_interval(interval_seconds, save_seconds, stall)
    _check_costs(save_seconds, mean_seconds_between_failures, restart_seconds)
    training = interval_seconds / (interval_seconds + stall)
    if first_order:
        again = restart_seconds + interval_seconds / 2 + save_seconds - stall
        return training / (1 + again / mean_seconds_between_failures)
    # Only negative powers: exp((τ + C)/M) itself is too large for a float once τ is 710 times M.
    period = (interval_seconds + stall) / mean_seconds_between_failures
    away = (restart_seconds + save_seconds + interval_seconds) / mean_seconds_between_failures
    return training * math.exp(-away) * (period / -math.expm1(-period) if period else 1.0)


def check_interval(interval_seconds: float, save_seconds: float, stall_seconds: float) -> None:
    """Find out whether a run can save so often.

    Raises:
        PolicyError: H706 for an interval that is not above 0 and finite or a stall that is not part of the save,
            H709 for a save that is not over when the next is due: one is in flight at a time.
    """
    if not 0 < interval_seconds < math.inf:
        raise _impossible("interval_seconds", interval_seconds, "the training between two saves takes some time")
    check_stall(stall_seconds, save_seconds)
    # The last digits of a sum and of a difference of floats are not the same.
    if save_seconds > (interval_seconds + stall_seconds) * (1 + 1e-9):
        raise PolicyError(
            f"an interval of {interval_seconds:g} s of training with saves that take {save_seconds:g} s",
            limit="one save is written at a time, so the next begins after it",
            fix=f"choose an interval of at least {save_seconds - stall_seconds:g} s.",
            rule="H709",
        )


def check_stall(stall_seconds: float, save_seconds: float) -> None:
    """Find out whether a save can hold the loop for so long.

    Raises:
        PolicyError: H706 if it is no part of the save.
    """
    if not 0 <= stall_seconds <= save_seconds:
        raise _impossible("stall_seconds", stall_seconds, f"it is part of the save, which takes {save_seconds:g} s")


def _check_costs(save: float, between_failures: float, restart: float) -> None:
    for name, value in (("save_seconds", save), ("restart_seconds", restart)):
        if not 0 <= value < math.inf:
            raise _impossible(name, value, "it takes 0 seconds or more")
    if not between_failures > 0:
        raise _impossible("mean_seconds_between_failures", between_failures, "it is above 0 seconds")


def _impossible(name: str, value: float, limit: str) -> PolicyError:
    return PolicyError(f"{name}={value:g}", limit=limit, fix="pass what was measured, in seconds.", rule="H706")


def parse_seconds(text: str) -> float:
    """Return the seconds that ``"3.1h"``, ``"20 min"`` or ``"54 days"`` mean; a bare number is seconds.

    Raises:
        PolicyError: H705.

    Example:
        >>> parse_seconds("1.5h")
        5400.0
    """
    bare = text.strip().lower()
    found = _DURATION.fullmatch(bare + ("" if bare[-1:].isalpha() else "s"))  # not any letter: 1e6 is a bare number
    unit = None if found is None else _unit(found[2])
    if found is None or unit is None:
        raise _unreadable(text, "a duration is a number and one of s, min, h, d, w, y", "write 3.1h, 20min or 54d.")
    return float(found[1]) * _SECONDS[unit]


def parse_failures(text: str, *, gpus: int, counted_on: int | None = None, gpus_per_node: int = 8) -> float:
    """Return the mean seconds between two failures of a job, from a count of failures.

    Args:
        text: ``"419/54d"``: so many in that time, of a whole job. ``"6.5/1000 node-days"``, ``"1/50000 gpu-hours"``:
            so many in that much time of one node or device.
        gpus: Devices of the job in question.
        counted_on: Devices of the job that had the failures in `text`; None: as many as `gpus`. Failures grow with
            the number of devices. Without effect on a rate of nodes or devices.
        gpus_per_node: Devices of one node.

    Raises:
        PolicyError: H705 for a text that is no rate, H706 for a count of devices below 1.

    Example:
        >>> round(parse_failures("419/54d", gpus=16_384) / 3600, 2)
        3.09
    """
    for name, count in (("gpus", gpus), ("failures_gpus", counted_on), ("gpus_per_node", gpus_per_node)):
        if count is not None and count < 1:
            raise PolicyError(f"{name}={count}", limit="at least 1 is needed", fix="pass a count.", rule="H706")
    found = _RATE.fullmatch(text.strip().lower())
    unit = None if found is None else _unit(found[4])
    if found is None or unit is None or not 0 < float(found[1]) < math.inf or not 0 < float(found[2] or 1) < math.inf:
        raise _unreadable(
            text,
            "failures are a count above 0, a slash and a time",
            "write 419/54d, or 6.5/1000 node-days; --mtbf 3.1h if you know the time between failures.",
        )
    between = float(found[2] or 1) * _SECONDS[unit] / float(found[1])
    devices = {"gpu": 1, "node": gpus_per_node, None: gpus if counted_on is None else counted_on}[found[3]]
    return between * devices / gpus


def _unit(word: str) -> str | None:
    return _WORDS.get(word) or _WORDS.get(word.removesuffix("s"))


def _unreadable(text: str, limit: str, fix: str) -> PolicyError:
    return PolicyError(f"{text!r} cannot be read", limit=limit, fix=fix, rule="H705")
