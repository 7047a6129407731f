"""Shared memory in which workers show progress, so that slow workers do not count as stuck.

Each worker has three numbers: the number of the current batch, the place of the current sample in
that batch, and how many batches the worker has finished. Only the worker itself writes them,
without a lock. A reader may therefore see numbers from two different moments, which the next read
corrects.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

# Indices of the three numbers in a worker's cells.
NUMBER = 0
PLACE = 1
DONE = 2
_CELLS_PER_WORKER = 3

# Values of `PLACE` that do not refer to a sample.
COLLATING = -1
IDLE = -2
STARTING = -3
# The worker is running the user's ``worker_init_fn``.
PREPARING = -4

# The three numbers of one worker (int64), or None in the main process.
Cells: TypeAlias = memoryview | None


class WorkerStatus(NamedTuple):
    """The numbers that a worker shows on the board.

    Args:
        number: Number of the batch that the worker is making or has last finished.
        place: Place of the current sample in that batch, or one of the special values above.
        done: Number of batches that the worker has finished.
    """

    number: int
    place: int
    done: int

    @property
    def is_busy(self) -> bool:
        """Whether the worker is starting, reading a sample or collating, rather than idle."""
        return self.place != IDLE

    @property
    def is_starting(self) -> bool:
        """Whether the worker is not yet ready for its first batch."""
        return self.place in (STARTING, PREPARING)

    @property
    def is_at_work(self) -> bool:
        """Whether the worker is making a batch."""
        return self.is_busy and not self.is_starting

    @property
    def has_worked(self) -> bool:
        """Whether the worker has read at least one sample since it started."""
        # If the worker is at a place above 0, it has read the sample at place 0.
        return self.done > 0 or self.place > 0


class Board:
    """The shared memory of one pool of workers. Each worker receives it as an argument.

    Args:
        context: The multiprocessing context that starts the workers.
        workers: Number of workers in the pool.
    """

    def __init__(self, context: Any, workers: int) -> None:
        self._cells = context.RawArray("q", _CELLS_PER_WORKER * workers)
        for worker in range(workers):
            self.cells_of(worker)[PLACE] = STARTING

    def cells_of(self, worker: int) -> memoryview[int]:
        """Return the cells of a worker, to which only that worker may write.

        The cells are a plain memory view because writing to one is fast, and a worker writes to its
        cells for every sample.
        """
        first = _CELLS_PER_WORKER * worker
        cells = memoryview(self._cells).cast("B").cast("q")
        return cells[first : first + _CELLS_PER_WORKER]

    def status_of(self, worker: int) -> WorkerStatus:
        """Return the current status of a worker."""
        return WorkerStatus(*self.cells_of(worker))


def show_batch_done(cells: memoryview[int]) -> None:
    """Show that a worker has finished a batch and is idle."""
    cells[DONE] += 1
    cells[PLACE] = IDLE
