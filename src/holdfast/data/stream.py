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
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as _torch_worker

from holdfast.core.errors import LoaderError
from holdfast.data.fetch import Report, failure_of, sent, shortage_in
from holdfast.data.random_state import isolated, seed_cpu
from holdfast.data.ranks import rank_positions
from holdfast.data.seeds import derive_seed
from holdfast.data.signalled import let_through
from holdfast.data.worker_board import COLLATING, NUMBER, PLACE, Board, Showing, has_ended

_Cells: TypeAlias = memoryview | None


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
        self._is_known, self._state = False, None
        self._was_left = False

    def of_epoch(self, begin: StreamPosition) -> StreamPosition:
        """Return a position with the state to load there."""
        fresh = begin.state is None and not begin.items
        return replace(begin, state=self._state) if fresh and self._was_left else begin

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
        items = _Items(self._dataset, self._plan, shard, begin, self._board)
        cells = None if self._board is None else self._board.of(worker)
        items.show = lambda: _show(cells, items.number, 0)
        if parts > 1 and not self._plan.certain:
            items.notice()
        size = (self._plan.batch_size or 1) * self._plan.world_size
        try:
            items.open(begin)
            for turn in range(2**62):
                first, mine = items.number, turn % parts == worker % parts
                began = time.perf_counter()
                group, item = [], None
                for _ in range(size):
                    _show(cells, items.number, 0)
                    item = next(items, items)
                    if item is items:
                        break
                    if mine:
                        group.append(item)
                if items.number == first:
                    return True
                if mine:
                    batch = self._cut(group, size)
                    if batch is not None:
                        seconds = time.perf_counter() - began
                        yield self._made(batch, worker, cells, items, seconds, ended=item is items)
        except _StreamError as error:
            shortage = shortage_in(error.cause)
            if shortage is not None and self._board is None:
                raise error.cause from None
            fatal = None if shortage else failure_of(items.number, error.cause)
            yield sent(None, Report(number=worker, fatal=fatal, shortage=shortage), self._board)
        return False

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

    def _made(
        self, batch: list[Any], worker: int, cells: _Cells, items: _Items, seconds: float, *, ended: bool
    ) -> Any:
        _show(cells, items.number, COLLATING)
        try:
            with _quietly(self._board):
                seed_cpu(derive_seed(self._plan.seed, self._plan.epoch, "collate", items.number))
                made = self._collate(batch[0] if self._plan.batch_size is None else batch)
            state = copy.deepcopy(self._dataset.state_dict()) if keeps_state(self._dataset) else None
        except (Exception, SystemExit) as error:
            let_through(error)
            raise _StreamError(error) from error
        if cells is not None:
            has_ended(cells)
        return sent(made, Report(number=worker, state=(items.number, state, ended), seconds=seconds), self._board)


def _show(cells: _Cells, number: int, offset: int) -> None:
    if cells is not None:
        cells[NUMBER], cells[PLACE] = number, offset


def _quietly(board: Board | None) -> contextlib.AbstractContextManager[None]:
    """Return a context that leaves training's random state alone; in a worker there is none to leave alone."""
    return isolated() if board is None else contextlib.nullcontext()


class _StreamError(Exception):
    def __init__(self, cause: BaseException) -> None:
        super().__init__()  # without its text, which may be broken
        self.cause = cause


class _Noticing:
    """torch's facts about this worker, which remember that they were asked for."""

    def __init__(self, info: Any) -> None:
        self._info = info
        self.asked = False

    def __getattr__(self, name: str) -> Any:
        self.asked |= name in ("id", "num_workers")
        return getattr(self._info, name)


class _Items:
    """The items of a stream, each with random numbers of its own, and their count."""

    def __init__(
        self, dataset: Any, plan: StreamPlan, shard: int, begin: StreamPosition, board: Board | None
    ) -> None:
        self._dataset = dataset
        self._board = board
        self._noticing: _Noticing | None = None
        self.show: Callable[[], None] = lambda: None
        self._parts = (plan.seed, plan.epoch, "stream", shard if plan.sharded else 0)
        self.number = begin.items if begin.state is not None else 0
        self._iterator: Iterator[Any] = iter(())

    def open(self, begin: StreamPosition) -> None:
        """Go to a position."""
        self.show()  # what follows may take its time: a worker that reads over is no idle one
        try:
            with _quietly(self._board):
                seed_cpu(derive_seed(*self._parts, -1))
                if begin.state is not None:
                    self._dataset.load_state_dict(copy.deepcopy(begin.state))
                self._iterator = iter(self._dataset)
        except Exception as error:
            let_through(error)
            raise _StreamError(error) from error
        self._check()
        while self.number < begin.items and next(self, self) is not self:
            self.show()

    def notice(self) -> None:
        """From now on see whether the dataset asks which worker it is in."""
        self._noticing = _Noticing(get_worker_info())
        _torch_worker._worker_info = self._noticing  # type: ignore[assignment] # of this worker process alone

    def _check(self) -> None:
        if self._noticing is not None and self._noticing.asked:
            raise _StreamError(
                LoaderError(
                    f"{type(self._dataset).__name__} asks get_worker_info() which worker it is in",
                    limit="if it divides its items among workers, dividing them again would leave most of them out",
                    fix="pass sharded=True if it does, sharded=False if it asks for another reason.",
                    rule="H607",
                )
            )

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with _quietly(self._board):
            seed_cpu(derive_seed(*self._parts, self.number))
            try:
                item = next(self._iterator)
            except StopIteration:
                self._check()
                raise
            except (Exception, SystemExit) as error:
                let_through(error)
                raise _StreamError(error) from error
        self._check()
        self.number += 1
        return item


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
        if report.state is None or report.number < 0:
            return  # a turn that was passed, or no batch
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
        """Return False: nobody knows how long a stream is."""
        return False

    def sample_at(self, showing: Showing) -> Any:
        """Return None: an item of a stream cannot be left out."""
        del showing

    def set_aside(self, index: Any, kind: str, evidence: str) -> None:
        """Do nothing: it is never called, since no item is suspect by itself."""
