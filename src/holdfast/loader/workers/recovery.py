"""Yield the batches of an epoch, and replace the workers when they are lost.

`WorkerRecovery` performs all steps:

1. `batches` requests the next batch from the pool. If a worker has died, was stopped or is stuck
   (see `watch`), the pool raises `WorkersLostError`.
2. `_replace` kills the rest of the pool, chooses a remedy (see `remedies`), applies it and starts a
   new pool.
3. The new pool begins with the batches that were not returned yet (`BatchSource.requests`), so the
   loop gets the same batches as without the loss.
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

# Minimum time spent on one sample after which a worker counts as stuck. It is twice the watchdog's
# minimum of 30 s, because a sample may be on a slow network drive. The limit is doubled again each
# time workers get stuck without a batch arriving in between.
_LIMIT_SECONDS = 60.0

# If the timeout is too short for one batch, it is probably too short for others. The timeout is
# therefore raised to at least this multiple of the longest time that a batch has taken.
_TIMEOUT_FACTOR = 2


class WorkerRecovery:
    """Yields the batches of a source, and replaces lost workers.

    Args:
        settings: The settings for the workers. Remedies may change them permanently.
        emit: Called with each event.
    """

    def __init__(self, settings: WorkerSettings, emit: Callable[[EventData], None]) -> None:
        self.settings = settings
        self._emit = emit
        # With ``persistent_workers``, the pool from the last epoch. Otherwise None.
        self._kept_pool: WorkerPool | None = None
        self._suspects = SuspectSamples()
        # Dataset index of the sample that a worker was reading when it was last lost, or None.
        self._last_suspect: Any = None
        # Number of losses since the last batch arrived, and how many of them were hangs or
        # timeouts.
        self._losses_in_a_row = 0
        self._time_losses_in_a_row = 0
        self._longest_sample_seconds = 0.0
        # When the loop requested the current batch, on the monotonic clock.
        self._asked_at = 0.0

    def batches(self, source: BatchSource) -> Generator[tuple[Any, BatchReport]]:
        """Yield the batches of a source with their reports.

        Raises:
            LoaderError: H614 if workers are lost repeatedly and no remedy is left.
        """
        pool = self._take_kept_pool() or self._start_pool(source)
        # Requests to pass to the pool, or None if the pool has already received them.
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
        """Return the next batch with its report, or the loss if the pool's workers are lost.

        At the end of the epoch, None is returned.

        Args:
            pool: The pool.
            source: The source of the batches.
            requests: The requests to pass to the pool, or None if the pool already has them.
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
                return WorkerLoss(
                    cause="the workers exited before the end of the epoch", kind="machinery"
                )
            return None
        except WorkersLostError as error:
            return error.loss
        report = source.complete(report)
        if report.shortage is not None:
            cause = f"a worker ran out of {report.shortage}"
            return WorkerLoss(cause=cause, kind="machinery", shortage=report.shortage)
        return batch, report

    def _note_arrival(self, report: BatchReport) -> None:
        """Record that a batch, or an error in its place, has arrived."""
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
        # The limit takes earlier pools into account, because the new pool's watch does not know how
        # long samples took there.
        limit_seconds = max(_LIMIT_SECONDS, LONGEST_FACTOR * self._longest_sample_seconds)
        # The limits may be too short, so each consecutive hang or timeout doubles them.
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
        """Shut down the workers that were kept from the last epoch."""
        pool = self._take_kept_pool()
        if pool is not None:
            pool.close()

    # --- losses -----------------------------------------------------------------------------------

    def _replace(self, lost_pool: WorkerPool, loss: WorkerLoss, source: BatchSource) -> WorkerPool:
        """Kill the rest of a pool, apply a remedy, and return a new pool.

        Raises:
            LoaderError: H614 if no remedy is left.
        """
        # Workers may be lost while the loop is training. The event only reports how long the loop
        # had to wait.
        noticed_at = max(lost_pool.lost_at or 0.0, self._asked_at)
        self._note_longest_sample(lost_pool)
        lost_pool.abandon()
        workers_before = self.settings.workers
        if workers_before == 0:
            raise no_remedy_left(f"even without workers, no batch can be loaded: {loss.cause}")
        index = None if loss.status is None else source.sample_at(loss.status)
        self._last_suspect = index
        remedy = self.adapt_settings(loss, index, source)
        if source.needs_all_workers and self.settings.workers != workers_before:
            raise no_remedy_left(
                f"{loss.cause}, {self._losses_in_a_row} times in a row, but the dataset divides its"
                f" items among workers itself, so the number of workers must remain"
                f" {workers_before}"
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
        """Choose a remedy for a loss, apply it, and return it.

        Args:
            loss: The loss.
            index: Dataset index of the sample that the lost worker was reading, or None.
            source: The source of the batches, in which a sample may be quarantined.

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
        """Permanently raise this process's limit on open files to the maximum allowed."""
        soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft_limit == hard_limit:
            return
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        event = run_events.DescriptorLimitRaised(
            before=soft_limit, now=hard_limit, why="workers ran out of file descriptors"
        )
        self._emit(event)
