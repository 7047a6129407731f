"""A board in shared memory on which each worker shows what it is doing.

So a stuck one is known from a slow one.

Three numbers for each worker: batch, place in it, and how many batches it has finished. Written
without a lock by its worker alone; a reader may see numbers of two moments, which a second look
puts right.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

STARTING, PREPARING, IDLE, COLLATING = -3, -4, -2, -1
NUMBER, PLACE, DONE = 0, 1, 2
_FIELDS = 3
Cells: TypeAlias = memoryview | None
"""Of one worker: its `NUMBER`, `PLACE` and `DONE`, int64; None where there are no workers."""


class Showing(NamedTuple):
    """What a worker was doing.

    The batch, the place in it or a state as above, and batches finished.
    """

    number: int
    offset: int
    done: int

    @property
    def is_busy(self) -> bool:
        """Return whether it has something to do."""
        return self.offset != IDLE

    @property
    def is_starting(self) -> bool:
        """Return whether it has not been ready for a batch yet."""
        return self.offset in (STARTING, PREPARING)

    @property
    def is_at_work(self) -> bool:
        """Return whether it is busy with a batch, not with starting."""
        return self.is_busy and not self.is_starting

    @property
    def has_worked(self) -> bool:
        """Return whether it has finished a sample since it started."""
        return self.done > 0 or self.offset > 0


class Board:
    """The board of one pool of workers, of a multiprocessing context.

    It travels to them as an argument.
    """

    def __init__(self, context: Any, workers: int) -> None:
        self._cells = context.RawArray("q", _FIELDS * workers)
        for worker in range(workers):
            self.of(worker)[PLACE] = STARTING

    def of(self, worker: int) -> memoryview[int]:
        """Return a worker's numbers, for it to write.

        A view and no methods: a place is written for each sample.
        """
        return (
            memoryview(self._cells).cast("B").cast("q")[_FIELDS * worker : _FIELDS * (worker + 1)]
        )

    def look(self, worker: int) -> Showing:
        """Return what a worker shows."""
        return Showing(*self.of(worker))


def has_ended(cells: memoryview[int]) -> None:
    """Show that a worker is done with a batch and has nothing to do."""
    cells[DONE] += 1
    cells[PLACE] = IDLE
