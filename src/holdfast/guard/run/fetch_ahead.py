"""Notice that a loop fetches batches ahead, which makes its resumes inexact."""

from __future__ import annotations

from holdfast.core.events import run_events
from holdfast.guard.record import RunRecord


class FetchAhead:
    """Reports a loop that requests its second batch before it has used the first.

    Such a loop usually prefetches: it holds one batch that it has not trained on, and a checkpoint
    counts this batch as done. A loop that merely skips its first batch looks the same at this time,
    so this is reported but not refused.

    Args:
        record: The record of the run.
    """

    def __init__(self, record: RunRecord) -> None:
        self._record = record
        self._batch_count = 0
        self._first_was_used = True
        self._is_reported = False

    def begin_loop(self) -> None:
        """Record that a loop begins."""
        self._batch_count = 0
        self._first_was_used = True

    def end_batch(self, *, was_used: bool) -> None:
        """Record that the loop requests its next batch.

        Args:
            was_used: Whether the loop has called ``backward`` or stepped since the last request.
        """
        self._batch_count += 1
        if self._batch_count == 1:
            self._first_was_used = was_used

    def begin_step(self) -> None:
        """Record that the loop steps, and report it if it has probably fetched ahead."""
        if self._is_reported or self._first_was_used or self._batch_count != 1:
            return
        self._is_reported = True
        self._record.emit(
            run_events.ResumeMayDiffer(
                why="the same weights, but the loop requested its second batch before it had used"
                " the first. If it fetches batches ahead, a resumed run skips the batch that was"
                " fetched but not trained on. Let the loader prefetch instead, with num_workers"
            )
        )
