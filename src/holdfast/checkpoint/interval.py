"""Choose the time from one save to the next, from the cost of earlier saves.

The interval is the availability-optimal one (arXiv 2410.18124), but never so short that saves
exceed their share of the time, and never shorter than one write. A young run saves more often.
Costs are medians of the measured ones.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass

# The age at which every run is saved: about as long as people watch whether a run has started well.
EARLY_SECONDS = 5.0
# Even in a young run, a save must be preceded by at least this many times its cost.
_EARLY_COSTS = 10
# The first save is before the first step. Later ones hold about three times as much computed state:
# Adam keeps two values for each weight.
_MOMENTS = 3
# Number of saves whose costs are remembered.
_SAVES = 5


def optimal_interval_seconds(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Return the time between two saves that maximises the share of time spent training.

    ``C + sqrt(2 M C + C²)``, arXiv 2410.18124, from the beginning of one save to that of the next.
    The duration of a restart is unknown here. It is small compared to M, and leaving it out makes
    the interval shorter.

    Args:
        save_seconds: C, the time for which a save blocks the loop.
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
    """Decides when the saves of one run are due. All times are monotonic seconds.

    Args:
        mean_seconds_between_failures: The expected mean time between failures.
        most_overhead: The largest share of the time that saves may take.
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
        # When a save last started, or a checkpoint was loaded.
        self._last_save: float | None = None
        # The cost of the save before the first step, used until another save has been measured.
        self._first_cost: SaveCost | None = None
        self.costs: deque[SaveCost] = deque(maxlen=_SAVES)
        # CPU seconds of each writer.
        self._cpu_seconds: deque[float] = deque(maxlen=_SAVES)

    def boundary(self, seconds: float) -> None:
        """Note that a step has ended."""
        if self._began is None:
            self._began = seconds

    def tried(self, seconds: float) -> None:
        """Note a started save or a loaded checkpoint, so that no save is due at once."""
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
            cpu_seconds: CPU time of its writer, if training competes for the same cores.
        """
        self._cpu_seconds.append(cpu_seconds)
        self.costs.append(SaveCost(stall_seconds=stall_seconds, seconds=seconds))

    def is_overdue(self, seconds: float, *, auto: bool) -> bool:
        """Return whether a save is due at this time.

        Args:
            seconds: Now.
            auto: Whether the interval is chosen automatically. Otherwise a save is due only after
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

        A young run is saved after `EARLY_SECONDS`, and then whenever its age has doubled since its
        last save, so it never loses more than half of its time. Most runs that fail do so early.

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
