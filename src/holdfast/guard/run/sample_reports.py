"""Report the samples that caused NaN or Inf, and quarantine them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.core.errors import LoaderError
from holdfast.core.events import run_events
from holdfast.guard.cursor import Cursor
from holdfast.guard.handed_out import HandedOut
from holdfast.guard.record import RunRecord
from holdfast.guard.result import Outcome, Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMark:
    """The position of a batch in the data, and the loader's batch from which it was made."""

    # Fields of an event. Empty if the guard has no loader.
    position: dict[str, Any]
    handed_out: HandedOut | None


class SampleReports:
    """Records which samples caused NaN or Inf.

    Args:
        record: The recording that receives the events.
        cursor: The cursor over the guard's loader, which provides the dataset indices of samples.
            None if the guard has no loader.
    """

    def __init__(self, record: RunRecord, cursor: Cursor | None) -> None:
        self._record = record
        self._cursor = cursor
        # The batch that reports are about. None means the loop's current batch.
        self._mark: BatchMark | None = None

    def mark(self) -> BatchMark:
        """Return the mark of the loop's current batch."""
        handed_out = None if self._cursor is None else self._cursor.handed_out
        return BatchMark(position=self.position(), handed_out=handed_out)

    @contextlib.contextmanager
    def about(self, mark: BatchMark) -> Iterator[None]:
        """Make reports inside the context refer to an earlier batch.

        Args:
            mark: The value that `mark` returned for that batch.
        """
        self._mark = mark
        try:
            yield
        finally:
            self._mark = None

    def report_origin(self, provenance: Provenance, indices: Sequence[int] | None) -> str:
        """Record where NaN or Inf came from, and return a message about the origin.

        Args:
            provenance: The result of replaying the step to find the origin.
            indices: The dataset index of each sample in the batch, or None if unknown.
        """
        rank = f"{provenance.where}: " if provenance.where else ""
        if provenance.origin is None:
            self._record.emit(run_events.NonfiniteNotTraced(why=rank + provenance.problem))
            if rank:
                return rank + provenance.problem
            return f"its origin is unknown: {provenance.problem}"

        samples = provenance.samples
        bad_indices = _at_places(indices, samples)
        self._record.emit(
            run_events.NonfiniteOrigin(
                origin=asdict(provenance.origin), bad_samples=samples, dataset_indices=bad_indices
            )
        )
        message = f"{rank}{provenance.origin}"
        if samples:
            in_dataset = ""
            if bad_indices is not None:
                in_dataset = f" (dataset index {_listed(bad_indices)})"
            message += f"; without sample {_listed(samples)} of the batch{in_dataset} it is finite"
        return message

    def report_dropped_samples(self, outcome: Outcome, batch: Any) -> None:
        """Record that the samples that caused NaN or Inf were left out, and quarantine them.

        Args:
            outcome: The outcome of the step, which includes the provenance.
            batch: The batch passed to the step.
        """
        provenance = outcome.provenance
        assert provenance is not None
        indices = self.dataset_indices(outcome, batch)
        reason = self.report_origin(provenance, indices)
        self._record.emit(run_events.SamplesDropped(reason=reason, **self.position()))
        cursor = self._cursor
        bad_indices = _at_places(indices, provenance.samples)
        if cursor is not None and bad_indices is not None:
            try:
                cursor.quarantine(bad_indices, reason)
            except LoaderError as error:
                # The step is not affected. Samples that could not be quarantined are left out again
                # the next time the loader yields them.
                self._record.emit(run_events.QuarantineFull(error=error.what))

    def report_dropped_micro_batches(self, outcome: Outcome, batch: Any) -> None:
        """Record that micro-batches whose loss was NaN or Inf were left out of a step."""
        ranges = outcome.attempt.dropped
        indices = self.dataset_indices(outcome, batch)
        if indices is not None:
            # The samples in `outcome.dropped` were removed before the attempt, so the ranges of
            # dropped micro-batches count only the remaining samples.
            indices = [index for place, index in enumerate(indices) if place not in outcome.dropped]
        places = [place for start, end in ranges for place in range(start, end)]
        self._record.emit(
            run_events.MicroBatchDropped(
                samples=tuple(ranges),
                dataset_indices=_at_places(indices, places),
                **self.position(),
            )
        )

    def dataset_indices(self, outcome: Outcome, batch: Any) -> list[int] | None:
        """Return the dataset index of each sample in the step's batch, or None if unknown.

        Args:
            outcome: The outcome of the step.
            batch: The batch passed to the step.
        """
        if self._cursor is None:
            return None
        # `outcome.size` is the batch size of the last attempt. Add the samples that were removed
        # from the batch before it.
        size = None if outcome.size is None else outcome.size + len(outcome.dropped)
        if self._mark is None:
            return self._cursor.sample_indices(batch, size)
        if self._mark.handed_out is None:
            return None
        return self._mark.handed_out.indices_of(batch, size)

    def position(self) -> dict[str, Any]:
        """Return the epoch and the batch number as fields for an event."""
        if self._mark is not None:
            return self._mark.position
        cursor = self._cursor
        return {} if cursor is None else {"epoch": cursor.epoch, "batch": cursor.batches}


def _at_places(indices: Sequence[int] | None, places: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dataset indices of the samples at these positions, or None if unknown."""
    return None if indices is None else tuple(indices[place] for place in places)


def _listed(numbers: Sequence[int]) -> str:
    """Return up to five numbers as text, such as "3, 8", with an ellipsis if there are more."""
    text = ", ".join(map(str, numbers[:5]))
    if len(numbers) > 5:
        text += ", ..."
    return text
