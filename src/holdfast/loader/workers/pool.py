"""One pool of workers: a torch loader, its processes, and the watch over them.

A pool is started, asked for batches, and closed, or abandoned if its workers are lost. It never
replaces a worker: `recovery` starts another pool.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

# A connection that breaks because a worker dies may break a moment before the death is noticed.
_DEATH_PATIENCE_SECONDS = 0.25

# The options of torch's loader that have a meaning without workers.
_OPTIONS_WITHOUT_WORKERS = ("generator", "pin_memory", "pin_memory_device")


class WorkersLostError(Exception):
    """This pool makes no more batches."""

    def __init__(self, loss: WorkerLoss) -> None:
        super().__init__(loss.cause)
        self.loss = loss


@dataclass(slots=True, kw_only=True)
class WorkerSettings:
    """How workers are run; `WorkerRecovery` changes the settings when workers are lost.

    Args:
        workers: How many there are; 0 to make batches in this process.
        method: How they are started, as `multiprocessing` names it; None for python's default.
        options: Options of torch's loader.
        timeout_seconds: How long the loop may wait for a batch; 0 for no limit.
        share_by_file: Whether tensors are shared through named files, which takes no file
            descriptors.
        keep: Whether workers are kept from one epoch to the next.
    """

    workers: int
    method: str | None
    options: dict[str, Any]
    timeout_seconds: float
    share_by_file: bool = False
    keep: bool = False


class _RequestSampler:
    """What torch takes for a sampler: the requests for the batches of the current epoch."""

    def __init__(self) -> None:
        self.requests: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.requests


class _WorkerInit:
    """Calls the user's ``worker_init_fn`` in a worker, and shows on the board when it is ready."""

    def __init__(self, board: Board, worker_init_fn: Callable[[int], Any] | None) -> None:
        self._board = board
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        # As with torch's own loader, `info.dataset` is the user's dataset. torch makes the
        # attributes of a worker's info read-only.
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        cells = self._board.cells_of(worker)
        if self._worker_init_fn is not None:
            cells[PLACE] = PREPARING
            self._worker_init_fn(worker)
        cells[PLACE] = IDLE


class WorkerPool:
    """Makes batches in worker processes, or in this process if there are none.

    Args:
        make_dataset: Returns the dataset whose items are batches with reports, given the board.
        settings: How workers are run.
        limit_seconds: Time at one sample after which a worker is stuck (see `WorkerWatch`).
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
        # A worker ends when its part of a stream is over.
        self._may_end = isinstance(dataset, IterableDataset)
        # torch warns of too many workers. The outer loader has given that warning already.
        with ignore_warnings(UserWarning):
            torch_loader = TorchDataLoader(
                dataset,
                batch_size=None,
                collate_fn=as_is,
                sampler=None if self._may_end else self._sampler,
                **options,
            )
        # torch's loader and its iterator are in lists, because `drop` empties a list to drop the
        # last reference.
        self._torch_loader = [torch_loader]
        self._torch_iterator: list[Any] = []
        # Whether a batch was requested and has not arrived. Half of it may have been received.
        self._is_waiting = False

    @property
    def longest_seconds(self) -> float:
        """The longest that a worker was seen at one sample."""
        return 0.0 if self._watch is None else self._watch.longest_seconds

    @property
    def can_be_kept(self) -> bool:
        """Whether its workers can be used for another epoch.

        All of them must have been started, nothing may be half done, and the pool must not be
        closed.
        """
        return self._watch is not None and bool(self._torch_loader) and not self._is_waiting

    @property
    def lost_at(self) -> float | None:
        """When the watch noticed the loss, on the monotonic clock; None if it has noticed none."""
        if self._watch is None or not self._watch.lost:
            return None
        return self._watch.lost_at

    # --- batches ----------------------------------------------------------------------------------

    def begin(self, requests: Iterator[Any]) -> None:
        """Start making the batches of the rest of an epoch.

        Raises:
            WorkersLostError: The workers cannot be started, or were lost between two epochs.
        """
        # Plain tuples are pickled faster.
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
            # A loader that nobody refers to leaves no thread behind.
            weakref.finalize(self, self._watch.end).atexit = False

    def next(self) -> tuple[Any, BatchReport]:
        """Return the next batch and its report.

        Raises:
            StopIteration: The epoch is over.
            WorkersLostError: There will be no more batches from these workers.
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
        """Return what torch's loader returns.

        Raises:
            WorkersLostError: Anything has gone wrong with the workers.
            Exception: Whatever the user's program raises, such as its ``worker_init_fn``, or
                because something cannot be pickled.
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
        # Not raised above, where the exception would hold the iterator that was interrupted.
        raise WorkersLostError(loss)

    # --- the end ----------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Kill the workers and forget them.

        They may have died while they held a lock, so nothing of theirs is used again.
        """
        with undisturbed():
            if self._watch is not None:
                self._watch.end()
            kill(self._processes)
            drop(self._take_torch_objects())

    def close(self) -> None:
        """End the workers in an orderly way, and kill those that do not end."""
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
    """Return the next item of a torch iterator, without the mark for profilers if none is active.

    That mark takes 10 microseconds, and 100 if a step between two batches has emptied the caches.
    """
    next_data = getattr(iterator, "_next_data", None)
    if next_data is None or torch._C._autograd._profiler_enabled():
        return next(iterator)
    return next_data()


def _find_loss(error: Exception, watch: WorkerWatch | None) -> WorkerLoss | None:
    """Return the loss behind an exception of torch's loader, or None if the program raised it."""
    if watch is not None:
        # torch says so of an exception that a worker has raised and sent.
        is_of_program = "in DataLoader worker process" in str(error)
        return None if is_of_program else _loss_behind(error, watch)
    shortage = find_shortage(error)
    is_of_torch = "DataLoader worker" in str(error) or "Pin memory thread" in str(error)
    if shortage is None and not is_of_torch and not isinstance(error, OSError):
        return None
    cause = f"workers could not be started: {error!r}"
    return WorkerLoss(cause=cause, kind="machinery", shortage=shortage)


def _loss_behind(error: Exception, watch: WorkerWatch) -> WorkerLoss:
    """Return the loss behind an exception of torch's machinery: a shortage, a death, or unknown."""
    shortage = find_shortage(error)
    cause = f"{type(error).__name__}: {error}"
    if shortage is not None:
        cause = f"this process ran out of {shortage}: {cause}"
        return WorkerLoss(cause=cause, kind="machinery", shortage=shortage)
    loss = watch.loss(patience_seconds=_DEATH_PATIENCE_SECONDS)
    if loss.kind == "machinery":
        return WorkerLoss(cause=cause, kind="machinery")
    return loss
