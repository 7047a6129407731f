"""Choose the time between saves, based on the cost of earlier saves.

The interval maximizes the share of time spent training (arXiv 2410.18124). It is long enough that
saves stay within their allowed share of the run's time and that one write finishes before the next
begins. A run that has just started saves more often. The cost of a save is the median of recent
measurements.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

# Age of a run at its first periodic save. People watch a new run for about this long to see whether
# it works.
EARLY_SECONDS = 5.0
# Even in a run that has just started, the time between saves is at least this multiple of the time
# for which a save blocks training.
_EARLY_COSTS = 10
# Later saves write this many times as much data as the first save, which happens before the first
# step, when the optimizer has no state yet. Adam keeps two values for each weight.
_MOMENTS = 3
# Number of recent saves from which the median cost is computed.
_SAVES = 5


def optimal_interval_seconds(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Return the time between two saves that maximizes the share of time spent training.

    The formula is ``C + sqrt(2 M C + C²)`` (arXiv 2410.18124), measured from the start of one save
    to the start of the next. It ignores the time that a restart takes. This time is unknown here
    and small compared to M, and including it would only lengthen the interval.

    Args:
        save_seconds: C, the time for which a save blocks the training loop.
        mean_seconds_between_failures: M, the mean time between failures.
    """
    return save_seconds + math.sqrt(save_seconds) * math.sqrt(
        2 * mean_seconds_between_failures + save_seconds
    )


@dataclass(frozen=True, slots=True)
class SaveCost:
    """The cost of one save, in seconds."""

    # How long the save blocked the training loop.
    stall_seconds: float
    # How long the save took in total.
    seconds: float


class IntervalChooser:
    """Decides when a run's next save is due. All times are in seconds, on the monotonic clock.

    Args:
        mean_seconds_between_failures: The expected mean time between failures.
        most_overhead: The largest share of the run's time that saves may take, from 0 to 1.
        most_minutes: The longest time between two saves, or None for no limit.
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
        # When the last save started or the last checkpoint was loaded, whichever is later.
        self._last_save: float | None = None
        # Cost of the save before the first step. Used until a later save has been measured.
        self._first_cost: SaveCost | None = None
        self.costs: deque[SaveCost] = deque(maxlen=_SAVES)
        # CPU seconds used by the thread that wrote each recent save.
        self._cpu_seconds: deque[float] = deque(maxlen=_SAVES)
        # The time from the last save to the next one. It changes only with a save, so it is not
        # computed at every step. None if it has to be computed again.
        self._interval: float | None = None

    def boundary(self, seconds: float) -> None:
        """Record that a step ended at the given time. The first step marks the start of the run."""
        if self._began is None:
            self._began = seconds
            self._interval = None

    def tried(self, seconds: float) -> None:
        """Restart the interval at the given time, when a save began or a checkpoint was loaded."""
        self._last_save = seconds
        self._interval = None

    def first_save_took(self, seconds: float, *, cpu_seconds: float = 0.0) -> None:
        """Record the cost of the save before the first step, for which the training loop waits.

        Args:
            seconds: How long the save took in total.
            cpu_seconds: See `save_took`.
        """
        self._first_cost = SaveCost(stall_seconds=seconds, seconds=seconds)
        self._cpu_seconds.append(_MOMENTS * cpu_seconds)
        self._interval = None

    def save_took(self, *, stall_seconds: float, seconds: float, cpu_seconds: float = 0.0) -> None:
        """Record the cost of a save.

        Args:
            stall_seconds: How long the save blocked the training loop.
            seconds: How long the save took in total.
            cpu_seconds: CPU time of the thread that wrote the checkpoint, or 0 if it does not
                compete with training for cores.
        """
        self._cpu_seconds.append(cpu_seconds)
        self.costs.append(SaveCost(stall_seconds=stall_seconds, seconds=seconds))
        self._interval = None

    def longest_save_seconds(self) -> float | None:
        """Return how long the longest recent save took in total, or None if none was measured."""
        if self.costs:
            return max(cost.seconds for cost in self.costs)
        if self._first_cost is not None:
            return _MOMENTS * self._first_cost.seconds
        return None

    def is_overdue(self, seconds: float, *, auto: bool) -> bool:
        """Return whether a save is due now.

        Args:
            seconds: The current time.
            auto: Whether the interval is chosen automatically. If False, a save is due only after
                `most_minutes`.
        """
        if self._began is None:
            return False
        since = self._began
        if self._last_save is not None:
            since = max(since, self._last_save)
        passed = seconds - since
        if self._most_minutes is not None and passed >= 60 * self._most_minutes:
            return True
        if not auto:
            return False
        if self._interval is None:
            self._interval = self.interval_seconds(since - self._began)
        return passed >= self._interval

    def interval_seconds(self, age: float) -> float:
        """Return the time from a save to the next one.

        A new run saves after `EARLY_SECONDS` and then each time its age has doubled, so a failure
        never costs more than half of the time that the run has taken. Most runs that fail do so
        early.

        Args:
            age: Seconds from the start of the run to the save.
        """
        costs = list(self.costs)
        if not costs and self._first_cost is not None:
            costs = [self._first_cost]
        stall = _median([cost.stall_seconds for cost in costs])
        write = _median([cost.seconds for cost in costs])
        interval = max(EARLY_SECONDS, age, _EARLY_COSTS * stall)
        if stall > 0:
            optimal = optimal_interval_seconds(stall, self._between_failures)
            interval = min(interval, max(optimal, stall / self._most_overhead, write))
        # The CPU time of the writing thread must also stay within its share of the run's time.
        return max(interval, _median(list(self._cpu_seconds)) / self._most_overhead)


def _median(values: list[float]) -> float:
    return float(statistics.median(values)) if values else 0.0
