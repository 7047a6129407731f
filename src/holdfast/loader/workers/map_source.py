"""The interface of a source of batches, and its implementation for map-style datasets.

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
    """The interface through which `WorkerRecovery` gets the remaining batches of an epoch.

    The default methods suit sources whose samples are not known in advance, such as streams.
    """

    # Whether the number of workers must not change, because the order of samples depends on it.
    needs_all_workers = False

    def dataset(self, board: Board | None) -> Any:
        """Return a dataset whose items are the remaining batches with their reports.

        Args:
            board: The board on which workers show their progress, or None in the main process.
        """
        raise NotImplementedError

    def requests(self, *, after_loss: bool, suspect: Any = None) -> Iterator[Any]:
        """Yield requests for the batches that have not been returned yet.

        Args:
            after_loss: Whether workers were lost since the last call.
            suspect: Dataset index of the sample that a lost worker was reading, or None.
        """
        del after_loss, suspect
        return iter(())

    def complete(self, report: BatchReport) -> BatchReport:
        """Fill in the fields of a report that a worker does not send, and return the report."""
        return report

    def delivered(self, report: BatchReport) -> None:
        """Record that a batch, or an error in its place, is returned to the training loop."""
        raise NotImplementedError

    def is_finished(self) -> bool:
        """Return whether the source knows that all batches have been returned."""
        return False

    def is_short(self) -> bool:
        """Return whether batches are missing although all workers have finished."""
        return False

    def sample_at(self, status: WorkerStatus) -> Any:
        """Return the dataset index of the sample that a worker was reading.

        Returns None if the worker was not reading a sample, or if the source cannot skip samples.

        Args:
            status: The last status that the worker showed on the board.
        """
        del status

    def quarantine(self, index: Any, kind: str, evidence: str) -> None:
        """Quarantine a sample, which is skipped from now on.

        Args:
            index: Dataset index of the sample.
            kind: See `Quarantined`.
            evidence: See `Quarantined`.
        """


class MapSource(BatchSource):
    """The source of the remaining batches of an epoch, for a map-style dataset.

    Args:
        batches: Groups the samples into batches.
        epoch: Number of the epoch.
        start: Position from which the epoch continues.
        ledger: The quarantined samples.
        make_fetcher: Given the board, returns the dataset for the workers.
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
        # Position after the last batch returned to the loop.
        self.position = start
        self._make_fetcher = make_fetcher
        self._epoch = epoch
        self._ledger = ledger
        self._emit = emit
        # Keys of the quarantined samples. The iterator below refers to this set, so the set must be
        # updated in place.
        self._bad_keys = ledger.bad(epoch)
        self._upcoming = batches.requests(epoch, start, self._bad_keys)
        self._has_upcoming = True
        # Requests for which no batch has been returned yet, by number, each with the position after
        # its batch.
        self._pending: dict[int, tuple[BatchRequest, int]] = {}
        self._losses = 0

    def dataset(self, board: Board | None) -> Fetcher:
        """Return a dataset whose indices are requests and whose items are batches with reports."""
        return self._make_fetcher(board)

    def requests(self, *, after_loss: bool, suspect: Any = None) -> Iterator[BatchRequest]:
        """Yield requests for the remaining batches, beginning with those that are still pending.

        After a loss, each pending request is given a control sample (see `BatchRequest`).
        """
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
        """Return the place of a control sample among the candidates of a request.

        The control sample is neither known to be bad nor suspected, and a different one is chosen
        after each loss. Returns None if there is no such sample.
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
        """Fill in the dataset indices of a report's batch, and return the report.

        A worker only sends the indices if they differ from those in the request.
        """
        if report.indices is not None:
            return report
        request, _ = self._pending[report.number]
        return report._replace(indices=request.indices)

    def delivered(self, report: BatchReport) -> None:
        """Record that a batch is returned to the training loop, and quarantine its bad samples.

        If no replacement for a bad sample could be found, no sample is quarantined. Otherwise, a
        missing drive would fill the quarantine up to its limit.

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
        """Quarantine a sample, which is skipped from now on, and emit an event.

        Raises:
            LoaderError: H612 if the quarantine is full.
        """
        event = self._ledger.add(index, kind, self._epoch, evidence)
        if event is not None:
            self._bad_keys.update(self._ledger.bad(self._epoch))
            self._emit(event)

    def is_finished(self) -> bool:
        """Return whether the source knows that all batches have been returned."""
        return not self._has_upcoming and not self._pending

    def is_short(self) -> bool:
        """Return whether there are requests for which no batch has been returned."""
        return bool(self._pending)

    def sample_at(self, status: WorkerStatus) -> Any:
        """Return the dataset index of the sample that a worker was reading, or None."""
        # A negative place does not refer to a sample.
        pending = self._pending.get(status.number)
        if pending is None or status.place < 0:
            return None
        request, _ = pending
        if status.place >= len(request.candidates):
            return None
        return request.candidates[status.place]
