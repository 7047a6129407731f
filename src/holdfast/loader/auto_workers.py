"""``num_workers="auto"``: workers are doubled in the first batches, for as long as the loop waits less by it.

    0 workers -> 1 -> 2 -> 4 ...    each number makes a few batches of the running epoch, which are trained on

A number is taken if it shortens the wait for a batch by a tenth of the loop's time at least; the first beyond one
worker that does not ends the search, and so does a wait that is no longer worth it. Processors and shared memory
bound it.
Once chosen, the number stays. Where an epoch ends first, the best number so far is taken: workers that are started
anew in each epoch would not pay.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from holdfast.core.events import run_events
from holdfast.core.events.event import EventData
from holdfast.loader.machine import Load, Machine, most_workers
from holdfast.loader.workers.pool import WorkerSettings

_FEWEST_BATCHES = 6  # that are timed with each number, and two rounds of all workers
_LITTLE_WAIT = 0.05  # of the time; on an idle machine all points beyond this knee were alike (docs/adr/0027)
_WORTH = 0.1  # of the loop's time, by which the wait has to fall


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one number of workers gave: the mean wait for a batch, and the median time of a step."""

    num_workers: int
    wait_seconds: float
    step_seconds: float

    @property
    def batch_seconds(self) -> float:
        """Return the time of the loop for a batch."""
        return self.wait_seconds + self.step_seconds

    @property
    def wait_share(self) -> float:
        """Return the part of the time that is waiting, from 0 to 1."""
        return self.wait_seconds / max(self.batch_seconds, 1e-9)


class WorkerProbe:
    """Times the first batches of a loader as they pass, and chooses its workers.

    `most` bounds them, with the reason, beside the machine; `apply` is called with a number to go on with, and may be
    ignored where the recovery of lost workers has lowered it in `settings`.
    """

    def __init__(
        self,
        prefetch_factor: int | None,
        most: tuple[int, str] | None,
        settings: WorkerSettings,
        *,
        apply: Callable[[int], None],
        emit: Callable[[EventData], None],
    ) -> None:
        self.chosen: int | None = None
        self.reason = ""
        self.measured: list[Measured] = []
        """All numbers that were timed, in that order; of the last one the wait may have fallen by too little."""
        self.load = Load(num_workers=0)
        """With the largest batch so far."""
        self.prefetch_factor = prefetch_factor
        self._most = most
        self._apply = apply
        self._settings = settings
        self._emit = emit
        self._tried = 0
        self._best: Measured | None = None  # the last number that was worth it
        self._waits: list[float] = []
        self._steps: list[float] = []

    def passing(self, batches: Generator[tuple[Any, Any]]) -> Generator[tuple[Any, Any]]:
        """Return the batches of an epoch on their way, timed for as long as something is to be decided."""
        return batches if self.chosen is not None else self._timed(batches)

    def _timed(self, batches: Generator[tuple[Any, Any]]) -> Generator[tuple[Any, Any]]:
        with closing(batches):
            while self.chosen is None:
                began = time.perf_counter()
                item: Any = next(batches, None)
                wait = time.perf_counter() - began
                if item is None:
                    self._epoch_ends()
                    return
                load = Load.of(item[0], 0, self.prefetch_factor)
                self.load = max(self.load, load, key=lambda each: each.batch_bytes)
                handed = time.perf_counter()
                yield item
                item = None  # the loop decides how long a batch is kept
                self._waits.append(wait)
                self._steps.append(time.perf_counter() - handed)
                self._look()
            yield from batches

    def _epoch_ends(self) -> None:
        if self._best is not None:
            self._choose(self._best.num_workers, f"the epoch ended before {self._tried} workers had been timed")

    def _look(self) -> None:
        tried = self._tried
        if self._settings.workers != tried:
            self._choose(self._settings.workers, f"workers were lost while {tried} were tried")
            return
        warm_up = max(1, tried)  # a call for the first time; the queue of each worker is empty
        if len(self._waits) < warm_up + max(_FEWEST_BATCHES, 2 * tried):
            return
        new = Measured(
            num_workers=tried,
            wait_seconds=statistics.fmean(self._waits[warm_up:]),
            step_seconds=statistics.median(self._steps[warm_up:]),
        )
        self.measured.append(new)
        self._waits.clear()
        self._steps.clear()
        best = self._best
        shorter = best is None or best.wait_seconds - new.wait_seconds >= _WORTH * best.batch_seconds
        if best is None or shorter:
            self._best = best = new
        most, why = most_workers(self.load, Machine.of_this_rank())
        if self._most is not None and self._most[0] < most:
            most, why = self._most
        following = min(2 * tried or 1, most)
        if best.wait_share <= _LITTLE_WAIT:
            self._choose(best.num_workers, f"training waits for {_described(best)}, which is little")
        elif not shorter and tried > 1:  # one worker alone may gain no more than the time of a step
            self._choose(best.num_workers, f"{tried} workers do not shorten the wait of {_described(best)}")
        elif following <= tried:
            reason = f"training waits for {_described(best)}, and more workers cannot be used: {why}"
            self._choose(best.num_workers, reason)
        else:
            self._tried = following
            self._apply(following)

    def _choose(self, workers: int, reason: str) -> None:
        self.chosen, self.reason = workers, reason
        prefetch = (self.prefetch_factor or 2) if workers else None
        self._emit(run_events.WorkersChosen(num_workers=workers, prefetch_factor=prefetch, reason=reason))
        if workers != self._settings.workers:
            self._apply(workers)


def _described(measured: Measured) -> str:
    return f"{measured.wait_share:.1%} of its time with {measured.num_workers} workers"
