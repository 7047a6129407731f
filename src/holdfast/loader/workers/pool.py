"""A pool of workers: a torch loader, its worker processes, and the thread that watches them.

A pool starts workers, makes batches and is closed. If the workers are lost, the pool is abandoned
instead of closed. A pool never replaces a worker. Instead, `recovery` starts a new pool.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, get_worker_info

from holdfast.core.warned import ignore_warnings
from holdfast.loader.signalled import let_through
from holdfast.loader.workers.board import IDLE, PLACE, PREPARING, Board
from holdfast.loader.workers.child_signals import WaitInterruptedError, undisturbed
from holdfast.loader.workers.ending import drop, kill
from holdfast.loader.workers.fetch import as_is
from holdfast.loader.workers.processes import (
    StartedProcesses,
    UnreadableError,
    recording_context,
)
from holdfast.loader.workers.report import BatchReport, find_shortage
from holdfast.loader.workers.watch import WorkerLoss, WorkerWatch

# How long to wait for a worker's death to be detected after its connection has broken.
_DEATH_PATIENCE_SECONDS = 0.25

# Options of torch's loader that also apply without workers.
_OPTIONS_WITHOUT_WORKERS = ("generator", "pin_memory", "pin_memory_device")


class WorkersLostError(Exception):
    """Raised when a pool cannot make any more batches."""

    def __init__(self, loss: WorkerLoss) -> None:
        super().__init__(loss.cause)
        self.loss = loss


@dataclass(slots=True, kw_only=True)
class WorkerSettings:
    """The settings for worker processes. `WorkerRecovery` may change them when workers are lost.

    Args:
        workers: Number of workers, or 0 to make batches in this process.
        method: The start method, such as ``"fork"``, or None for Python's default.
        options: Options of torch's loader.
        timeout_seconds: How long the loop may wait for a batch, or 0 for no limit.
        share_by_file: Whether tensors are shared through named files, which do not need file
            descriptors.
        keep: Whether workers stay alive from one epoch to the next.
    """

    workers: int
    method: str | None
    options: dict[str, Any]
    timeout_seconds: float
    share_by_file: bool = False
    keep: bool = False


class _RequestSampler:
    """A sampler that passes the batch requests of the current epoch to torch's loader."""

    def __init__(self) -> None:
        self.requests: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.requests


class _WorkerInit:
    """Calls the user's ``worker_init_fn`` in a worker, then marks the worker as ready."""

    def __init__(self, board: Board, worker_init_fn: Callable[[int], Any] | None) -> None:
        self._board = board
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        # As in torch, `info.dataset` is the user's dataset. `object.__setattr__` is needed because
        # torch makes the worker info read-only.
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        _ignore_broken_connections()
        cells = self._board.cells_of(worker)
        if self._worker_init_fn is not None:
            cells[PLACE] = PREPARING
            self._worker_init_fn(worker)
        cells[PLACE] = IDLE


def _ignore_broken_connections() -> None:
    """Keep this worker from printing a traceback when the main process closes a connection.

    Ctrl-C or the loss of another worker may interrupt the main process while it receives a tensor.
    In this worker, the sending thread of ``multiprocessing.resource_sharer`` then calls
    `sys.excepthook` and continues with the next connection.
    """
    previous_hook = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, (EOFError, ConnectionError)):
            previous_hook(kind, error, trace)

    sys.excepthook = hook


class WorkerPool:
    """A pool of workers that make batches. Without workers, batches are made in this process.

    Args:
        make_dataset: Given the board, returns a dataset whose items are batches with their reports.
        settings: The settings for the workers.
        limit_seconds: Time spent on one sample after which a worker counts as stuck (see
            `WorkerWatch`).
        timeout_seconds: How long the loop may wait for a batch (see `WorkerWatch`).
    """

    def __init__(
        self,
        make_dataset: Callable[[Board | None], Any],
        settings: WorkerSettings,
        *,
        limit_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self.num_workers = settings.workers
        self._limit_seconds = limit_seconds
        self._timeout_seconds = timeout_seconds
        self._processes = StartedProcesses()
        self._sampler = _RequestSampler()
        self._watch: WorkerWatch | None = None
        self._board: Board | None = None
        if self.num_workers:
            context = recording_context(
                settings.method, self._processes, share_by_file=settings.share_by_file
            )
            self._board = Board(context, self.num_workers)
            options = {
                **settings.options,
                "num_workers": self.num_workers,
                "multiprocessing_context": context,
                "worker_init_fn": _WorkerInit(self._board, settings.options.get("worker_init_fn")),
            }
        else:
            options = {
                name: value
                for name, value in settings.options.items()
                if name in _OPTIONS_WITHOUT_WORKERS
            }
        dataset = make_dataset(self._board)
        # The workers of a stream exit when their part of the stream is exhausted.
        self._may_end = isinstance(dataset, IterableDataset)
        # torch warns if there are too many workers, but the `DataLoader` has already given this
        # warning.
        with ignore_warnings(UserWarning):
            torch_loader = TorchDataLoader(
                dataset,
                batch_size=None,
                collate_fn=as_is,
                sampler=None if self._may_end else self._sampler,
                **options,
            )
        # torch's loader and its iterator are stored in lists, because `drop` empties a list to
        # remove the last reference to them.
        self._torch_loader = [torch_loader]
        self._torch_iterator: list[Any] = []
        # Whether a batch has been requested but has not been received completely.
        self._is_waiting = False

    @property
    def longest_seconds(self) -> float:
        """The longest time that any worker has spent on one sample."""
        return 0.0 if self._watch is None else self._watch.longest_seconds

    @property
    def can_be_kept(self) -> bool:
        """Whether the pool's workers can be used for another epoch.

        This requires that all workers have started, that no batch is pending, and that the pool is
        open.
        """
        return self._watch is not None and bool(self._torch_loader) and not self._is_waiting

    @property
    def lost_at(self) -> float | None:
        """When a loss was detected, in seconds on the monotonic clock, or None if no loss was."""
        if self._watch is None or not self._watch.lost:
            return None
        return self._watch.lost_at

    # --- batches ----------------------------------------------------------------------------------

    def begin(self, requests: Iterator[Any]) -> None:
        """Start making the remaining batches of an epoch.

        Args:
            requests: Yields the `BatchRequest` for each batch. Empty for a stream.

        Raises:
            WorkersLostError: The workers could not be started, or were lost between two epochs.
        """
        # Plain tuples are faster to pickle than named tuples.
        self._sampler.requests = map(tuple, requests)
        if self._watch is not None and self._watch.lost:
            raise WorkersLostError(self._watch.loss())
        with ignore_warnings(UserWarning):
            self._torch_iterator[:] = [self._call_torch(lambda: iter(self._torch_loader[0]))]
        if self._board is not None and self._watch is None:
            self._watch = WorkerWatch(
                self._processes,
                self._board,
                limit_seconds=self._limit_seconds,
                timeout_seconds=self._timeout_seconds,
                may_end=self._may_end,
            )
            # `finalize` only has a weak reference to this pool, so the watching thread also ends if
            # the loader is garbage-collected without being closed.
            weakref.finalize(self, self._watch.end).atexit = False

    def next(self) -> tuple[Any, BatchReport]:
        """Return the next batch and its report.

        Raises:
            StopIteration: The epoch is over.
            WorkersLostError: The workers cannot make any more batches.
        """
        self._is_waiting = True
        try:
            batch, fields = self._call_torch(lambda: _next_item(self._torch_iterator[0]))
        except StopIteration:
            self._is_waiting = False
            raise
        self._is_waiting = False
        return batch, BatchReport(*fields)

    def _call_torch(self, call: Callable[[], Any]) -> Any:
        """Call a function that uses torch's loader, and return the function's result.

        Raises:
            WorkersLostError: The workers failed.
            Exception: An exception that the user's code raised, for example in ``worker_init_fn``,
                or an error because an object cannot be pickled.
        """
        if not self.num_workers:
            return call()
        watch = self._watch
        try:
            with watch if watch is not None else contextlib.nullcontext():
                return call()
        except StopIteration:
            raise
        except WaitInterruptedError:
            assert watch is not None
            loss = watch.loss()
        except UnreadableError as error:
            assert watch is not None
            loss = _loss_behind(error.cause, watch)
        except Exception as error:
            let_through(error)
            loss_of_torch = _find_loss(error, watch)
            if loss_of_torch is None:
                raise
            loss = loss_of_torch
        # The error is raised outside the except blocks. Otherwise, its context would keep a
        # reference to the interrupted iterator.
        raise WorkersLostError(loss)

    # --- the end ----------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Kill the workers and drop torch's loader.

        A worker may have died while holding a lock, so the queues are not used again.
        """
        with undisturbed():
            if self._watch is not None:
                self._watch.end()
            kill(self._processes)
            drop(self._take_torch_objects())

    def close(self) -> None:
        """Shut down the workers, and kill any worker that does not exit."""
        with undisturbed():
            if self._watch is not None:
                self._watch.end()
            torch_objects = self._take_torch_objects()
            if self._processes:
                drop(torch_objects)
            else:
                torch_objects.clear()
            kill([process for process in self._processes if process.is_alive()])

    def _take_torch_objects(self) -> list[Any]:
        torch_objects = [*self._torch_iterator, *self._torch_loader]
        self._torch_iterator.clear()
        self._torch_loader.clear()
        return torch_objects


def _next_item(iterator: Any) -> Any:
    """Return the next item of a torch iterator, bypassing torch's profiler annotation if possible.

    The annotation is only needed while a profiler is active. It takes 10 microseconds, or 100 if
    its code and data have left the CPU caches during a training step.
    """
    next_data = getattr(iterator, "_next_data", None)
    if next_data is None or torch._C._autograd._profiler_enabled():
        return next(iterator)
    return next_data()


def _find_loss(error: Exception, watch: WorkerWatch | None) -> WorkerLoss | None:
    """Return the worker loss that caused an exception in torch's loader.

    Returns None if the exception was raised by the user's code.

    Args:
        error: The exception.
        watch: The watch of the workers, or None if the workers were just being started.
    """
    if watch is not None:
        # torch adds this text to exceptions that were raised in a worker.
        was_raised_by_user = "in DataLoader worker process" in str(error)
        return None if was_raised_by_user else _loss_behind(error, watch)
    shortage = find_shortage(error)
    is_about_workers = "DataLoader worker" in str(error) or "Pin memory thread" in str(error)
    if shortage is None and not is_about_workers and not isinstance(error, OSError):
        return None
    cause = f"workers could not be started: {error!r}"
    return WorkerLoss(cause=cause, kind="machinery", shortage=shortage)


def _loss_behind(error: Exception, watch: WorkerWatch) -> WorkerLoss:
    """Return the worker loss that caused an exception raised by torch itself."""
    shortage = find_shortage(error)
    cause = f"{type(error).__name__}: {error}"
    if shortage is not None:
        cause = f"this process ran out of {shortage}: {cause}"
        return WorkerLoss(cause=cause, kind="machinery", shortage=shortage)
    loss = watch.loss(patience_seconds=_DEATH_PATIENCE_SECONDS)
    if loss.kind == "machinery":
        return WorkerLoss(cause=cause, kind="machinery")
    return loss
