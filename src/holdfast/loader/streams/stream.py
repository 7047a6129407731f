"""Iterable datasets.

Their batches dealt out to workers and ranks, each item once, in the order of one process.

not sharded by itself  every worker reads the whole stream and makes every so many-th batch of it;
                       there ``get_worker_info()`` is None, as in one process, unless you pass
                       ``sharded=False``
sharded by itself      its code asks ``get_worker_info()``, or you say so: what it yields in a
                       worker is its own

With ``state_dict`` and ``load_state_dict`` the dataset keeps its own position; without, the items
before the position are read again and dropped. Bad items are not quarantined: an iterator that has
raised is over.
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
from holdfast.loader.seeds import derive_seed
from holdfast.loader.signalled import let_through
from holdfast.loader.streams.items import Items, StreamError, behind, quietly
from holdfast.loader.streams.sharding import divides_among_ranks
from holdfast.loader.workers.board import COLLATING, IDLE, NUMBER, PLACE, Board, Cells, has_ended
from holdfast.loader.workers.fetch import Report, failure_of, shortage_in
from holdfast.loader.workers.map_source import Source

_LEFT_OUT = "left out"
"""In the place of a state: there were items, and they are in no batch."""


def keeps_state(dataset: Any) -> bool:
    """Return whether a dataset can save and load its position."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """How far a stream, or one worker's part of it, was handed out.

    Where its iterator had ended, many a dataset's state is already that of the next epoch's
    beginning.
    """

    items: int = 0
    state: Any = None
    ended: bool = False


class Beginning:
    """The state that a dataset had before this process first read it.

    Where an epoch begins after one that was left.

    Else that epoch, here or in workers that are forked then, would begin where the other one was
    left. It is asked for once: what many a dataset returns later is where its last epoch ended.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._state: Any = None
        self.was_left = False

    def of_epoch(self, begin: StreamPosition) -> StreamPosition:
        """Return a position with the state to load there."""
        if begin.state is not None or self._state is None or not self.was_left:
            return begin
        return replace(
            begin, state=behind(begin.items, self._state) if begin.items else self._state
        )

    def is_read(self, dataset: Any) -> None:
        """Note that this process begins to read the dataset."""
        if not self._is_known and keeps_state(dataset):
            self._is_known = True
            # One that has no state before it is read
            with isolated(), contextlib.suppress(Exception):
                self._state = copy.deepcopy(dataset.state_dict())
        self.was_left = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """What a stream is and how it is cut; `certain` is whether the user has said `sharded`."""

    dataset: Any
    collate: Callable[[Any], Any]
    seed: int
    epoch: int
    batch_size: int | None
    drop_last: bool
    sharded: bool
    certain: bool
    rank: int
    world_size: int
    beginning: Beginning


class Stream(IterableDataset[Any]):
    """Batches with reports from an iterable dataset, for one worker or this process.

    Positions are by worker if the dataset divides its items itself, else under 0. Then `turn` is
    the worker whose turn it is: torch begins with worker 0, so those before it pass.
    """

    def __init__(
        self, plan: StreamPlan, positions: dict[int, StreamPosition], turn: int, board: Board | None
    ) -> None:
        self._plan = plan
        self._positions = positions
        self._turn = turn
        self._board = board

    @property
    def dataset(self) -> Any:
        """Return the user's dataset, for ``get_worker_info()``."""
        return self._plan.dataset

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches, each with its report, from the position on."""
        plan, beginning = self._plan, self._plan.beginning
        # Else in the worker of another loader
        info = None if self._board is None else get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        shard, parts = (worker, 1) if plan.sharded else (0, workers)
        begin = self._positions.get(shard, StreamPosition())
        if worker < self._turn:
            yield None, tuple(Report(-1))
        if begin.ended:
            return
        begin = beginning.of_epoch(begin)
        if self._board is None:
            beginning.is_read(plan.dataset)
        if (yield from self._batches(worker, parts, shard, begin)):
            beginning.was_left = False

    def _batches(
        self, worker: int, parts: int, shard: int, begin: StreamPosition
    ) -> Generator[Any, None, bool]:
        """Yield the batches; return whether these were all."""
        plan = self._plan
        seed = (plan.seed, plan.epoch, "stream", shard if plan.sharded else 0)
        items = Items(plan.dataset, seed, self._board, keeps_state=keeps_state(plan.dataset))
        cells = None if self._board is None else self._board.of(worker)
        items.show = lambda: _show(cells, items.number, 0)
        if not plan.sharded and not plan.certain and cells is not None:
            # Else a dataset that asks which worker it is in would divide as well
            _torch_worker._worker_info = None
        turn, size = 0, (plan.batch_size or 1) * plan.world_size
        try:
            items.open(begin.items, begin.state)
            while not items.ended:
                mine = turn % parts == worker % parts
                turn += 1
                began = time.perf_counter()
                group = self._read(items, size, cells, mine=mine)
                if mine and group:
                    yield self._made(group, size, worker, cells, items, began)
        except StreamError as error:
            shortage = shortage_in(error.cause)
            if shortage is not None and self._board is None:
                raise error.cause from None
            fatal = None if shortage else failure_of(items.number, error.cause)
            yield None, tuple(Report(worker, fatal=fatal, shortage=shortage))
            return False
        finally:
            _show(cells, items.number, IDLE)  # others may have more
        return True

    def _read(self, items: Items, size: int, cells: Cells, *, mine: bool) -> list[Any]:
        """Return the items of one step of all ranks, none of them if it is another worker's."""
        group = []
        for left in range(size, 0, -1):
            _show(cells, items.number, 0)
            if mine and left == 1:
                items.remember()
            item = next(items, items)
            if item is items:
                break
            if mine:
                group.append(item)
        return group

    def _made(
        self, group: list[Any], size: int, worker: int, cells: Cells, items: Items, began: float
    ) -> Any:
        """Return the batch of this rank's part of the items of one step, with its report."""
        plan, each = self._plan, size // self._plan.world_size
        share = rank_positions(
            0, len(group), each, plan.rank, plan.world_size, drop_last=plan.drop_last
        )
        if share is None:
            return None, tuple(Report(-1, state=_LEFT_OUT))
        batch = group[share.start : share.stop]
        _show(cells, items.number, COLLATING)
        try:
            with quietly(self._board):
                seed_cpu(derive_seed(plan.seed, plan.epoch, "collate", items.number))
                made = plan.collate(batch[0] if plan.batch_size is None else batch)
        except (Exception, SystemExit) as error:
            let_through(error)
            raise StreamError(error) from error
        state = items.number, items.state(), items.ended
        if cells is not None:
            has_ended(cells)
        return made, tuple(Report(worker, state=state, seconds=time.perf_counter() - began))


def _show(cells: Cells, number: int, offset: int) -> None:
    if cells is not None:
        cells[NUMBER], cells[PLACE] = number, offset


class StreamSource(Source):
    """The rest of an epoch of an iterable dataset.

    Positions and turn as `Stream`, brought up to date.
    """

    def __init__(
        self, plan: StreamPlan, positions: dict[int, StreamPosition], turn: int, workers: int
    ) -> None:
        self._plan = plan
        self._workers = workers
        self.positions = positions
        self.turn = turn
        self._has_items = bool(positions)  # one that goes on at its end has none left
        self.needs_all_workers = plan.sharded

    def dataset(self, board: Board | None) -> Stream:
        """Return the stream from the position on."""
        return Stream(self._plan, dict(self.positions), self.turn, board)

    def delivered(self, report: Report) -> None:
        """Note that a batch is handed out."""
        if report.number < 0:  # a turn that was passed
            self._has_items |= report.state == _LEFT_OUT
            return
        self._has_items = True  # or an error in the place of one
        if report.state is None:
            return  # no batch
        items, state, ended = report.state
        shard = report.number if self._plan.sharded else 0
        self.positions[shard] = StreamPosition(items=items, state=state, ended=ended)
        if self._plan.sharded:
            self.turn = (report.number + 1) % self._workers

    def is_short(self) -> bool:
        """Return False: nobody knows the length.

        H610 if there was no item, unless this rank may have none.
        """
        several_ranks = ranks_now((0, 1))[1] > 1 or os.environ.get("WORLD_SIZE", "1") != "1"
        if self._has_items or (several_ranks and divides_among_ranks(self._plan.dataset)):
            return False
        raise LoaderError(
            f"{type(self._plan.dataset).__name__} has no items",
            limit="an epoch needs at least one",
            fix=(
                "check its path and its filters; if it can be read only once, let its __iter__"
                " begin anew."
            ),
            rule="H610",
        ) from None
