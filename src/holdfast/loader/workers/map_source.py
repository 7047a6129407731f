"""The source of batches, as `WorkerRecovery` sees it, and its version for map-style datasets.

The source for an iterable dataset is in `streams.stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from holdfast.core.events.data import EventData
from holdfast.loader.order.batches import BatchRequest, EpochBatches
from holdfast.loader.quarantine import QuarantineLedger, key_of
from holdfast.loader.workers.board import Board, WorkerStatus
from holdfast.loader.workers.fetch import Fetcher
from holdfast.loader.workers.report import BatchReport


class BatchSource:
    """The rest of an epoch.

    The default methods suit a source whose samples are not known in advance, such as a stream.
    """

    # Whether the order of samples depends on the number of workers, which therefore must not
    # change.
    needs_all_workers = False

    def dataset(self, board: Board | None) -> Any:
        """Return the dataset whose items are batches with reports, from the position on."""
        raise NotImplementedError

    def requests(self, *, after_loss: bool, suspect: Any = None) -> Iterator[Any]:
        """Yield requests for the batches that have not been handed out yet.

        Args:
            after_loss: Whether workers were lost since the last call.
            suspect: Dataset index of the sample that a lost worker was reading.
        """
        del after_loss, suspect
        return iter(())

    def complete(self, report: BatchReport) -> BatchReport:
        """Return a report with the fields that a worker does not send filled in."""
        return report

    def delivered(self, report: BatchReport) -> None:
        """Note that a batch is handed out."""
        raise NotImplementedError

    def is_finished(self) -> bool:
        """Return whether everything is handed out, as far as that is known before asking."""
        return False

    def is_short(self) -> bool:
        """Return whether batches are missing although the workers are done."""
        return False

    def sample_at(self, status: WorkerStatus) -> Any:
        """Return the dataset index of the sample that a worker was reading.

        Returns None if it was reading none, or if samples cannot be left out.
        """
        del status

    def quarantine(self, index: Any, kind: str, evidence: str) -> None:
        """Leave a sample out from now on."""


class MapSource(BatchSource):
    """The rest of an epoch of a map-style dataset.

    Args:
        batches: Which samples are in which batch.
        epoch: Number of the epoch.
        start: Position at which the epoch continues.
        ledger: The samples that are quarantined.
        make_fetcher: Returns the dataset that workers read, given the board.
        emit: Called with each event.
    """

    def __init__(
        self,
        batches: EpochBatches,
        epoch: int,
        start: int,
        ledger: QuarantineLedger,
        make_fetcher: Callable[[Board | None], Fetcher],
        emit: Callable[[EventData], None],
    ) -> None:
        # Position after the last batch that was handed out.
        self.position = start
        self._make_fetcher = make_fetcher
        self._epoch = epoch
        self._ledger = ledger
        self._emit = emit
        # Keys of the quarantined samples. The iterator below reads this very set.
        self._bad_keys = ledger.bad(epoch)
        self._upcoming = batches.requests(epoch, start, self._bad_keys)
        self._has_upcoming = True
        # Unanswered requests, by number, each with the position after it.
        self._pending: dict[int, tuple[BatchRequest, int]] = {}
        self._losses = 0

    def dataset(self, board: Board | None) -> Fetcher:
        """Return the dataset whose items are batches with reports."""
        return self._make_fetcher(board)

    def requests(self, *, after_loss: bool, suspect: Any = None) -> Iterator[BatchRequest]:
        """Yield requests for the remaining batches; those of lost workers come first."""
        if after_loss:
            self._losses += 1
        for number in sorted(self._pending):
            request, position_after = self._pending[number]
            control_place = self._control_place(request, suspect) if after_loss else None
            bad = tuple(index for index in request.candidates if key_of(index) in self._bad_keys)
            request = request._replace(bad=bad, control_place=control_place)
            self._pending[number] = (request, position_after)
            yield request
        for request, position_after in self._upcoming:
            self._pending[request.number] = (request, position_after)
            yield request
        self._has_upcoming = False

    def _control_place(self, request: BatchRequest, suspect: Any) -> int | None:
        """Return the place of the control sample of a new worker, a different one each time.

        The sample is neither known to be bad nor suspected. Returns None if there is no such
        sample.
        """
        avoided_keys = self._bad_keys | {key_of(suspect)}
        places = [
            place
            for place, index in enumerate(request.candidates)
            if key_of(index) not in avoided_keys
        ]
        if not places:
            return None
        return places[self._losses % len(places)]

    def complete(self, report: BatchReport) -> BatchReport:
        """Return a report with the indices of its batch.

        A worker sends them only if they differ from the request's.
        """
        if report.indices is not None:
            return report
        request, _ = self._pending[report.number]
        return report._replace(indices=request.indices)

    def delivered(self, report: BatchReport) -> None:
        """Note that a batch is handed out, and quarantine its bad samples.

        If no sample could replace a bad one, none is quarantined: a missing drive must not use up
        the quarantine's limit.

        Raises:
            LoaderError: H612 if too many samples would be quarantined.
        """
        _, self.position = self._pending.pop(report.number)
        no_sample_could_be_read = report.fatal is not None and report.fatal.index is not None
        if no_sample_could_be_read:
            return
        for failure in report.failures:
            self.quarantine(failure.index, "raised", failure.text)

    def quarantine(self, index: Any, kind: str, evidence: str) -> None:
        """Leave a sample out from now on, and emit an event.

        Raise H612 if the quarantine is full.
        """
        event = self._ledger.add(index, kind, self._epoch, evidence)
        if event is not None:
            self._bad_keys.update(self._ledger.bad(self._epoch))
            self._emit(event)

    def is_finished(self) -> bool:
        """Return whether everything is handed out, as far as that is known before asking."""
        return not self._has_upcoming and not self._pending

    def is_short(self) -> bool:
        """Return whether workers still have unanswered requests."""
        return bool(self._pending)

    def sample_at(self, status: WorkerStatus) -> Any:
        """Return the dataset index of the sample that a worker was reading, or None."""
        pending = self._pending.get(status.number)
        if pending is None or status.place < 0:
            return None
        request, _ = pending
        if status.place >= len(request.candidates):
            return None
        return request.candidates[status.place]
