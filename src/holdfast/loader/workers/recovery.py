"""Hand out the batches of an epoch, and replace the workers when they are lost.

The steps, all in `WorkerRecovery`:

1. `batches` asks the pool for the next batch. A worker that has died, was stopped or is stuck (see
   `watch`) shows here as `WorkersLostError`.
2. `_replace` kills the rest of the pool, chooses a remedy (`remedies`), carries it out and starts a
   new pool.
3. The new pool begins with the batches that were not handed out yet (`BatchSource.requests`), so
   the loop gets the same batches as without the loss.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Generator, Iterator
from typing import Any

from holdfast.core.events import run_events
from holdfast.core.events.data import EventData
from holdfast.loader.quarantine import plain
from holdfast.loader.workers.map_source import BatchSource
from holdfast.loader.workers.pool import WorkerPool, WorkerSettings, WorkersLostError
from holdfast.loader.workers.remedies import (
    LossCase,
    SuspectSamples,
    WorkerRemedy,
    choose_remedy,
    no_remedy_left,
)
from holdfast.loader.workers.report import BatchReport
from holdfast.loader.workers.watch import LONGEST_FACTOR, WorkerLoss

# The shortest time at one sample after which a worker counts as stuck. It is the watchdog's minimum
# of 30 s, doubled because a sample may be on a cold network drive. It is doubled again each time
# workers get stuck at the same place.
_LIMIT_SECONDS = 60.0

# If a timeout was too short for one batch, it will be for others: it is raised to this multiple of
# the longest batch.
_TIMEOUT_FACTOR = 2


class WorkerRecovery:
    """Hands out the batches of a source, and replaces lost workers.

    Args:
        settings: How workers are run. Remedies may change them for the rest of the loader's life.
        emit: Called with each event.
    """

    def __init__(self, settings: WorkerSettings, emit: Callable[[EventData], None]) -> None:
        self.settings = settings
        self._emit = emit
        # Workers of the last epoch, with ``persistent_workers``.
        self._kept_pool: WorkerPool | None = None
        self._suspects = SuspectSamples()
        # The sample that a worker was reading in the last loss.
        self._last_suspect: Any = None
        # The number of losses since a batch was last handed out, and how many of them were
        # timeouts.
        self._losses_in_a_row = 0
        self._time_losses_in_a_row = 0
        self._longest_sample_seconds = 0.0
        # When the loop requested the current batch, on the monotonic clock.
        self._asked_at = 0.0

    def batches(self, source: BatchSource) -> Generator[tuple[Any, BatchReport]]:
        """Yield the batches of a source with their reports.

        Raises:
            LoaderError: H614 if workers are lost again and again and no remedy is left.
        """
        pool = self._take_kept_pool() or self._start_pool(source)
        # Passed to each pool once.
        requests: Iterator[Any] | None = source.requests(after_loss=False)
        self._losses_in_a_row = 0
        self._time_losses_in_a_row = 0
        try:
            while True:
                received = self._receive(pool, source, requests)
                requests = None
                if received is None:
                    return
                if isinstance(received, WorkerLoss):
                    pool = self._replace(pool, received, source)
                    requests = source.requests(after_loss=True, suspect=self._last_suspect)
                    continue
                batch, report = received
                self._note_arrival(report)
                source.delivered(report)
                if not report.is_passed_turn:
                    yield batch, report
        finally:
            self._keep_or_close(pool)

    def _receive(
        self, pool: WorkerPool, source: BatchSource, requests: Iterator[Any] | None
    ) -> tuple[Any, BatchReport] | WorkerLoss | None:
        """Return the next batch with its report, or the loss if the pool makes no more batches.

        Returns None at the end of the epoch.

        Args:
            pool: The pool.
            source: Where its batches come from.
            requests: Requests for a pool that has not begun, or None if it has.
        """
        try:
            if requests is not None:
                pool.begin(requests)
            if source.is_finished():
                return None
            self._asked_at = time.monotonic()
            batch, report = pool.next()
        except StopIteration:
            if source.is_short():
                return WorkerLoss(cause="the workers ended before the epoch did", kind="machinery")
            return None
        except WorkersLostError as error:
            return error.loss
        report = source.complete(report)
        if report.shortage is not None:
            cause = f"a worker ran out of {report.shortage}"
            return WorkerLoss(cause=cause, kind="machinery", shortage=report.shortage)
        return batch, report

    def _note_arrival(self, report: BatchReport) -> None:
        """Note that a batch has arrived, or an error in its place."""
        self._losses_in_a_row = 0
        self._time_losses_in_a_row = 0
        if self.settings.timeout_seconds:
            self.settings.timeout_seconds = max(
                self.settings.timeout_seconds, _TIMEOUT_FACTOR * report.seconds
            )
        if report.fatal is None and report.indices is not None:
            self._suspects.clear(report.indices)

    # --- pools ------------------------------------------------------------------------------------

    def _start_pool(self, source: BatchSource) -> WorkerPool:
        # A pool's watch only knows the samples of that pool.
        limit_seconds = max(_LIMIT_SECONDS, LONGEST_FACTOR * self._longest_sample_seconds)
        patience = 2**self._time_losses_in_a_row
        return WorkerPool(
            source.dataset,
            self.settings,
            limit_seconds=limit_seconds * patience,
            timeout_seconds=self.settings.timeout_seconds * patience,
        )

    def _take_kept_pool(self) -> WorkerPool | None:
        pool = self._kept_pool
        self._kept_pool = None
        return pool

    def _keep_or_close(self, pool: WorkerPool) -> None:
        self._note_longest_sample(pool)
        if self.settings.keep and self._kept_pool is None and pool.can_be_kept:
            self._kept_pool = pool
        else:
            pool.close()

    def _note_longest_sample(self, pool: WorkerPool) -> None:
        self._longest_sample_seconds = max(self._longest_sample_seconds, pool.longest_seconds)

    def close(self) -> None:
        """End the workers kept from the last epoch."""
        pool = self._take_kept_pool()
        if pool is not None:
            pool.close()

    # --- losses -----------------------------------------------------------------------------------

    def _replace(self, lost_pool: WorkerPool, loss: WorkerLoss, source: BatchSource) -> WorkerPool:
        """Kill the rest of a pool, carry out a remedy, and return the next pool.

        Raises:
            LoaderError: H614 if no remedy is left.
        """
        # Workers may be lost while the loop is training. Only the time that the loop waits is
        # reported.
        noticed_at = max(lost_pool.lost_at or 0.0, self._asked_at)
        self._note_longest_sample(lost_pool)
        lost_pool.abandon()
        workers_before = self.settings.workers
        if workers_before == 0:
            raise no_remedy_left(f"no batch can be made even without workers: {loss.cause}")
        index = None if loss.status is None else source.sample_at(loss.status)
        self._last_suspect = index
        remedy = self.adapt_settings(loss, index, source)
        if source.needs_all_workers and self.settings.workers != workers_before:
            raise no_remedy_left(
                f"{loss.cause}, {self._losses_in_a_row} times in a row, and a dataset that divides"
                f" its items among workers itself needs all {workers_before} of them"
            )
        pool = self._start_pool(source)
        event = run_events.LoaderHealed(
            cause=loss.cause,
            sample=None if index is None else plain(index),
            remedy=remedy.text,
            workers_before=workers_before,
            workers=self.settings.workers,
            seconds=round(time.monotonic() - noticed_at, 4),
        )
        self._emit(event)
        return pool

    def adapt_settings(self, loss: WorkerLoss, index: Any, source: BatchSource) -> WorkerRemedy:
        """Choose the remedy for a loss and carry it out; return it.

        Args:
            loss: What happened.
            index: Dataset index of the sample that the lost worker was reading, or None.
            source: The source in which the sample is quarantined, if that is the remedy.

        Raises:
            LoaderError: H614 if no remedy is left, H612 if the quarantine is full.
        """
        self._losses_in_a_row += 1
        if loss.kind == "hung" or loss.is_timeout:
            self._time_losses_in_a_row += 1
        suspicion = None
        if index is not None and loss.kind in {"died", "hung"}:
            suspicion = self._suspects.note_loss(index, loss)
        settings = self.settings
        case = LossCase(
            loss=loss,
            suspicion=suspicion,
            losses_in_a_row=self._losses_in_a_row,
            workers=settings.workers,
            share_by_file=settings.share_by_file,
            has_worker_init_fn=settings.options.get("worker_init_fn") is not None,
        )
        remedy = choose_remedy(case)
        if remedy.workers is not None:
            settings.workers = remedy.workers
        if remedy.share_by_file:
            settings.share_by_file = True
            self._raise_limit_of_descriptors()
        if remedy.stop_pinning:
            settings.options = {**settings.options, "pin_memory": False}
        if remedy.quarantine_sample:
            self._suspects.clear((index,))
            self._losses_in_a_row = 0
            kind = "hung" if loss.kind == "hung" else "killed its worker"
            source.quarantine(index, kind, loss.cause)
        return remedy

    def _raise_limit_of_descriptors(self) -> None:
        """Raise this process's limit of open files to the maximum, for the rest of its life."""
        soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft_limit == hard_limit:
            return
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        event = run_events.DescriptorLimitRaised(
            before=soft_limit, now=hard_limit, why="workers ran out of file descriptors"
        )
        self._emit(event)
