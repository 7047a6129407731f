"""How many steps lie between two saves, chosen from what saves and steps have cost in this run.

The availability-optimal interval (arXiv 2410.18124), but never so short that saves take more than their share
of the time, nor shorter than one write. Costs are medians of what was measured; what is not known yet is not guessed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from holdfast.core.events.event import Decision

START_STEPS = 500
"""Until a step and a save were measured: the Hugging Face Trainer's default."""

EARLY_SECONDS = 5.0
"""Age of a run at which it is saved in any case: what a person waits who looks whether it has begun well."""

_EARLY_COSTS = 10  # times what a save takes lie before it at least, also in a young run
_MOMENTS = 3  # times what the first save holds lies in later ones: Adam has two values beside each weight
_STEPS = 64  # of which the median is taken, and after which it is looked at again
_LEAST_STEPS = 8  # the first ones compile, allocate and warm caches
_SAVES = 5
# A change is worth an event, and another rhythm, from here on: a fifth beside the best interval, what saving and lost
# work cost together (C/tau + tau/2M) is less than 2 % above its least.
_WORTH = 1.2


def optimal_interval_seconds(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Return the time from one save to the next, both begun, that makes a run train for most of its time.

    ``C + sqrt(2 M C + C²)``, arXiv 2410.18124, for saves that hold the loop for C. The time that a restart takes is
    not known here; it is small against M, and without it the interval is shorter.
    """
    return save_seconds + math.sqrt(save_seconds) * math.sqrt(2 * mean_seconds_between_failures + save_seconds)


class SaveInterval(Decision):
    """Save every so many steps from now on, which take about so many seconds.

    A save costs the training `save_costs_seconds`, in which the loop stands still or steps are slower, and takes
    `write_seconds` until its checkpoint counts; a step takes `step_seconds`, save apart.
    """

    steps: int
    seconds: float
    save_costs_seconds: float
    write_seconds: float
    step_seconds: float


class IntervalChooser:
    """Chooses the interval of one run, again and again.

    Saves may take the share `most_overhead` of the time at most, and come after `most_minutes` at the latest.
    """

    def __init__(
        self, *, mean_seconds_between_failures: float, most_overhead: float, most_minutes: float | None = None
    ) -> None:
        self._between_failures = mean_seconds_between_failures
        self._most_overhead = most_overhead
        self._most_minutes = most_minutes
        self._began: float | None = None
        self._tried: float | None = None
        self.steps = START_STEPS
        self._last: float | None = None
        self._usual: deque[float] = deque(maxlen=_STEPS)
        self._during: list[float] = []
        self.steps_to_wait = _LEAST_STEPS  # until the interval is looked at again
        self._first: tuple[float, float] | None = None
        self.costs: deque[tuple[float, float]] = deque(maxlen=_SAVES)
        self._computed: deque[float] = deque(maxlen=_SAVES)  # CPU time of the writer

    def boundary(self, seconds: float, *, writing: bool) -> None:
        """Note that a step is over, and whether a save is written meanwhile; times are monotonic."""
        if self._last is not None:
            (self._during if writing else self._usual).append(seconds - self._last)
            self.steps_to_wait -= 1
        self._last = seconds
        self._began = seconds if self._began is None else self._began

    def tried(self, seconds: float) -> None:
        """Note that a save is begun, or was read back; whatever comes of it, the next one is not due at once."""
        self._tried = seconds

    def is_overdue(self, seconds: float, *, early: bool) -> bool:
        """Return whether a save is due by the time, whatever the interval in steps is.

        With `early`, a young run is saved after `EARLY_SECONDS`, and whenever it is twice as old as at its last save,
        so that it never loses more than half of its time. Most runs that fail do so early. What writers compute
        keeps to its share then too.
        """
        if self._began is None:
            return False
        since = self._began if self._tried is None else max(self._began, self._tried)
        if self._most_minutes is not None and seconds - since >= 60 * self._most_minutes:
            return True
        if not early or seconds - since < max(EARLY_SECONDS, since - self._began):
            return False
        known = [cost for cost, _ in self.costs] or [cost for cost, _ in filter(None, [self._first])]
        apart = _EARLY_COSTS * statistics.median(known) if known else 0.0
        return seconds - since >= max(apart, statistics.median(self._computed or [0.0]) / self._most_overhead)

    def resumes(self, seconds: float) -> None:
        """Note that training goes on after something that is no part of a step, such as a stall."""
        self._last = seconds

    def first_save_took(self, seconds: float, *, cpu_seconds: float = 0.0) -> None:
        """Note the cost of the save before the first step: what is known of the others, until there is one."""
        self._first = seconds, seconds
        self._computed.append(_MOMENTS * cpu_seconds)

    def save_took(self, *, stall_seconds: float, seconds: float, cpu_seconds: float = 0.0) -> None:
        """Note how long a save held the loop and took; steps meanwhile count with what they took beyond the usual.

        `cpu_seconds` is what its writer computed, where the training wants the same cores.
        """
        self._computed.append(cpu_seconds)
        slower = 0.0
        if self._usual and self._during:  # medians: an evaluation in between is no slow step
            slower = len(self._during) * (statistics.median(self._during) - statistics.median(self._usual))
            slower = min(max(slower, 0.0), seconds)
        self._during.clear()
        self.costs.append((stall_seconds + slower, seconds))
        self.steps_to_wait = 0

    def save_costs_seconds(self) -> float | None:
        """Return what a save takes from the training, as measured; None while only the first save is known."""
        known = list(self.costs)  # a writer asks too, while the training goes on
        return statistics.median(cost for cost, _ in known) if known else None

    def decide(self) -> SaveInterval | None:
        """Return the interval from now on, if it is another one than before. To be asked at every boundary."""
        costs = self.costs or ([self._first] if self._first else [])
        if self.steps_to_wait > 0 or not costs or len(self._usual) < _LEAST_STEPS:
            return None
        self.steps_to_wait = _STEPS
        step = statistics.median(self._usual)
        cost, write = (statistics.median(values) for values in zip(*costs, strict=True))
        if step <= 0 or cost <= 0:  # a clock that stands still
            return None
        bounds = {
            "is where saving and lost work together cost least": optimal_interval_seconds(
                cost, self._between_failures
            ),
            f"keeps the cost of saving at {self._most_overhead:.2g} of the time": cost / self._most_overhead,
            "is as long as one write": write,
            f"keeps the CPU time of saving at {self._most_overhead:.2g} of the time": (
                statistics.median(self._computed or [0.0]) / self._most_overhead
            ),
        }
        why = max(bounds, key=lambda name: bounds[name])
        steps = max(1, math.ceil(bounds[why] / step))
        if 1 / _WORTH < steps / self.steps < _WORTH:
            return None
        self.steps = steps
        return SaveInterval(
            reason=f"{steps} steps {why}",
            promise="bit-exact",
            steps=steps,
            seconds=round(steps * step, 3),
            save_costs_seconds=round(cost, 4),
            write_seconds=round(write, 4),
            step_seconds=round(step, 5),
        )
