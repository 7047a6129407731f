"""Detect a slow rank that the other ranks have to wait for.

In each step, a rank reports how long it was busy before it started to communicate.
"""

from __future__ import annotations

import resource
import statistics
import time
from typing import final

import torch

from holdfast.core.events.run_events import RankIsSlow
from holdfast.guard.ranks.row import Rows

# Epochs with fewer steps than this are not evaluated.
_LEAST_STEPS = 20
# A rank is reported if its busy time exceeds the median of the other ranks by more than this share
# of the epoch's duration. Smaller differences are normal variation.
_LEAST_SHARE = 0.1


@final
class Pace:
    """Measures how long each rank was busy in the steps of an epoch.

    In a step, a rank is busy from the end of the previous step until it has computed its loss.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        # The time at which the last step ended.
        self._step_ended: float | None = None
        # The time at which this rank started the current step.
        self._step_began = 0.0
        # The time at which the current attempt at this step started.
        self._attempt_began = 0.0
        self._clear()

    def _clear(self) -> None:
        # Totals by rank: seconds between steps, seconds in forward passes, and items.
        self._between = [0.0] * self._world_size
        self._forward = [0.0] * self._world_size
        self._items = [0.0] * self._world_size
        self._steps = 0
        self._since = time.perf_counter()

    def begin_step(self) -> None:
        """Record that this rank starts a step."""
        self._step_began = time.perf_counter()

    def begin_attempt(self) -> None:
        """Record that an attempt starts on all ranks."""
        self._attempt_began = time.perf_counter()

    def fields_of_row(self) -> dict[str, float]:
        """Return row fields: seconds since the last step, and seconds in the forward pass."""
        between = 0.0 if self._step_ended is None else self._step_began - self._step_ended
        return {"between": between, "forward": time.perf_counter() - self._attempt_began}

    def end_step(self) -> None:
        """Record that the last attempt at a step has ended on this rank."""
        self._step_ended = time.perf_counter()

    def add(self, rows: Rows) -> None:
        """Add the times of a step that succeeded on all ranks to the totals of the epoch."""
        for rank, row in enumerate(rows.by_rank):
            self._items[rank] += row.items
            self._between[rank] += row.between
            self._forward[rank] += row.forward
        self._steps += 1

    def slowest(self, rows: Rows) -> RankIsSlow | None:
        """End the epoch, and return an event about the rank that the others waited for, or None.

        Args:
            rows: The rows of all ranks at the end of the epoch.
        """
        if self._world_size == 1:
            return None
        event = self._slow_rank(rows)
        self._clear()
        return event

    def _slow_rank(self, rows: Rows) -> RankIsSlow | None:
        """Return an event about the rank that was busy longest, if its lead is large enough."""
        seconds = time.perf_counter() - self._since
        busy = [
            between + forward for between, forward in zip(self._between, self._forward, strict=True)
        ]
        rank = max(range(self._world_size), key=busy.__getitem__)
        others = _median_of_others(busy, rank)
        lead = busy[rank] - others
        if self._steps < _LEAST_STEPS or lead <= _LEAST_SHARE * seconds:
            return None
        lead_between = self._between[rank] - _median_of_others(self._between, rank)
        where = "in forward"
        # More than half of the lead arose between steps.
        if 2 * lead_between > lead:
            where = "between steps: in its loader or in the loop"
        return RankIsSlow(
            rank=rank,
            where=where,
            seconds_a_step=busy[rank] / self._steps,
            of_others=others / self._steps,
            share=lead / seconds,
            items_a_step=tuple(items / self._steps for items in self._items),
            # At the end of an epoch, the field `items` of a row holds the rank's peak memory.
            peak_bytes=tuple(int(row.items) for row in rows.by_rank),
        )


def peak_bytes(device: torch.device) -> float:
    """Return the peak memory of this process in bytes: allocated GPU memory, or resident memory."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    # Linux reports the peak resident memory in KiB.
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _median_of_others(seconds: list[float], rank: int) -> float:
    return statistics.median(
        own_seconds for other, own_seconds in enumerate(seconds) if other != rank
    )
