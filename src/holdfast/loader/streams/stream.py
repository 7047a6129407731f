"""Distribute the batches of an iterable dataset among workers and ranks: each item once, in the
order in which a single process would read them.

A dataset that does not divide its items among workers:
    Every worker reads the whole stream and makes its share of the batches, in turn. In a worker,
    ``get_worker_info()`` returns None, as in a single process, unless the user passes
    ``sharded=False``.

A dataset that does, because its code calls ``get_worker_info()`` or the user says so:
    Each worker makes batches of the items that the dataset yields there.

A dataset with ``state_dict`` and ``load_state_dict`` keeps its own position. For any other, the
items before the position are read again and dropped. Bad items are not quarantined, because an
iterator that has raised an exception cannot continue.
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

# The state in a report if items were read but make no batch because of `drop_last`.
_LEFT_OUT = "left out"


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """How much of a stream, or of one worker's part of it, was handed out.

    Args:
        items: The number of items that were read.
        state: The value that `Items.state` returned.
        ended: Whether the iterator was exhausted. In that case, many datasets already have the
            state of the beginning of the next epoch.
    """

    items: int = 0
    state: Any = None
    ended: bool = False


class InitialState:
    """The state of a dataset before this process first read it.

    It is restored at the beginning of an epoch if the previous epoch was left early. Otherwise the
    epoch would begin where the previous one was left, both here and in newly forked workers. The
    dataset's state is read only once, because many datasets later return where their last epoch
    ended.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._state: Any = None
        # Whether the last epoch read in this process was left before its end.
        self.was_left = False

    def complete(self, position: StreamPosition) -> StreamPosition:
        """Return a position, with the initial state added if it has no state and needs one."""
        if position.state is not None or self._state is None or not self.was_left:
            return position
        if position.items:
            return replace(position, state=replay_state(position.items, self._state))
        return replace(position, state=self._state)

    def note_reading(self, dataset: Any) -> None:
        """Note that this process starts to read the dataset."""
        if not self._is_known and is_stateful(dataset):
            self._is_known = True
            # A dataset may have no state before it is read.
            with isolated(), contextlib.suppress(Exception):
                self._state = copy.deepcopy(dataset.state_dict())
        self.was_left = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSettings:
    """A stream, and how it is cut into batches.

    Args:
        dataset: The iterable dataset.
        collate: The user's ``collate_fn``.
        seed: Seed of the loader.
        epoch: Number of the epoch.
        batch_size: Items in a batch of one rank, or None for single items without a batch
            dimension.
        drop_last: Whether an incomplete last batch is dropped.
        sharded: Whether the dataset divides its items among workers itself.
        hides_worker: Whether ``get_worker_info()`` returns None in a worker, as in one process, so
            that a dataset that asks for it does not divide its items as well.
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
    """The part of a stream that belongs to the worker in this process.

    Args:
        worker: Number of the worker; 0 in the main process.
        dealt_to: The number of workers that take turns with the batches; 1 if the dataset divides
            its items itself.
        shard: The key of this worker's position.
    """

    worker: int
    dealt_to: int
    shard: int


class BatchStream(IterableDataset[Any]):
    """Batches with reports from an iterable dataset, for one worker or the main process.

    Args:
        settings: What the stream is.
        positions: Where to continue, by worker if the dataset divides its items itself, otherwise
            under the key 0.
        turn: The worker whose turn it is, if the dataset divides its items itself. torch always
            begins with worker 0, so the workers before this one pass.
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
        """Yield this worker's batches, starting at the position, each with its report."""
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
        # Without a board, this may still be the worker of another loader.
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
        """Yield the batches, and return whether the stream was read to its end."""
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
            # The loop may still wait for other workers.
            _show(cells, items.number, IDLE)
        return True

    def _report_error(self, error: BaseException, worker: int, items: Items) -> BatchReport:
        """Return a report without a batch for an error.

        Raises:
            BaseException: The error itself, for a shortage in the main process, where fewer workers
                cannot help.
        """
        shortage = find_shortage(error)
        if shortage is None:
            return BatchReport(worker, fatal=as_failure(items.number, error))
        if self._board is None:
            raise error from None
        return BatchReport(worker, shortage=shortage)

    def _read_group(self, items: Items, size: int, cells: Cells, *, is_mine: bool) -> list[Any]:
        """Read the items of one step of all ranks; return them if this worker makes the batch."""
        group = []
        for remaining in range(size, 0, -1):
            _show(cells, items.number, 0)
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
        """Return this rank's batch of one step, and its report.

        Raises:
            StreamError: ``collate_fn`` has raised.
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
    """The rest of an epoch of an iterable dataset.

    Args:
        settings: What the stream is.
        positions: As `BatchStream`. They are updated as batches are handed out.
        turn: As `BatchStream`, also updated.
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
        # A stream that continues at its end has no items left, but it had some.
        self._has_items = bool(positions)
        self.needs_all_workers = settings.sharded

    def dataset(self, board: Board | None) -> BatchStream:
        """Return the stream from the position on."""
        return BatchStream(self._settings, dict(self.positions), self.turn, board)

    def delivered(self, report: BatchReport) -> None:
        """Note that a batch, or an error in its place, was handed out."""
        if report.is_passed_turn:
            if report.state == _LEFT_OUT:
                self._has_items = True
            return
        self._has_items = True
        if report.state is None:
            # An error in place of a batch.
            return
        items, state, ended = report.state
        worker = report.number
        shard = worker if self._settings.sharded else 0
        self.positions[shard] = StreamPosition(items=items, state=state, ended=ended)
        if self._settings.sharded:
            self.turn = (worker + 1) % self._workers

    def is_short(self) -> bool:
        """Return False, since the length of a stream is unknown.

        Raises:
            LoaderError: H610 if there was no item, unless it is possible that this rank gets none.
        """
        if self._has_items or self._may_have_no_items():
            return False
        raise LoaderError(
            f"{type(self._settings.dataset).__name__} has no items",
            limit="an epoch needs at least one",
            fix="check its path and its filters; if it can be read only once, let its __iter__"
            " start again from the beginning.",
            rule="H610",
        ) from None

    def _may_have_no_items(self) -> bool:
        _, world_size = ranks_now((0, 1))
        has_several_ranks = world_size > 1 or os.environ.get("WORLD_SIZE", "1") != "1"
        return has_several_ranks and divides_among_ranks(self._settings.dataset)
