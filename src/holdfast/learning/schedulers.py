"""Observe a learning-rate scheduler: how often it is stepped between optimizer steps."""

from __future__ import annotations

from typing import Any

from holdfast.learning.observations import ObservedScheduler


class SchedulerObserver:
    """The observations of one scheduler: a torch scheduler, or any object with ``last_epoch``."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self._count_at_start = self._count()
        self._count_at_last_step = self._count_at_start
        self.observed = ObservedScheduler(
            kind=type(scheduler).__name__,
            patience=getattr(scheduler, "patience", None),
            period=_period_of(scheduler),
        )

    def _count(self) -> int:
        return int(getattr(self.scheduler, "last_epoch", 0))

    def note_step(self) -> None:
        """Count the advances since the previous optimizer step. Called before every step."""
        count = self._count()
        advances = count - self._count_at_last_step
        if self.observed.optimizer_steps == 0:
            self.observed.before_first = advances
        elif advances == 1:
            self.observed.advanced_once += 1
        elif advances > 1:
            self.observed.advanced_several += 1
        self.observed.optimizer_steps += 1
        self.observed.advanced = count - self._count_at_start
        self._count_at_last_step = count


def _period_of(scheduler: Any) -> int | None:
    """Return the number of advances to the end of a cycle or to the next milestone."""
    period = getattr(scheduler, "T_max", None) or getattr(scheduler, "step_size", None)
    return period if isinstance(period, int) else None
