"""How long a run goes on from one save to the next, chosen from what saves have cost in it.

The availability-optimal interval (arXiv 2410.18124), but never so short that saves take more than
their share of the time, nor shorter than one write; sooner in a young run. Costs are medians of
what was measured.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

EARLY_SECONDS = 5.0
"""Age of a run at which it is saved in any case.

What a person waits who looks whether it has begun well.
"""

_EARLY_COSTS = 10  # times what a save takes lie before it at least, also in a young run
# Times what the first save holds lies in later ones: Adam has two values beside each weight
_MOMENTS = 3
_SAVES = 5


def optimal_interval_seconds(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Return the time from one save to the next, both begun, that makes a run train for most of its
    time.

    ``C + sqrt(2 M C + C²)``, arXiv 2410.18124, for saves that hold the loop for C. The time that a
    restart takes is not known here; it is small against M, and without it the interval is shorter.
    """
    return save_seconds + math.sqrt(save_seconds) * math.sqrt(
        2 * mean_seconds_between_failures + save_seconds
    )


class IntervalChooser:
    """Says when a save of one run is due; times are monotonic.

    Saves may take the share `most_overhead` of the time at most, and come after `most_minutes` at
    the latest.
    """

    def __init__(
        self,
        *,
        mean_seconds_between_failures: float,
        most_overhead: float,
        most_minutes: float | None = None,
    ) -> None:
        self._between_failures = mean_seconds_between_failures
        self._most_overhead = most_overhead
        self._most_minutes = most_minutes
        self._began: float | None = None
        self._tried: float | None = None
        self._first: tuple[float, float] | None = None
        self.costs: deque[tuple[float, float]] = deque(maxlen=_SAVES)
        self._computed: deque[float] = deque(maxlen=_SAVES)  # CPU time of the writer

    def boundary(self, seconds: float) -> None:
        """Note that a step is over."""
        self._began = seconds if self._began is None else self._began

    def tried(self, seconds: float) -> None:
        """Note that a save is begun, or was read back.

        Whatever comes of it, the next one is not due at once.
        """
        self._tried = seconds

    def first_save_took(self, seconds: float, *, cpu_seconds: float = 0.0) -> None:
        """Note the cost of the save before the first step.

        What is known of the others, until there is one.
        """
        self._first = seconds, seconds
        self._computed.append(_MOMENTS * cpu_seconds)

    def save_took(self, *, stall_seconds: float, seconds: float, cpu_seconds: float = 0.0) -> None:
        """Note how long a save held the loop and took.

        `cpu_seconds` is what its writer computed, where the training wants the same cores.
        """
        self._computed.append(cpu_seconds)
        self.costs.append((stall_seconds, seconds))

    def is_overdue(self, seconds: float, *, auto: bool) -> bool:
        """Return whether a save is due by the time; not `auto`: only after the most minutes."""
        if self._began is None:
            return False
        since = self._began if self._tried is None else max(self._began, self._tried)
        passed = seconds - since
        if self._most_minutes is not None and passed >= 60 * self._most_minutes:
            return True
        return auto and passed >= self.interval_seconds(since - self._began)

    def interval_seconds(self, age: float) -> float:
        """Return the time from a save at this age of the run to the next one.

        A young run is saved after `EARLY_SECONDS`, and whenever it is twice as old as at its last
        save, so that it never loses more than half of its time. Most runs that fail do so early.
        """
        known = self.costs or ([self._first] if self._first else [(0.0, 0.0)])
        cost, write = (float(statistics.median(values)) for values in zip(*known, strict=True))
        interval: float = max(EARLY_SECONDS, age, _EARLY_COSTS * cost)
        if cost > 0:
            best = optimal_interval_seconds(cost, self._between_failures)
            interval = min(interval, max(best, cost / self._most_overhead, write))
        computed: float = statistics.median(self._computed or [0.0])
        return max(interval, computed / self._most_overhead)
