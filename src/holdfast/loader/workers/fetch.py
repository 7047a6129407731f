"""What a worker does for one batch.

Fetch its samples with their own random numbers, replace bad ones, collate.

Whatever goes wrong with a sample comes back as a *report* beside the batch, never as an exception
that ends an epoch (``StopIteration``), that cannot be pickled (the parent would wait for ever,
pytorch#142884) or that loses the index. What is done about it is decided in ``recovery`` and
``map_source``.
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

from holdfast.core.errors import LoaderError
from holdfast.loader.order.plan import Entry
from holdfast.loader.quarantine import key_of, last_line
from holdfast.loader.random_state import LazySeeding, capture, restore
from holdfast.loader.seeds import SampleSeeds, derive_seed
from holdfast.loader.signalled import let_through
from holdfast.loader.workers.board import COLLATING, NUMBER, PLACE, Board, Cells, Showing, has_ended

_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE}
_DRAW_NOTHING = (default_collate, default_convert)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A sample that raised, twice."""

    index: Any
    text: str
    error: bytes | None = None


class Report(NamedTuple):
    """What happened while a batch was made.

    Args:
        number: Of the entry.
        indices: Dataset indices of the samples that are in the batch; None where they are those of
            the entry.
        failures: Samples that are not in it.
        fatal: Why there is no batch at all: an error of collating, or nothing left to replace a
            sample with.
        shortage: What the machine was short of: ``"shared memory"``, ``"file descriptors"``,
            ``"memory"``, or None.
        seconds: Time to make it.
        state: Of an iterable dataset, after this batch.
        draws: As `LazySeeding`: whether this batch, or one before it, has drawn from python's or
            numpy's generator.
    """

    number: int
    indices: tuple[Any, ...] | None = None
    failures: tuple[Failure, ...] = ()
    fatal: Failure | None = None
    shortage: str | None = None
    seconds: float = 0.0
    state: Any = None
    draws: bool = False

    @property
    def has_batch(self) -> bool:
        """Return whether there is a batch."""
        return self.fatal is None and self.shortage is None


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
        return Failure(index=index, text=text)
    return Failure(index=index, text=text, error=pickled if same else None)


def as_error(failure: Failure, report: Report) -> Exception:
    """Return the exception that a worker met, if it can be had, with what it was doing."""
    error = None if failure.error is None else ForkingPickler.loads(failure.error)
    which = "a stream" if report.indices is None else f"samples {list(report.indices)}"
    if not isinstance(error, Exception) or isinstance(error, StopIteration):
        lines = failure.text.strip().splitlines()
        error = LoaderError(
            f"the batch of {which} cannot be made: {lines[-1] if lines else 'it raised'}",
            limit="no other sample can stand in for what is missing",
            fix="repair the dataset or collate_fn; the note below shows where it failed.",
            rule="H613",
        )
    if report.failures:
        first = report.failures[0]
        error.add_note(
            f"None of {len(report.failures)} samples in a row could be read: is a folder or a drive"
            f" missing? The first was sample {first.index!r}: {last_line(first.text)}"
        )
    error.add_note(f"In holdfast.DataLoader, while making the batch of {which}:\n{failure.text}")
    return error


def shortage_in(error: BaseException) -> str | None:
    """Return what the machine is short of, if that is what an error says.

    Such an error is not the sample's fault.
    """
    try:
        text, number, name = (
            str(error),
            getattr(error, "errno", None),
            str(getattr(error, "filename", None) or ""),
        )
    except Exception:  # noqa: BLE001 - as above
        return None
    number = number if isinstance(number, int) else None
    # Else a text of the sample's, such as a key
    systems = text if isinstance(error, (OSError, RuntimeError)) else ""
    # An OSError's may be the path of a sample
    torchs = text if isinstance(error, RuntimeError) else ""
    if number in _OUT_OF_DESCRIPTORS or "Too many open files" in systems or "ancdata" in torchs:
        return "file descriptors"
    if "shared memory" in torchs or "</torch_" in torchs:
        return "shared memory"
    # With a name it is a disk that is full, which fewer workers do not cure
    if number == errno.ENOSPC:
        return "shared memory" if not name or name.startswith("/dev/shm/") else None  # noqa: S108 - no file is made
    if (
        isinstance(error, MemoryError)
        or number == errno.ENOMEM
        or "can't allocate memory" in torchs
    ):
        return "memory"
    return None


class Fetcher(Dataset[Any]):
    """A map-style dataset whose keys are entries and whose items are batches with reports.

    With epoch and index the seed decides the random numbers of a sample. A bad one is tried again
    and then replaced (`replaces`); else its exception ends the batch. `draws` is as in
    `LazySeeding`.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        collate: Callable[[Any], Any],
        board: Board | None = None,
        *,
        replaces: bool = True,
        draws: bool = False,
    ) -> None:
        self.dataset = dataset
        self.seed = seed
        self.collate = collate
        self.board = board
        self.replaces = replaces
        self._seeds = SampleSeeds(seed)
        self._lazy = LazySeeding(draws)
        self._own_cells: Cells = None  # of the worker that this is in

    def __getitem__(self, fields: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        if not fields:
            raise TypeError(
                "indices that cannot be pickled cannot be sent to a worker; pass num_workers=0"
            )
        entry = Entry(*fields)
        cells = self._cells()
        if cells is not None:
            cells[NUMBER] = entry.number
            if entry.control is not None and not Showing(*cells).has_worked:
                self._show_that_it_works(entry, entry.control, cells)
        began = time.perf_counter()
        # In a worker the random state is nobody's
        before = None if cells is not None else capture()
        try:
            batch, report = self._make(entry, cells)
        finally:
            if before is not None:
                restore(before)
        if cells is not None:
            has_ended(cells)
        return batch, (*report[:5], time.perf_counter() - began, report.state, self._lazy.draws)

    def _cells(self) -> Cells:
        if self.board is not None and self._own_cells is None:
            info = get_worker_info()
            assert info is not None, "a board is for workers"
            self._own_cells = self.board.of(info.id)
        return self._own_cells

    def _show_that_it_works(self, entry: Entry, place: int, cells: memoryview[int]) -> None:
        """Read a sample that nobody suspects.

        Who is lost after that is lost to the sample that it was at.
        """
        cells[PLACE] = place
        with contextlib.suppress(Exception, SystemExit):
            self._read(entry, place, (*entry.indices, *entry.spares)[place])
        has_ended(cells)

    def _make(self, entry: Entry, cells: Cells) -> tuple[Any, Report]:
        """Make a batch; twice, if it drew from a generator that nothing had drawn from before."""
        before = self._lazy.stand()
        samples = self._read_all(entry, cells)
        report = Report(entry.number)
        if len(samples) < len(entry.indices):
            report = self._read_rest(entry, cells, samples)
        batch = None
        if report.has_batch:
            if cells is not None:
                cells[PLACE] = COLLATING
            try:
                if self.collate not in _DRAW_NOTHING:
                    self._lazy.seed(
                        derive_seed(self.seed, entry.epoch, "collate", *entry.indices[:1])
                    )
                batch = self.collate(samples[0] if entry.alone else samples)
            # Reported, and raised in the main process.
            except (Exception, SystemExit) as error:  # noqa: BLE001
                let_through(error)
                shortage = shortage_in(error) if cells is not None else None
                fatal = None if shortage else failure_of(None, error)
                report = Report(entry.number, entry.indices, report.failures, fatal, shortage)
        if self._lazy.was_drawn(before):
            # With samples that are new too: collating may have changed these
            return self._make(entry, cells)
        return batch, report

    def _read_all(self, entry: Entry, cells: Cells) -> list[Any]:
        """Return the samples up to the first one that cannot be used.

        Nothing is done here that need not be.
        """
        samples: list[Any] = []
        if entry.bad:
            return samples
        if entry.first is None:
            seeds = self._seeds.all(entry.epoch, entry.indices)
        else:
            seeds = [
                self._seed_of(entry, place, index) for place, index in enumerate(entry.indices)
            ]
        try:
            for place, index in enumerate(entry.indices):
                if cells is not None:
                    cells[PLACE] = place
                self._lazy.seed(seeds[place])
                samples.append(self.dataset[index])
        except (Exception, SystemExit) as error:  # noqa: BLE001 - looked at when it is tried again
            let_through(error)
        return samples

    def _read_rest(self, entry: Entry, cells: Cells, samples: list[Any]) -> Report:
        """Add the samples from the first one on that cannot be used, with others in the place of
        bad ones.
        """
        tried = -1 if entry.bad else len(samples)
        found, failures = list(entry.indices[: len(samples)]), list[Failure]()
        bad = set(map(key_of, entry.bad))
        for place, index in enumerate(entry.indices[len(samples) :], start=len(samples)):
            last: Failure | None = None
            following = (
                itertools.chain(entry.indices[place:], entry.spares) if self.replaces else (index,)
            )
            for other, candidate in enumerate(following, start=place):
                if key_of(candidate) in bad:
                    continue
                if cells is not None:
                    cells[PLACE] = other
                # A drive that stumbles gets a second chance.
                tries = 2 if self.replaces and other != tried else 1
                sample, last, shortage = self._try(entry, other, candidate, tries)
                # With fewer workers there may be enough
                if shortage is not None and cells is not None:
                    return Report(entry.number, failures=tuple(failures), shortage=shortage)
                if last is None:
                    found.append(candidate)
                    samples.append(sample)
                    break
                if self.replaces:
                    failures.append(last)
                    bad.add(key_of(candidate))
            else:
                text = f"every sample that could stand in for sample {index!r} is bad too"
                fatal = last or Failure(index=index, text=text)
                return Report(entry.number, entry.indices, tuple(failures), fatal)
        return Report(entry.number, tuple(found), tuple(failures))

    def _try(
        self, entry: Entry, place: int, index: Any, tries: int
    ) -> tuple[Any, Failure | None, str | None]:
        """Return a sample, or why it cannot be used, with what the machine was short of."""
        failure: Failure | None = None
        shortage: str | None = None
        for _ in range(tries):
            try:
                return self._read(entry, place, index), None, None
            except (Exception, SystemExit) as error:  # noqa: BLE001 - reported
                let_through(error)
                failure, shortage = failure_of(index, error), shortage_in(error)
        return None, failure, shortage

    def _seed_of(self, entry: Entry, place: int, index: Any) -> int:
        return self._seeds.of(
            entry.epoch, index if entry.first is None else (index, entry.first + place)
        )

    def _read(self, entry: Entry, place: int, index: Any) -> Any:
        """Return a sample that draws its own random numbers."""
        self._lazy.seed(self._seed_of(entry, place, index))
        return self.dataset[index]
