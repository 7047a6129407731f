"""Make one batch in a worker: read the samples, replace bad ones, and collate the batch.

Each sample is read with its own random numbers. Problems are returned in a `BatchReport`, and
`recovery` and `map_source` determine how to handle them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.utils.data import Dataset, default_collate, default_convert, get_worker_info

from holdfast.loader.order.batches import BatchRequest
from holdfast.loader.quarantine import key_of
from holdfast.loader.random_state import LazySeeding, capture, restore
from holdfast.loader.seeds import SampleSeeds, derive_seed
from holdfast.loader.signalled import let_through
from holdfast.loader.workers.board import (
    COLLATING,
    NUMBER,
    PLACE,
    Board,
    Cells,
    WorkerStatus,
    show_batch_done,
)
from holdfast.loader.workers.report import BatchReport, LoadFailure, as_failure, find_shortage

# A failed read is retried once, because a drive may fail temporarily.
_TRIES = 2

# Collate functions that draw no random numbers. The generators need not be seeded for them.
_COLLATES_WITHOUT_RANDOMNESS = (default_collate, default_convert)


def as_is(value: Any) -> Any:
    """Return a value unchanged: the collate function for batches that are already collated."""
    return value


class _SampleResult(NamedTuple):
    """The result of reading one sample: the sample, or the reason why it cannot be used."""

    index: Any
    sample: Any = None
    failure: LoadFailure | None = None
    # The resource that the machine ran out of, if this caused the failure.
    shortage: str | None = None


@dataclass(slots=True, kw_only=True)
class _BadSamples:
    """The samples that cannot be used in the current batch.

    Args:
        keys: The keys (see `key_of`) of these samples, including quarantined samples.
        failures: The failures of samples that were not quarantined before.
        tried_place: Place of a sample that could not be read in the first attempt and is retried,
            or None.
    """

    keys: set[Any]
    failures: list[LoadFailure]
    tried_place: int | None


class Fetcher(Dataset[Any]):
    """A dataset indexed by batch requests. Each item is a batch with its report.

    Args:
        dataset: The user's dataset.
        seed: Seed of the loader. A sample's random numbers depend on this seed, the epoch and the
            index.
        collate: The user's ``collate_fn``.
        board: The board on which workers show their progress, or None in the main process.
        replaces: Whether a bad sample is retried once and then replaced. If False, its exception is
            raised in place of the batch.
        draws: Whether samples are known to draw from Python's or NumPy's generator (see
            `LazySeeding`).
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
        self._seeding = LazySeeding(draws)
        # This worker's cells on the board. None until the first batch is requested.
        self._worker_cells: Cells = None

    def __getitem__(self, fields: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        """Return a batch and the fields of its `BatchReport`.

        Args:
            fields: The fields of a `BatchRequest`. Plain tuples are sent in both directions,
                because they can be pickled faster. An empty tuple means that the request could not
                be pickled.
        """
        if not fields:
            raise TypeError(
                "the sampler's indices cannot be pickled, so they cannot be sent to a worker; pass"
                " num_workers=0"
            )
        request = BatchRequest(*fields)
        cells = self._find_cells()
        if cells is not None:
            cells[NUMBER] = request.number
            self._read_control_sample(request, cells)
        began = time.perf_counter()
        # In a worker, no other code uses the random state, so it need not be restored.
        random_state = None if cells is not None else capture()
        try:
            batch, report = self._make_batch(request, cells)
        finally:
            if random_state is not None:
                restore(random_state)
        if cells is not None:
            show_batch_done(cells)
        # The fields are listed one by one, because `_replace` would take a microsecond longer.
        return batch, (
            report.number,
            report.indices,
            report.failures,
            report.fatal,
            report.shortage,
            time.perf_counter() - began,
            report.state,
            self._seeding.draws,
        )

    def _find_cells(self) -> Cells:
        if self.board is not None and self._worker_cells is None:
            info = get_worker_info()
            assert info is not None, "only workers have a board"
            self._worker_cells = self.board.cells_of(info.id)
        return self._worker_cells

    def _read_control_sample(self, request: BatchRequest, cells: memoryview[int]) -> None:
        """In a worker that replaces a lost one, first read a sample that is not suspected.

        If the worker can read this control sample but is lost at a later sample, the later sample
        is to blame. On the board, reading the control sample counts as a finished batch. The
        control sample itself is discarded.
        """
        place = request.control_place
        if place is None or WorkerStatus(*cells).has_worked:
            return
        cells[PLACE] = place
        index = request.candidates[place]
        with contextlib.suppress(Exception, SystemExit):
            self._read(request, place, index)
        show_batch_done(cells)

    # --- batches ----------------------------------------------------------------------------------

    def _make_batch(self, request: BatchRequest, cells: Cells) -> tuple[Any, BatchReport]:
        """Return a batch and its report, or None and a report of the problem."""
        before = self._seeding.generator_states()
        samples = self._read_samples(request, cells)
        report = BatchReport(request.number)
        if len(samples) < len(request.indices):
            report = self._read_rest(request, cells, samples)
        batch = None
        if report.has_batch:
            batch, report = self._collate(request, cells, samples, report)
        if self._seeding.was_drawn(before):
            # A sample drew from a generator that was not seeded. All samples are read again with
            # seeded generators, because collating may also have modified samples that drew nothing.
            return self._make_batch(request, cells)
        return batch, report

    def _collate(
        self, request: BatchRequest, cells: Cells, samples: list[Any], report: BatchReport
    ) -> tuple[Any, BatchReport]:
        """Return the collated batch and its report, or None and a report of the problem."""
        if cells is not None:
            cells[PLACE] = COLLATING
        try:
            if self.collate not in _COLLATES_WITHOUT_RANDOMNESS:
                first_index = request.indices[:1]
                self._seeding.seed(derive_seed(self.seed, request.epoch, "collate", *first_index))
            if request.is_single_sample:
                batch = self.collate(samples[0])
            else:
                batch = self.collate(samples)
        # The error is reported, and the main process raises it.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            let_through(error)
            failed = BatchReport(request.number, request.indices, report.failures)
            shortage = find_shortage(error) if cells is not None else None
            if shortage is not None:
                return None, failed._replace(shortage=shortage)
            return None, failed._replace(fatal=as_failure(None, error))
        return batch, report

    # --- samples ----------------------------------------------------------------------------------

    def _read_samples(self, request: BatchRequest, cells: Cells) -> list[Any]:
        """Return the samples before the first one that cannot be read.

        If some samples of the batch are quarantined, no sample is read here. Almost all samples are
        read in the loop below, so the loop does only what is necessary.
        """
        samples: list[Any] = []
        if request.bad:
            return samples
        if request.first_position is None:
            seeds = self._seeds.of_samples(request.epoch, request.indices)
        else:
            seeds = [
                self._seed_of(request, place, index) for place, index in enumerate(request.indices)
            ]
        try:
            for place, index in enumerate(request.indices):
                if cells is not None:
                    cells[PLACE] = place
                self._seeding.seed(seeds[place])
                samples.append(self.dataset[index])
        # `_read_rest` reads the sample again and reports the error.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            let_through(error)
        return samples

    def _read_rest(self, request: BatchRequest, cells: Cells, samples: list[Any]) -> BatchReport:
        """Read the rest of a batch, from the first sample that failed or is quarantined.

        The samples are appended to `samples`, which contains the samples read so far. A bad sample
        is replaced by the next readable sample in the epoch's order.
        """
        first_place = len(samples)
        indices = list(request.indices[:first_place])
        bad_samples = _BadSamples(
            keys={key_of(index) for index in request.bad},
            failures=[],
            # `_read_samples` has already tried to read the sample at this place, unless some
            # samples of the batch were already quarantined. In that case, it did not read any.
            tried_place=None if request.bad else first_place,
        )
        for place in range(first_place, len(request.indices)):
            reading = self._read_place(request, cells, place, bad_samples)
            failures = tuple(bad_samples.failures)
            if reading.shortage is not None:
                return BatchReport(request.number, failures=failures, shortage=reading.shortage)
            if reading.failure is not None:
                return BatchReport(request.number, request.indices, failures, fatal=reading.failure)
            indices.append(reading.index)
            samples.append(reading.sample)
        return BatchReport(request.number, tuple(indices), tuple(bad_samples.failures))

    def _read_place(
        self, request: BatchRequest, cells: Cells, place: int, bad_samples: _BadSamples
    ) -> _SampleResult:
        """Return a sample for one place in the batch, or the reason why there is none.

        Samples that cannot be read are added to `bad_samples`.
        """
        failure = None
        for candidate_place, candidate in self._candidates(request, place):
            if key_of(candidate) in bad_samples.keys:
                continue
            if cells is not None:
                cells[PLACE] = candidate_place
            is_second_try = candidate_place == bad_samples.tried_place
            tries = _TRIES if self.replaces and not is_second_try else 1
            reading = self._try(request, candidate_place, candidate, tries)
            if reading.failure is None:
                return reading
            if reading.shortage is not None and cells is not None:
                # The sample is not at fault. With fewer workers, there may be enough of the
                # resource.
                return reading
            failure = reading.failure
            if self.replaces:
                bad_samples.failures.append(failure)
                bad_samples.keys.add(key_of(candidate))
        index = request.indices[place]
        if failure is None:
            text = f"every sample that could replace sample {index!r} is bad as well"
            failure = LoadFailure(index=index, text=text)
        return _SampleResult(index, failure=failure)

    def _candidates(self, request: BatchRequest, place: int) -> Iterator[tuple[int, Any]]:
        """Yield the candidates for a place in the batch, as pairs of their own place and index."""
        indices = request.indices[place : place + 1]
        if self.replaces:
            indices = request.candidates[place:]
        yield from enumerate(indices, start=place)

    def _try(self, request: BatchRequest, place: int, index: Any, tries: int) -> _SampleResult:
        reading = _SampleResult(index)
        for _ in range(tries):
            try:
                return _SampleResult(index, self._read(request, place, index))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - it is reported
                let_through(error)
                failure = as_failure(index, error)
                reading = _SampleResult(index, failure=failure, shortage=find_shortage(error))
        return reading

    def _read(self, request: BatchRequest, place: int, index: Any) -> Any:
        """Seed the generators for a sample, and read the sample."""
        self._seeding.seed(self._seed_of(request, place, index))
        return self.dataset[index]

    def _seed_of(self, request: BatchRequest, place: int, index: Any) -> int:
        if request.first_position is None:
            return self._seeds.of_sample(request.epoch, index)
        # The sample may occur more than once in an epoch, so its seed also depends on its position.
        return self._seeds.of_sample(request.epoch, (index, request.first_position + place))
