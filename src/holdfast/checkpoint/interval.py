"""How long a run continues from one save to the next, chosen from what its saves have cost.

The interval is the availability-optimal one (arXiv 2410.18124), but never so short that saves take
more than their share of the time, nor shorter than one write. In a young run it is shorter. Costs
are medians of what was measured.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

# The age of a run at which it is saved in any case: a person who checks whether it has begun well
# waits about that long.
EARLY_SECONDS = 5.0
# Even in a young run, at least this many times the cost of a save passes before it.
_EARLY_COSTS = 10
# The first save is before the first step. Later ones hold about three times as much computed state:
# Adam keeps two values for each weight.
_MOMENTS = 3
# Saves whose costs are remembered.
_SAVES = 5


def optimal_interval_seconds(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Return the time between two saves that makes a run train for most of its time.

    ``C + sqrt(2 M C + C²)``, arXiv 2410.18124, from the beginning of one save to that of the next.
    The time that a restart takes is not known here. It is small against M, and without it the
    interval is shorter.

    Args:
        save_seconds: C, the time for which a save holds up the loop.
        mean_seconds_between_failures: M.
    """
    return save_seconds + math.sqrt(save_seconds) * math.sqrt(
        2 * mean_seconds_between_failures + save_seconds
    )


@dataclass(frozen=True, slots=True)
class SaveCost:
    """What a save has cost, in seconds."""

    # How long it held up the loop.
    stall_seconds: float
    # How long it took in all.
    seconds: float


class IntervalChooser:
    """Says when a save of one run is due. All times are monotonic seconds.

    Args:
        mean_seconds_between_failures: What is expected.
        most_overhead: The largest share of the time that saves may take.
        most_minutes: A save is due after this time at the latest, or None.
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
        # When a save was last begun, or read back.
        self._last_save: float | None = None
        # The save before the first step stands for the others until there is one.
        self._first_cost: SaveCost | None = None
        self.costs: deque[SaveCost] = deque(maxlen=_SAVES)
        # CPU seconds of the writer.
        self._cpu_seconds: deque[float] = deque(maxlen=_SAVES)

    def boundary(self, seconds: float) -> None:
        """Note that a step has ended."""
        if self._began is None:
            self._began = seconds

    def tried(self, seconds: float) -> None:
        """Note that a save was begun or read back, so the next one is not due at once."""
        self._last_save = seconds

    def first_save_took(self, seconds: float, *, cpu_seconds: float = 0.0) -> None:
        """Note the cost of the save before the first step."""
        self._first_cost = SaveCost(stall_seconds=seconds, seconds=seconds)
        self._cpu_seconds.append(_MOMENTS * cpu_seconds)

    def save_took(self, *, stall_seconds: float, seconds: float, cpu_seconds: float = 0.0) -> None:
        """Note the cost of a save.

        Args:
            stall_seconds: How long it held up the loop.
            seconds: How long it took in all.
            cpu_seconds: What its writer computed, if the training wants the same cores.
        """
        self._cpu_seconds.append(cpu_seconds)
        self.costs.append(SaveCost(stall_seconds=stall_seconds, seconds=seconds))

    def is_overdue(self, seconds: float, *, auto: bool) -> bool:
        """Return whether a save is due at this time.

        Args:
            seconds: Now.
            auto: Whether the interval is chosen from costs. Otherwise a save is due only after
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
        return auto and passed >= self.interval_seconds(since - self._began)

    def interval_seconds(self, age: float) -> float:
        """Return the time from a save to the next one.

        A young run is saved after `EARLY_SECONDS`, and whenever it is twice as old as at its last
        save, so it never loses more than half of its time. Most runs that fail do so early.

        Args:
            age: Seconds from the beginning of the run to the save.
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
        return max(interval, _median(list(self._cpu_seconds)) / self._most_overhead)


def _median(values: list[float]) -> float:
    return float(statistics.median(values)) if values else 0.0
