"""Divide the batches of an iterable dataset among workers and ranks.

Each item is used once, in the order in which a single process would read the items.

If the dataset does not divide its items among workers:
    Every worker reads the whole stream, and the workers take turns making a batch. In a worker,
    ``get_worker_info()`` returns None, as in a single process, unless the user passes
    ``sharded=False``.

If the dataset does, because its code calls ``get_worker_info()`` or the user passes
``sharded=True``:
    Each worker makes batches from the items that the dataset yields in this worker.

A dataset with ``state_dict`` and ``load_state_dict`` saves its own position. For other datasets, a
resume reads and drops the items before the position. Bad items are not quarantined, because an
iterator cannot continue after raising an exception.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as _torch_worker

from holdfast.core.errors import LoaderError
from holdfast.loader.order.ranks import rank_positions, ranks_now
from holdfast.loader.random_state import isolated, seed_cpu
from holdfast.loader.samplers import is_stateful
from holdfast.loader.seeds import derive_seed
from holdfast.loader.signalled import let_through
from holdfast.loader.streams.items import Items, StreamError, isolated_from_training, replay_state
from holdfast.loader.streams.sharding import divides_among_ranks
from holdfast.loader.workers.board import (
    COLLATING,
    IDLE,
    NUMBER,
    PLACE,
    Board,
    Cells,
    show_batch_done,
)
from holdfast.loader.workers.map_source import BatchSource
from holdfast.loader.workers.report import PASSED_TURN, BatchReport, as_failure, find_shortage

# Value of `BatchReport.state` if the worker read items but made no batch, because of `drop_last`.
_LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """The position in a stream, or in one worker's part of it.

    Args:
        items: Number of items read before the position.
        state: The result of `Items.state`.
        ended: Whether the iterator was exhausted. Many datasets then already have the state for the
            beginning of the next epoch.
    """

    items: int = 0
    state: Any = None
    ended: bool = False


class InitialState:
    """The state that the dataset had before this process first read it.

    The state is restored at the beginning of an epoch if the previous epoch was left early.
    Otherwise, the epoch would begin where the previous one was left, both in this process and in
    newly forked workers. The state is captured only once, because after the first epoch, the state
    of many datasets is the position at which that epoch ended.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._state: Any = None
        # Whether the last epoch that this process read was left early.
        self.was_left = False

    def complete(self, position: StreamPosition) -> StreamPosition:
        """Return the position, with the initial state added if the state must be restored."""
        if position.state is not None or self._state is None or not self.was_left:
            return position
        if position.items:
            return replace(position, state=replay_state(position.items, self._state))
        return replace(position, state=self._state)

    def note_reading(self, dataset: Any) -> None:
        """Record that this process starts reading the dataset, and capture the initial state."""
        if not self._is_known and is_stateful(dataset):
            self._is_known = True
            # A dataset may raise an error in `state_dict` if it has not been read yet.
            with isolated(), contextlib.suppress(Exception):
                self._state = copy.deepcopy(dataset.state_dict())
        self.was_left = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """Describes a stream and how it is grouped into batches.

    Args:
        dataset: The iterable dataset.
        collate: The user's ``collate_fn``.
        seed: Seed of the loader.
        epoch: Number of the epoch.
        batch_size: Items per batch and rank, or None for single items without a batch dimension.
        drop_last: Whether to drop an incomplete last batch.
        sharded: Whether the dataset divides its items among workers itself.
        hides_worker: Whether ``get_worker_info()`` returns None in a worker, as in a single
            process. This keeps the dataset from dividing its items a second time.
        rank: This rank.
        world_size: The number of ranks that share the items.
        initial_state: The state of the dataset before it was first read.
    """

    dataset: Any
    collate: Callable[[Any], Any]
    seed: int
    epoch: int
    batch_size: int | None
    drop_last: bool
    sharded: bool
    hides_worker: bool
    rank: int
    world_size: int
    initial_state: InitialState


@dataclass(frozen=True, slots=True, kw_only=True)
class _WorkerShare:
    """The part of a stream from which the worker in this process makes batches.

    Args:
        worker: Number of the worker, or 0 in the main process.
        dealt_to: Number of workers that take turns making batches, or 1 if the dataset divides its
            items itself.
        shard: Key of this worker's position in the `positions` of `BatchStream`.
    """

    worker: int
    dealt_to: int
    shard: int


class BatchStream(IterableDataset[Any]):
    """An iterable over batches and their reports, in a worker or in the main process.

    Args:
        settings: The stream's settings.
        positions: The positions to continue from, by worker if the dataset divides its items
            itself. Otherwise, the only key is 0.
        turn: The worker that provides the next batch, if the dataset divides its items itself.
            torch always begins with worker 0, so all workers before this one pass their first turn.
        board: The board on which workers show their progress, or None in the main process.
    """

    def __init__(
        self,
        settings: StreamSettings,
        positions: dict[int, StreamPosition],
        turn: int,
        board: Board | None,
    ) -> None:
        self._settings = settings
        self._positions = positions
        self._turn = turn
        self._board = board

    @property
    def dataset(self) -> Any:
        """The user's dataset, for ``get_worker_info()``."""
        return self._settings.dataset

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches from the position on, each with its report."""
        initial_state = self._settings.initial_state
        share = self._find_share()
        position = self._positions.get(share.shard, StreamPosition())
        if share.worker < self._turn:
            yield None, tuple(BatchReport(PASSED_TURN))
        if position.ended:
            return
        position = initial_state.complete(position)
        if self._board is None:
            initial_state.note_reading(self._settings.dataset)
        is_complete = yield from self._batches(share, position)
        if is_complete:
            initial_state.was_left = False

    def _find_share(self) -> _WorkerShare:
        # Without a board, this loader has no workers. If there is worker info nevertheless, it
        # belongs to another loader, in whose worker this loader is used.
        info = None if self._board is None else get_worker_info()
        worker = 0
        workers = 1
        if info is not None:
            worker = info.id
            workers = info.num_workers
        if self._settings.sharded:
            return _WorkerShare(worker=worker, dealt_to=1, shard=worker)
        return _WorkerShare(worker=worker, dealt_to=workers, shard=0)

    def _batches(self, share: _WorkerShare, position: StreamPosition) -> Generator[Any, None, bool]:
        """Yield this worker's batches, and return whether the stream was read to its end."""
        settings = self._settings
        cells = None if self._board is None else self._board.cells_of(share.worker)
        items = Items(
            settings.dataset,
            (settings.seed, settings.epoch, "stream", share.shard),
            self._board,
            keeps_state=is_stateful(settings.dataset),
            show=lambda number: _show(cells, number, 0),
        )
        if settings.hides_worker and cells is not None:
            _torch_worker._worker_info = None
        items_of_all_ranks = (settings.batch_size or 1) * settings.world_size
        turn = 0
        try:
            items.open(position.items, position.state)
            while not items.ended:
                # Counted from the starting position, worker n makes the batches n, n + `dealt_to`,
                # n + 2 * `dealt_to`, and so on.
                is_mine = turn % share.dealt_to == share.worker % share.dealt_to
                turn += 1
                began = time.perf_counter()
                group = self._read_group(items, items_of_all_ranks, cells, is_mine=is_mine)
                if is_mine and group:
                    batch, report = self._make_batch(group, share.worker, cells, items)
                    report = report._replace(seconds=time.perf_counter() - began)
                    yield batch, tuple(report)
        except StreamError as error:
            yield None, tuple(self._report_error(error.cause, share.worker, items))
            return False
        finally:
            # This worker has finished, even if the training loop still waits for other workers.
            _show(cells, items.number, IDLE)
        return True

    def _report_error(self, error: BaseException, worker: int, items: Items) -> BatchReport:
        """Return the report to send in place of a batch after an error.

        Raises:
            BaseException: The error itself, if the main process ran out of a resource. In the main
                process, reducing the number of workers does not help.
        """
        shortage = find_shortage(error)
        if shortage is None:
            return BatchReport(worker, fatal=as_failure(items.number, error))
        if self._board is None:
            raise error from None
        return BatchReport(worker, shortage=shortage)

    def _read_group(self, items: Items, size: int, cells: Cells, *, is_mine: bool) -> list[Any]:
        """Read the items that all ranks together use in one step.

        Args:
            items: The items of the stream.
            size: Number of items to read.
            cells: This worker's cells on the board, or None in the main process.
            is_mine: Whether this worker makes the batch.

        Returns:
            The items if this worker makes the batch, otherwise an empty list.
        """
        group = []
        for remaining in range(size, 0, -1):
            _show(cells, items.number, 0)
            # A resume after this batch can then start before the batch's last item.
            if is_mine and remaining == 1:
                items.remember()
            item = next(items, items)
            if item is items:
                break
            if is_mine:
                group.append(item)
        return group

    def _make_batch(
        self, group: list[Any], worker: int, cells: Cells, items: Items
    ) -> tuple[Any, BatchReport]:
        """Return this rank's batch for one step, and the batch's report.

        Raises:
            StreamError: ``collate_fn`` raised an error.
        """
        settings = self._settings
        share = rank_positions(
            0,
            len(group),
            settings.batch_size or 1,
            settings.rank,
            settings.world_size,
            drop_last=settings.drop_last,
        )
        if share is None:
            return None, BatchReport(PASSED_TURN, state=_LEFT_OUT)
        samples = group[share.start : share.stop]
        _show(cells, items.number, COLLATING)
        try:
            with isolated_from_training(self._board):
                seed_cpu(derive_seed(settings.seed, settings.epoch, "collate", items.number))
                if settings.batch_size is None:
                    batch = settings.collate(samples[0])
                else:
                    batch = settings.collate(samples)
        except (Exception, SystemExit) as error:
            let_through(error)
            raise StreamError(error) from error
        state = (items.number, items.state(), items.ended)
        if cells is not None:
            show_batch_done(cells)
        return batch, BatchReport(worker, state=state)


def _show(cells: Cells, number: int, place: int) -> None:
    if cells is not None:
        cells[NUMBER] = number
        cells[PLACE] = place


class StreamSource(BatchSource):
    """The source of the remaining batches of an epoch, for an iterable dataset.

    Args:
        settings: The stream's settings.
        positions: See `BatchStream`. Updated as batches are returned.
        turn: See `BatchStream`. Updated as batches are returned.
        workers: Number of workers, at least 1.
    """

    def __init__(
        self,
        settings: StreamSettings,
        positions: dict[int, StreamPosition],
        turn: int,
        workers: int,
    ) -> None:
        self._settings = settings
        self._workers = workers
        self.positions = positions
        self.turn = turn
        # Whether the stream has had any items. A stream that is resumed at its end has had items,
        # although none are left.
        self._has_items = bool(positions)
        self.needs_all_workers = settings.sharded

    def dataset(self, board: Board | None) -> BatchStream:
        """Return the stream of the remaining batches."""
        return BatchStream(self._settings, dict(self.positions), self.turn, board)

    def delivered(self, report: BatchReport) -> None:
        """Record that a batch, or an error in its place, was returned to the loop."""
        if report.is_passed_turn:
            if report.state == _LEFT_OUT:
                self._has_items = True
            return
        self._has_items = True
        if report.state is None:
            # The report describes an error instead of a batch.
            return
        items, state, ended = report.state
        worker = report.number
        shard = worker if self._settings.sharded else 0
        self.positions[shard] = StreamPosition(items=items, state=state, ended=ended)
        # torch takes batches from the workers in turn.
        if self._settings.sharded:
            self.turn = (worker + 1) % self._workers

    def is_short(self) -> bool:
        """Return False, since the length of a stream is unknown.

        Raises:
            LoaderError: H610 if the stream had no items, unless it may be normal that this rank
                gets none.
        """
        if self._has_items or self._may_have_no_items():
            return False
        raise LoaderError(
            f"{type(self._settings.dataset).__name__} has no items",
            limit="an epoch needs at least one item",
            fix="check the dataset's path and filters. If the dataset can only be read once, let"
            " its __iter__ start again from the beginning.",
            rule="H610",
        ) from None

    def _may_have_no_items(self) -> bool:
        _, world_size = ranks_now((0, 1))
        has_several_ranks = world_size > 1 or os.environ.get("WORLD_SIZE", "1") != "1"
        return has_several_ranks and divides_among_ranks(self._settings.dataset)
