"""One pool of workers: a torch loader, its processes and the watch over them.

Made, asked, dropped.
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

from holdfast.core.warned import ignoring
from holdfast.loader.signalled import let_through
from holdfast.loader.workers.board import IDLE, PLACE, PREPARING, Board
from holdfast.loader.workers.fetch import Report, as_is, shortage_in
from holdfast.loader.workers.processes import (
    Started,
    UnreadableError,
    WorkerLostError,
    drop,
    kill,
    recording_context,
    undisturbed,
)
from holdfast.loader.workers.watch import Loss, Watch

_PATIENCE_SECONDS = 0.25
"""A connection that breaks because a worker dies may break before the death shows."""


class WorkersLostError(Exception):
    """This pool is lost."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss.cause)
        self.loss = loss


@dataclass(slots=True, kw_only=True)
class WorkerSettings:
    """How workers are run now; their recovery changes it.

    The loop may wait `timeout_seconds` for a batch; 0 for no limit. `share_by_file`: tensors are
    shared through named files, which takes no file descriptors. `keep`: workers are kept from one
    epoch to the next.
    """

    workers: int
    method: str | None
    options: dict[str, Any]
    timeout_seconds: float
    share_by_file: bool = False
    keep: bool = False


class _Entries:
    """What torch takes for a sampler: the entries of the epoch that is under way."""

    def __init__(self) -> None:
        self.source: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.source


class _Starting:
    """The user's ``worker_init_fn``.

    After it, a worker that waits for its first batch does not count as busy.
    """

    def __init__(self, board: Board, given: Callable[[int], Any] | None) -> None:
        self._board = board
        self._given = given

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        assert info is not None
        # As torch: the user's own, not ours. The facts of a worker are frozen.
        object.__setattr__(info, "dataset", info.dataset.dataset)  # type: ignore[attr-defined]
        if self._given is not None:
            self._board.of(worker)[PLACE] = PREPARING
            self._given(worker)
        self._board.of(worker)[PLACE] = IDLE


class WorkerPool:
    """Makes batches in worker processes, or in this one if there are none.

    As `Watch` has it, with these limits.
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
        self._processes = Started()
        self._entries = _Entries()
        self._limits = {"limit_seconds": limit_seconds, "timeout_seconds": timeout_seconds}
        self._watch: Watch | None = None
        self._board: Board | None = None
        options = settings.options
        if self.num_workers:
            context = recording_context(
                settings.method, self._processes, share_by_file=settings.share_by_file
            )
            self._board = Board(context, self.num_workers)
            options = {
                **options,
                "num_workers": self.num_workers,
                "multiprocessing_context": context,
            }
            options["worker_init_fn"] = _Starting(self._board, options.get("worker_init_fn"))
        else:
            single = ("generator", "pin_memory", "pin_memory_device")
            options = {name: value for name, value in options.items() if name in single}
        dataset = make_dataset(self._board)
        # A worker whose part of a stream is over
        self._may_end = isinstance(dataset, IterableDataset)
        sampler = None if self._may_end else self._entries
        with ignoring(UserWarning):  # of the number of workers: the outer loader has given it
            self._inner = [
                TorchDataLoader(
                    dataset, batch_size=None, collate_fn=as_is, sampler=sampler, **options
                )
            ]
        self._iterator: list[Any] = []
        self._asked = False  # for a batch that has not come, of which half may have been received

    @property
    def longest_seconds(self) -> float:
        """Return the longest that a worker was seen at one thing."""
        return 0.0 if self._watch is None else self._watch.longest_seconds

    @property
    def can_go_on(self) -> bool:
        """Return whether its workers may be kept.

        All were started, nothing is half done, and it is not over.
        """
        return self._watch is not None and bool(self._inner) and not self._asked

    @property
    def lost_at(self) -> float | None:
        """Return when the loss was noticed, on the monotonic clock, or None if it was not the
        watch that noticed.
        """
        return self._watch.lost_at if self._watch is not None and self._watch.lost else None

    def begin(self, entries: Iterator[Any]) -> None:
        """Start with the entries of the rest of an epoch.

        `WorkersLostError` if that is not possible.
        """
        self._entries.source = map(tuple, entries)  # quicker to pickle
        if self._watch is not None and self._watch.lost:  # between two epochs
            raise WorkersLostError(self._watch.loss())
        with ignoring(UserWarning):  # as above
            self._iterator[:] = [self._of_torch(lambda: iter(self._inner[0]))]
        if self._board is not None and self._watch is None:
            self._watch = Watch(self._processes, self._board, may_end=self._may_end, **self._limits)
            # A loader that is dropped leaves no thread
            weakref.finalize(self, self._watch.end).atexit = False

    def next(self) -> tuple[Any, Report]:
        """Return the next batch and its report.

        `WorkersLostError` if there will be no more from these workers.
        """
        self._asked = True
        try:
            batch, fields = self._of_torch(lambda: _ask(self._iterator[0]))
        except StopIteration:
            self._asked = False
            raise
        self._asked = False
        return batch, Report(*fields)

    def _of_torch(self, call: Callable[[], Any]) -> Any:
        """Return what torch's loader answers, with whatever goes wrong with the workers as a
        `WorkersLostError`.
        """
        watch = self._watch
        if not self.num_workers:
            return call()
        try:
            with watch if watch is not None else contextlib.nullcontext():
                return call()
        except StopIteration:
            raise
        except (WorkerLostError, UnreadableError) as lost:
            assert watch is not None
            loss = watch.loss() if isinstance(lost, WorkerLostError) else _broken(lost.cause, watch)
        except Exception as error:
            let_through(error)
            if watch is not None and "in DataLoader worker process" not in str(error):
                loss = _broken(error, watch)
            elif watch is None and _kept_from_starting(error):
                cause = f"workers could not be started: {error!r}"
                loss = Loss(cause=cause, kind="machinery", shortage=shortage_in(error))
            else:
                raise  # of the program: its worker_init_fn, or what cannot be pickled
        raise WorkersLostError(loss)  # here, so that nothing holds the iterator that was cut short

    def abandon(self) -> None:
        """Kill the workers and forget them.

        They may have died holding a lock, so nothing of theirs is used again.
        """
        with undisturbed():
            if self._watch is not None:
                self._watch.end()
            kill(self._processes)
            drop(self._take())

    def _take(self) -> list[Any]:
        taken = [*self._iterator, *self._inner]
        self._iterator.clear()
        self._inner.clear()
        return taken

    def close(self) -> None:
        """End the workers in order, and those that do not end by force."""
        with undisturbed():
            if self._watch is not None:
                self._watch.end()
            taken = self._take()
            if self._processes:
                drop(taken)
            else:
                taken.clear()
            kill([process for process in self._processes if process.is_alive()])


def _ask(iterator: Any) -> Any:
    """Return the next item of a torch iterator.

    Without the mark for profilers, if none is there to see it.

    That mark takes 10 microseconds, and 100 where a step lies between two batches, so that nothing
    of it is cached.
    """
    found = (
        None if torch._C._autograd._profiler_enabled() else getattr(iterator, "_next_data", None)
    )
    return next(iterator) if found is None else found()


def _kept_from_starting(error: Exception) -> bool:
    of_torch = "DataLoader worker" in str(error) or "Pin memory thread" in str(error)
    return isinstance(error, OSError) or of_torch or shortage_in(error) is not None


def _broken(error: Exception, watch: Watch) -> Loss:
    """Return the loss behind an exception of torch's machinery.

    A death, a shortage, or something unknown.
    """
    shortage = shortage_in(error)
    found = watch.loss(patience_seconds=_PATIENCE_SECONDS) if shortage is None else None
    if found is None or found.kind == "machinery":
        short = "" if shortage is None else f"no {shortage} left here: "
        return Loss(
            cause=f"{short}{type(error).__name__}: {error}", kind="machinery", shortage=shortage
        )
    return found
