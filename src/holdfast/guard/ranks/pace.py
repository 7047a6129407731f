"""Which rank the others wait for.

Each says how long it was busy by itself before it began to talk to them.
"""

from __future__ import annotations

import resource
import statistics
import time

import torch

from holdfast.core.events.run_events import RankIsSlow
from holdfast.guard.ranks.row import Rows

_LEAST_STEPS = 20
_LEAST_SHARE = 0.1
"""Of a step; below that, ranks take turns in being the last one."""


class Pace:
    """The seconds of each rank in the steps of an epoch, from the end of one to the loss of the
    next.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._ended: float | None = None  # the step before
        self._came = self._began = 0.0
        self._clear()

    def _clear(self) -> None:
        self._between, self._forward, self._items = ([0.0] * self._world_size for _ in range(3))
        self._steps, self._since = 0, time.perf_counter()

    def come(self) -> None:
        """Note that this rank has come to a step."""
        self._came = time.perf_counter()

    def begin(self) -> None:
        """Note that an attempt begins on all ranks."""
        self._began = time.perf_counter()

    def said(self) -> dict[str, float]:
        """Return what this rank says: its seconds between the steps, and in forward."""
        between = 0.0 if self._ended is None else self._came - self._ended
        return {"between": between, "forward": time.perf_counter() - self._began}

    def end(self, rows: Rows) -> None:
        """Add a step that all have made."""
        for rank, row in enumerate(rows.each):
            self._items[rank] += row[2]
            self._between[rank] += row[9]
            self._forward[rank] += row[10]
        self._steps += 1
        self._ended = time.perf_counter()

    def slowest(self, rows: Rows) -> RankIsSlow | None:
        """Return which rank the others have waited for, if one stands out.

        `rows`: of the end of an epoch.
        """
        if self._world_size == 1:
            return None
        steps, seconds = self._steps, time.perf_counter() - self._since
        own = [
            between + forward for between, forward in zip(self._between, self._forward, strict=True)
        ]
        rank = max(range(self._world_size), key=own.__getitem__)
        others, found = _of_others(own, rank), None
        if steps >= _LEAST_STEPS and own[rank] - others > _LEAST_SHARE * seconds:
            in_loop = (
                2 * (self._between[rank] - _of_others(self._between, rank)) > own[rank] - others
            )
            found = RankIsSlow(
                rank=rank,
                where="between steps: in its loader or in the loop" if in_loop else "in forward",
                seconds_a_step=own[rank] / steps,
                of_others=others / steps,
                share=(own[rank] - others) / seconds,
                items_a_step=tuple(items / steps for items in self._items),
                peak_bytes=tuple(int(row[2]) for row in rows.each),
            )
        self._clear()
        return found


def peak_bytes(device: torch.device) -> float:
    """Return the most memory that this process has had, of a GPU what tensors had of it."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _of_others(seconds: list[float], rank: int) -> float:
    return statistics.median(each for at, each in enumerate(seconds) if at != rank)
