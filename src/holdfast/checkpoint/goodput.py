"""How often to save, in closed form.

Time is lost to saving, to work that was done after the newest checkpoint when a failure came, and to restarting.
Failures come at random with a constant rate (exponential), also while the run saves or restarts. Stdlib only. The
share of the time that trains a run, and the same run played event by event, are in ``benchmarks``.
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


def _check_costs(save: float, between_failures: float, restart: float) -> None:
    for name, value in (("save_seconds", save), ("restart_seconds", restart)):
        if not 0 <= value < math.inf:
            raise _impossible(name, value, "it takes 0 seconds or more")
    if not between_failures > 0:
        raise _impossible("mean_seconds_between_failures", between_failures, "it is above 0 seconds")


def _impossible(name: str, value: float, limit: str) -> PolicyError:
    return PolicyError(f"{name}={value:g}", limit=limit, fix="pass what was measured, in seconds.", rule="H706")
