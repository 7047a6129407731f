"""Shared memory in which each worker shows what it is doing, so that a slow worker can be told from
a stuck one.

Each worker has three numbers: the batch, the place in that batch, and how many batches it has
finished. Only the worker itself writes them, without a lock. A reader may therefore see numbers
from two different moments, which the next read corrects.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

# Positions of the three numbers in a worker's cells.
NUMBER = 0
PLACE = 1
DONE = 2
_CELLS_PER_WORKER = 3

# Values of `PLACE` that are not the place of a sample.
COLLATING = -1
IDLE = -2
STARTING = -3
# In the user's ``worker_init_fn``.
PREPARING = -4

# The cells of one worker (int64), or None in a process without workers.
Cells: TypeAlias = memoryview | None


class WorkerStatus(NamedTuple):
    """What a worker was doing.

    Args:
        number: The batch that it is making or has finished last.
        place: The place in that batch, or one of the special values above.
        done: The number of batches that it has finished.
    """

    number: int
    place: int
    done: int

    @property
    def is_busy(self) -> bool:
        """Whether the worker is doing something."""
        return self.place != IDLE

    @property
    def is_starting(self) -> bool:
        """Whether the worker is not ready for its first batch yet."""
        return self.place in (STARTING, PREPARING)

    @property
    def is_at_work(self) -> bool:
        """Whether the worker is busy with a batch rather than with starting."""
        return self.is_busy and not self.is_starting

    @property
    def has_worked(self) -> bool:
        """Whether the worker has finished a sample since it started."""
        return self.done > 0 or self.place > 0


class Board:
    """The board of one pool of workers, which is passed to each of them as an argument.

    Args:
        context: The multiprocessing context that starts the workers.
        workers: How many there are.
    """

    def __init__(self, context: Any, workers: int) -> None:
        self._cells = context.RawArray("q", _CELLS_PER_WORKER * workers)
        for worker in range(workers):
            self.cells_of(worker)[PLACE] = STARTING

    def cells_of(self, worker: int) -> memoryview[int]:
        """Return the cells of a worker, which it writes itself.

        This is a plain memory view for speed, because a place is written for each sample.
        """
        first = _CELLS_PER_WORKER * worker
        cells = memoryview(self._cells).cast("B").cast("q")
        return cells[first : first + _CELLS_PER_WORKER]

    def status_of(self, worker: int) -> WorkerStatus:
        """Return the current status of a worker."""
        return WorkerStatus(*self.cells_of(worker))


def show_batch_done(cells: memoryview[int]) -> None:
    """Show that a worker has finished a batch and has nothing to do."""
    cells[DONE] += 1
    cells[PLACE] = IDLE
