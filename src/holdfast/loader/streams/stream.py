"""Iterable datasets: their batches dealt out to workers and ranks, each item once, in the order of one process.

not sharded by itself    every worker reads the whole stream and makes every so many-th batch of it
sharded by itself        it asks ``get_worker_info()``, or says so: what it yields in a worker is that worker's

With ``state_dict`` and ``load_state_dict`` the dataset keeps its own position; without, the items before the position
are read again and dropped.

Does not set bad items aside: an iterator that has raised is over.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch.utils.data import IterableDataset, get_worker_info

from holdfast.core.errors import LoaderError
from holdfast.loader.fetch import Report, failure_of, sent, shortage_in
from holdfast.loader.loader_arguments import ranks_now
from holdfast.loader.random_state import isolated, seed_cpu
from holdfast.loader.ranks import rank_positions
from holdfast.loader.seeds import derive_seed
from holdfast.loader.signalled import let_through
from holdfast.loader.streams.items import Items, StreamError, behind, quietly
from holdfast.loader.streams.sharding import divides_among_ranks
from holdfast.loader.workers.board import COLLATING, IDLE, NUMBER, PLACE, Board, Showing, has_ended

_Cells: TypeAlias = memoryview | None
_LEFT_OUT = "left out"
"""In the place of a state: there were items, and they are in no batch."""


def keeps_state(dataset: Any) -> bool:
    """Say whether a dataset can save and load its position."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """How a stream is cut.

    Args:
        seed: With epoch and item number it decides the random numbers of an item.
        epoch: Which one.
        batch_size: Items of a rank's batch; None for items by themselves.
        drop_last: Whether a last batch that is not full is left out.
        sharded: Whether the dataset divides its items itself.
        certain: Whether the user has said so.
        rank: Which rank this is.
        world_size: Number of ranks that the items are divided among.
    """

    seed: int
    epoch: int
    batch_size: int | None
    drop_last: bool
    sharded: bool
    certain: bool
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """How far a stream, or one worker's part of it, was handed out.

    Args:
        items: Items of all ranks.
        state: What the dataset said when it was there, or None to read from the beginning.
        ended: Whether its iterator was at its end: many a dataset's state is then that of the next epoch's beginning.
    """

    items: int = 0
    state: Any = None
    ended: bool = False


class Beginning:
    """The state that a dataset had before this process first read it: where an epoch begins after one that was left.

    Else that epoch, here or in workers that are forked then, would begin where the other one was left. It is asked
    for once: what many a dataset tells later is where its last epoch ended.
    """

    def __init__(self) -> None:
        self._is_known = False
        self._state: Any = None
        self._was_left = False

    def of_epoch(self, begin: StreamPosition) -> StreamPosition:
        """Return a position with the state to load there."""
        if begin.state is not None or self._state is None or not self._was_left:
            return begin
        return replace(begin, state=behind(begin.items, self._state) if begin.items else self._state)

    def is_read(self, dataset: Any) -> None:
        """Note that this process begins to read the dataset."""
        if not self._is_known and keeps_state(dataset):
            self._is_known = True
            with isolated(), contextlib.suppress(Exception):  # one that has no state before it is read
                self._state = copy.deepcopy(dataset.state_dict())
        self._was_left = True

    def is_read_whole(self) -> None:
        """Note that it came to its end."""
        self._was_left = False


class Stream(IterableDataset[Any]):
    """Batches with reports from an iterable dataset, for one worker or this process.

    Args:
        dataset: The user's.
        collate: The user's collate function.
        plan: How it is cut.
        positions: Where to begin: by worker if the dataset divides its items itself, else under 0.
        turn: For such a dataset, the worker whose turn it is: torch begins with worker 0, so those before pass.
        board: Where a worker says what it is doing, or None.
        beginning: Of the dataset.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        plan: StreamPlan,
        positions: dict[int, StreamPosition],
        turn: int,
        board: Board | None,
        beginning: Beginning,
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._plan = plan
        self._positions = positions
        self._turn = turn
        self._board = board
        self._beginning = beginning

    @property
    def users(self) -> Any:
        """Return the user's dataset, for ``get_worker_info()``."""
        return self._dataset

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches, each with its report, from the position on."""
        info = None if self._board is None else get_worker_info()  # else in the worker of another loader
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        shard, parts = (worker, 1) if self._plan.sharded else (0, workers)
        begin = self._positions.get(shard, StreamPosition())
        if worker < self._turn:
            yield sent(None, Report(number=-1), self._board)
        if begin.ended:
            return
        begin = self._beginning.of_epoch(begin)
        if self._board is None:
            self._beginning.is_read(self._dataset)
        if (yield from self._batches(worker, parts, shard, begin)):
            self._beginning.is_read_whole()

    def _batches(self, worker: int, parts: int, shard: int, begin: StreamPosition) -> Generator[Any, None, bool]:
        """Yield the batches; return whether these were all."""
        parts_of_seed = (self._plan.seed, self._plan.epoch, "stream", shard if self._plan.sharded else 0)
        items = Items(self._dataset, parts_of_seed, self._board, keeps_state=keeps_state(self._dataset))
        cells = None if self._board is None else self._board.of(worker)
        items.show = lambda: _show(cells, items.number, 0)
        if parts > 1 and not self._plan.certain:
            items.notice()
        size = (self._plan.batch_size or 1) * self._plan.world_size
        try:
            items.open(begin.items, begin.state)
            for turn in range(2**62):
                mine = turn % parts == worker % parts
                began = time.perf_counter()
                group = self._read(items, size, cells, mine=mine)
                if mine and group:
                    batch = self._cut(group, size)
                    if batch is not None:
                        seconds = time.perf_counter() - began
                        yield self._made(batch, worker, cells, items, seconds)
                    else:
                        yield sent(None, Report(number=-1, state=_LEFT_OUT), self._board)
                if items.ended:
                    return True
        except StreamError as error:
            shortage = shortage_in(error.cause)
            if shortage is not None and self._board is None:
                raise error.cause from None
            fatal = None if shortage else failure_of(items.number, error.cause)
            yield sent(None, Report(number=worker, fatal=fatal, shortage=shortage), self._board)
        finally:
            _show(cells, items.number, IDLE)  # others may have more
        return False

    def _read(self, items: Items, size: int, cells: _Cells, *, mine: bool) -> list[Any]:
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

    def _cut(self, group: list[Any], size: int) -> list[Any] | None:
        """Return this rank's part of the items of one step; the last step is divided among all ranks."""
        plan = self._plan
        if len(group) == size:
            each = size // plan.world_size
            return group[plan.rank * each : (plan.rank + 1) * each]
        share = rank_positions(
            0, len(group), size // plan.world_size, plan.rank, plan.world_size, drop_last=plan.drop_last
        )
        return None if share is None else group[share.positions.start : share.positions.stop]

    def _made(self, batch: list[Any], worker: int, cells: _Cells, items: Items, seconds: float) -> Any:
        _show(cells, items.number, COLLATING)
        try:
            with quietly(self._board):
                seed_cpu(derive_seed(self._plan.seed, self._plan.epoch, "collate", items.number))
                made = self._collate(batch[0] if self._plan.batch_size is None else batch)
        except (Exception, SystemExit) as error:
            let_through(error)
            raise StreamError(error) from error
        state = items.number, items.state(), items.ended
        if cells is not None:
            has_ended(cells)
        return sent(made, Report(number=worker, state=state, seconds=seconds), self._board)


def _show(cells: _Cells, number: int, offset: int) -> None:
    if cells is not None:
        cells[NUMBER], cells[PLACE] = number, offset


def _are_several_ranks() -> bool:
    return ranks_now((0, 1))[1] > 1 or os.environ.get("WORLD_SIZE", "1") != "1"


class StreamSource:
    """The rest of an epoch of an iterable dataset, as healing sees it.

    Args:
        dataset: The user's.
        collate: The user's collate function.
        plan: How it is cut.
        positions: As `Stream`; brought up to date as batches are handed out.
        turn: As `Stream`.
        workers: How many the dataset divides its items among.
        beginning: Of the dataset.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[Any], Any],
        plan: StreamPlan,
        positions: dict[int, StreamPosition],
        turn: int,
        workers: int,
        beginning: Beginning,
    ) -> None:
        self._user = dataset
        self._beginning = beginning
        self._collate = collate
        self._plan = plan
        self._workers = workers
        self.positions = positions
        self.turn = turn
        self._has_items = bool(positions)  # one that goes on at its end has none left
        self.needs_all_workers = plan.sharded

    def dataset(self, board: Board | None) -> Stream:
        """Return the stream from the position on."""
        at = dict(self.positions), self.turn
        return Stream(self._user, self._collate, self._plan, *at, board, self._beginning)

    def entries(self, *, again: bool, suspect: Any = None) -> Iterator[Any]:
        """Yield nothing: a stream is not asked for indices."""
        del again, suspect
        return iter(())

    def complete(self, report: Report) -> Report:
        """Return the report: a stream has no indices."""
        return report

    def delivered(self, report: Report) -> None:
        """Note that a batch is handed out."""
        if report.number < 0:  # a turn that was passed
            self._has_items |= report.state == _LEFT_OUT
            return
        self._has_items = True  # or an error in the place of one
        if report.state is None:
            return  # no batch
        items, state, ended = report.state
        self.positions[report.number if self._plan.sharded else 0] = StreamPosition(
            items=items, state=state, ended=ended
        )
        if self._plan.sharded:
            self.turn = (report.number + 1) % self._workers

    def is_finished(self) -> bool:
        """Return False: a stream tells when it ends."""
        return False

    def is_short(self) -> bool:
        """Return False: nobody knows how long a stream is.

        Raises:
            LoaderError: H610 if it had no item at all, unless this rank alone may have none.
        """
        if self._has_items or (_are_several_ranks() and divides_among_ranks(self._user)):
            return False
        raise LoaderError(
            f"{type(self._user).__name__} has no items",
            limit="an epoch needs at least one",
            fix="check its path and its filters; if it can be read only once, let its __iter__ begin anew.",
            rule="H610",
        ) from None

    def sample_at(self, showing: Showing) -> Any:
        """Return None: an item of a stream cannot be left out."""
        del showing

    def set_aside(self, index: Any, kind: str, evidence: str) -> None:
        """Do nothing: it is never called, since no item is suspect by itself."""
