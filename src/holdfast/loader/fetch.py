"""What a worker does for one batch: fetch its samples with their own random numbers, replace bad ones, collate.

Whatever goes wrong with a sample comes back as a *report* beside the batch, never as an exception that ends an epoch
(``StopIteration``), that cannot be pickled (the parent would wait for ever, pytorch#142884) or that loses the index.

Does not decide: whether a bad sample is set aside, and what is done about a machine that is short of something, is
for ``loader`` and ``healing``.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

from torch.utils.data import Dataset, default_collate, default_convert, get_worker_info

from holdfast.loader.inspection import find_nonfinite, first_difference
from holdfast.loader.quarantine import key_of
from holdfast.loader.random_state import Borrowed, LazySeeding
from holdfast.loader.seeds import SampleSeeds, derive_seed
from holdfast.loader.signalled import let_through
from holdfast.loader.workers.board import COLLATING, NUMBER, PLACE, Board, Showing, has_ended

_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}


_DRAW_NOTHING = (default_collate, default_convert)
_USUAL_FIELDS = 3


class Entry(NamedTuple):
    """One batch to fetch.

    Args:
        number: Counts the batches of an epoch, for the workers' board.
        epoch: Seeds depend on it.
        indices: Dataset indices, in the order of the batch.
        spares: Indices that follow in the epoch's order: the next ones replace what cannot be read.
        aside: Those of `indices` and `spares` that are set aside already.
        first: Position of the first sample, where an index may come more than once an epoch: its random numbers then
            depend on its position too. None elsewhere.
        alone: Whether this is a sample by itself (``batch_size=None``), not a batch of one.
        twice: Whether to read it twice and compare, which tells whether the dataset is deterministic.
        control: Place, among `indices` and `spares`, of a sample that a new worker reads first, to show that it can.
        seeds: Of the samples at `indices`, or none if they are not known yet.
        unsendable: Why this could not be sent to a worker as it was, or nothing. In `indices` is then text.
    """

    number: int
    epoch: int
    indices: tuple[Any, ...]
    spares: tuple[Any, ...] = ()
    aside: tuple[Any, ...] = ()
    first: int | None = None
    alone: bool = False
    twice: bool = False
    control: int | None = None
    seeds: tuple[int, ...] = ()
    unsendable: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A sample that could not be used, twice.

    Args:
        index: Dataset index.
        kind: ``"raised"`` or ``"non-finite"``.
        text: What was seen: a traceback, or where the value is.
        error: The pickled exception, or None if it cannot be pickled.
    """

    index: Any
    kind: str
    text: str
    error: bytes | None = None


class Report(NamedTuple):
    """What happened while a batch was made.

    Args:
        number: Of the entry.
        indices: Dataset indices of the samples that are in the batch; None where they are those of the entry.
        failures: Samples that are not in it.
        fatal: Why there is no batch at all: an error of collating, or nothing left to replace a sample with.
        shortage: What the machine was short of: ``"shared memory"``, ``"file descriptors"``, ``"memory"``, or None.
        differs: What was different when the batch was read twice, or None.
        seconds: Time to make it.
        state: Of an iterable dataset, after this batch.
        draws: As `LazySeeding`: what this batch, or one before it, has drawn from.
    """

    number: int
    indices: tuple[Any, ...] | None = None
    failures: tuple[Failure, ...] = ()
    fatal: Failure | None = None
    shortage: str | None = None
    differs: str | None = None
    seconds: float = 0.0
    state: Any = None
    draws: int = 0

    def timed(self, seconds: float, draws: int) -> Report:
        """Return this report with both; `_replace` takes ten times as long."""
        return Report(*self[:6], seconds, self.state, draws)


def sent(batch: Any, report: Report, board: Board | None) -> Any:
    """Return what a worker hands over, or where the loader works by itself (no board) the pair that arrives."""
    return batch, report if board is None else tuple(report)  # quicker to pickle


def received(fields: tuple[Any, ...]) -> Report:
    """Return the report that a worker has sent as a tuple: number, seconds and draws, if all is as the entry asks."""
    if len(fields) == _USUAL_FIELDS:
        number, seconds, draws = fields
        return Report(number, None, (), None, None, None, seconds, None, draws)
    return Report(*fields)


def as_is(value: Any) -> Any:
    """Return the value: batches are collated before they get here."""
    return value


def failure_of(index: Any, error: BaseException) -> Failure:
    """Return an exception as a failure, with the exception itself if it survives pickling."""
    text = "".join(traceback.format_exception(error))
    try:
        pickled = bytes(ForkingPickler.dumps(error))
        same = type(ForkingPickler.loads(pickled)) is type(error)
    except Exception:  # noqa: BLE001 - an exception class may do anything here
        return Failure(index=index, kind="raised", text=text)
    return Failure(index=index, kind="raised", text=text, error=pickled if same else None)


def shortage_in(error: BaseException) -> str | None:
    """Return what the machine is short of, if that is what an error says; such an error is not the sample's fault."""
    try:
        text, number, name = str(error), getattr(error, "errno", None), str(getattr(error, "filename", None) or "")
    except Exception:  # noqa: BLE001 - as above
        return None
    number = number if isinstance(number, int) else None
    systems = text if isinstance(error, (OSError, RuntimeError)) else ""  # else a text of the sample's, such as a key
    torchs = text if isinstance(error, RuntimeError) else ""  # an OSError's may be the path of a sample
    if number in _OUT_OF_DESCRIPTORS or "Too many open files" in systems or "ancdata" in torchs:
        return "file descriptors"
    if "shared memory" in torchs or "</torch_" in torchs:
        return "shared memory"
    if number == errno.ENOSPC:  # with a name it is a disk that is full, which fewer workers do not cure
        return "shared memory" if not name or name.startswith("/dev/shm/") else None  # noqa: S108 - no file is made
    if isinstance(error, MemoryError) or number == errno.ENOMEM or "can't allocate memory" in torchs:
        return "memory"
    return None


class _OneOfMany:
    """A dataset that can only read several samples at a time, asked for one: each has random numbers of its own."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        return self.dataset.__getitems__([index])[0]


def _one_at_a_time(dataset: Any) -> Any:
    reads_one = getattr(type(dataset), "__getitem__", None) not in (None, Dataset.__getitem__)
    return dataset if reads_one or not hasattr(dataset, "__getitems__") else _OneOfMany(dataset)


class Fetcher(Dataset[Any]):
    """A map-style dataset whose keys are entries and whose items are batches with reports.

    Args:
        dataset: The user's.
        seed: With epoch and index it decides the random numbers of a sample.
        collate: The user's collate function.
        board: Where a worker says what it is doing, or None.
        replaces: Whether a bad sample is tried again and then replaced; else its exception ends the batch.
        check_finite: Whether a sample with NaN or Inf is a bad one.
        draws: As `LazySeeding`.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        collate: Callable[[Any], Any],
        board: Board | None = None,
        *,
        replaces: bool = True,
        check_finite: bool = False,
        draws: int = 0,
    ) -> None:
        self.users = dataset  # for ``get_worker_info()``
        self.dataset = _one_at_a_time(dataset)
        self.seed = seed
        self.collate = collate
        self.board = board
        self.replaces = replaces
        self.check_finite = check_finite
        self._seeds = SampleSeeds(seed)
        self._lazy = LazySeeding(draws)
        self._borrowed = Borrowed(self._lazy)
        self._collate_draws_nothing = collate in _DRAW_NOTHING
        self._cells: memoryview[int] | None = None  # of the worker that this is in

    def __getitem__(self, fields: tuple[Any, ...]) -> Any:
        entry = fields if type(fields) is Entry else Entry(*fields)
        cells = None if self.board is None else self._cells or self._own_cells(self.board)
        if cells is None:  # else the random state is nobody's
            self._borrowed.take()
        else:
            cells[NUMBER] = entry.number
            if entry.unsendable:
                text = f"{entry.unsendable}: indices cannot be sent to a worker; with num_workers=0 they need not be"
                failure = Failure(index=None, kind="raised", text=text)
                return sent(None, _without_batch(entry, (), failure), self.board)
            if entry.control is not None:
                self._show_that_it_works(entry, entry.control, cells)
        began = time.perf_counter()
        try:
            batch, report = self._make(entry, cells)
            if entry.twice and _is_made(report):
                again, second = self._make(entry, cells)
                if _is_made(second):  # else there is nothing to compare with
                    report = (report or Report(entry.number))._replace(differs=first_difference(batch, again))
            seconds = time.perf_counter() - began
        finally:
            if cells is None:
                self._borrowed.give_back()
        draws = self._lazy.draws
        if cells is not None:
            has_ended(cells)
            if report is None:
                return batch, (entry.number, seconds, draws)
        return sent(batch, (report or Report(entry.number, entry.indices)).timed(seconds, draws), self.board)

    def _own_cells(self, board: Board) -> memoryview[int]:
        info = get_worker_info()
        assert info is not None, "a board is for workers"
        self._cells = board.of(info.id)
        return self._cells

    def _show_that_it_works(self, entry: Entry, place: int, cells: memoryview[int]) -> None:
        """Read a sample that nobody suspects: who is lost after that is lost to the sample that it was at."""
        if Showing(*cells).has_worked:
            return
        cells[PLACE] = place
        with contextlib.suppress(Exception, SystemExit):
            self._seeded(entry, place, (*entry.indices, *entry.spares)[place])
        has_ended(cells)

    def _make(self, entry: Entry, cells: memoryview[int] | None) -> tuple[Any, Report | None]:
        """Make a batch; twice, if it drew from a generator that nothing had drawn from before.

        Returns:
            The batch, or None; and what there is to say, or None if it is as the entry asks.
        """
        # No call that is not needed, since nothing of it is in the processor's caches where samples take long; and
        # between two samples least of all, so the seeds are made all at once.
        lazy = self._lazy
        before = lazy.stand()
        batch, samples, report = None, list[Any](), None
        if not entry.aside and entry.first is None:
            seeds, seed = entry.seeds or self._seeds.all(entry.epoch, entry.indices), lazy.seeder
            try:  # suppress() would be three calls more
                for offset, index in enumerate(entry.indices):
                    if cells is not None:
                        cells[PLACE] = offset
                    seed(seeds[offset])
                    sample = self.dataset[index]
                    if self.check_finite and find_nonfinite(sample) is not None:
                        break
                    samples.append(sample)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - looked at in `_read_rest`, where it is tried again
                let_through(error)
        if len(samples) < len(entry.indices):
            report = self._read_rest(entry, cells, samples)
        if _is_made(report):
            if cells is not None:
                cells[PLACE] = COLLATING
            try:
                if not self._collate_draws_nothing:
                    lazy.seed(derive_seed(self.seed, entry.epoch, "collate", *entry.indices[:1]))
                batch = self.collate(samples[0] if entry.alone else samples)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - reported, and raised in the main process
                let_through(error)
                shortage = shortage_in(error) if cells is not None else None
                failures = () if report is None else report.failures
                report = _without_batch(entry, failures, shortage or failure_of(None, error))
        if lazy.was_surprised(before):
            return self._make(entry, cells)  # with samples that are new too: collating may have changed these
        return batch, report

    def _read_rest(self, entry: Entry, cells: memoryview[int] | None, samples: list[Any]) -> Report:
        """Add the samples from the first one on that cannot be used; return what there is to say."""
        tried = len(samples) if not entry.aside and entry.first is None else -1
        aside = set(map(key_of, entry.aside))
        found, failures = list(entry.indices[: len(samples)]), list[Failure]()
        for offset, index in enumerate(entry.indices[len(samples) :], start=len(samples)):
            if cells is not None:
                cells[PLACE] = offset
            if offset != tried and not (aside and key_of(index) in aside):
                try:
                    sample = self._seeded(entry, offset, index)
                    if not self.check_finite or find_nonfinite(sample) is None:
                        found.append(index)
                        samples.append(sample)
                        continue
                except (Exception, SystemExit) as error:  # noqa: BLE001 - looked at below, where it is tried again
                    let_through(error)
            chosen, sample = self._instead(entry, offset, cells, failures)
            if isinstance(sample, (Failure, str)):
                return _without_batch(entry, tuple(failures), sample)
            found.append(chosen)
            samples.append(sample)
        return Report(number=entry.number, indices=tuple(found), failures=tuple(failures))

    def _seeded(self, entry: Entry, place: int, index: Any) -> Any:
        """Return a sample that draws its own random numbers."""
        key = index if entry.first is None else (index, entry.first + place)
        self._lazy.seed(self._seeds.of(entry.epoch, key))
        return self.dataset[index]

    def _instead(
        self, entry: Entry, offset: int, cells: memoryview[int] | None, failures: list[Failure]
    ) -> tuple[Any, Any]:
        """Try a sample again, then those that follow; return the index that was read and its sample.

        In the sample's place is a failure if none can be had, or a word if the machine is short of something.
        """
        index = entry.indices[offset]
        last: Failure | None = None
        bad = set(map(key_of, (*entry.aside, *(each.index for each in failures))))
        candidates = enumerate(itertools.chain(entry.indices[offset:], entry.spares), start=offset)
        for place, candidate in candidates if self.replaces else [(offset, index)]:
            if key_of(candidate) in bad:
                continue
            if cells is not None:
                cells[PLACE] = place
            for _ in range(2 if place != offset and self.replaces else 1):  # a drive that stumbles: a second chance
                try:
                    sample = self._seeded(entry, place, candidate)
                except (Exception, SystemExit) as error:  # noqa: BLE001 - reported
                    let_through(error)
                    shortage = shortage_in(error)
                    if shortage is not None and cells is not None:
                        return candidate, shortage  # with fewer workers there may be enough; here there is not
                    last = failure_of(candidate, error)
                    continue
                where = find_nonfinite(sample) if self.check_finite else None
                if where is None:
                    return candidate, sample
                last = Failure(index=candidate, kind="non-finite", text=where)
            if last is not None and self.replaces:
                failures.append(last)
                bad.add(key_of(candidate))
        text = f"every sample that could stand in for sample {index!r} is bad too"
        return index, last or Failure(index=index, kind="raised", text=text)


def _is_made(report: Report | None) -> bool:
    return report is None or (report.fatal is None and report.shortage is None)


def _without_batch(entry: Entry, failures: tuple[Failure, ...], why: Failure | str) -> Report:
    if isinstance(why, str):
        return Report(number=entry.number, failures=failures, shortage=why)
    return Report(number=entry.number, indices=entry.indices, failures=failures, fatal=why)
