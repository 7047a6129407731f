"""What is done when a pool of workers is lost.

A new one goes on where the last batch was handed out.

Which remedy, when it happens again at the same place:

a sample that kills or blocks its worker twice, while other workers do well
    it is quarantined
workers that are new after a loss
    each reads another sample first
all workers are blocked (a lock that was held at the fork)
    none are used
file descriptors run out
    tensors are shared through files
memory or shared memory runs out, or workers die and no sample is to blame
    half as many workers, at last none
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Generator
from typing import Any

from holdfast.core.errors import LoaderError
from holdfast.core.events import run_events
from holdfast.core.events.event import EventData
from holdfast.loader.quarantine import key_of, plain
from holdfast.loader.workers.board import Showing
from holdfast.loader.workers.fetch import Report
from holdfast.loader.workers.map_source import Source
from holdfast.loader.workers.pool import WorkerPool, WorkerSettings, WorkersLostError
from holdfast.loader.workers.watch import Loss

_LIMIT_SECONDS = 60.0
"""Least time at one sample after which a worker is called stuck.

The watchdog's floor of 30 s, doubled since a sample
may lie on a cold network drive. It is doubled again each time that the same place is stuck.
"""
_STRIKES = 2
_CONTROLS = 3
"""So many pools have to be blocked at different samples; one may have met a bad sample by chance.
"""


class WorkerRecovery:
    """Hands out the batches of a source, whatever happens to the workers."""

    def __init__(self, settings: WorkerSettings, emit: Callable[[EventData], None]) -> None:
        self.settings = settings
        self._emit = emit
        self._kept: WorkerPool | None = None
        self._strikes: dict[Any, int] = {}
        self._in_a_row = 0  # losses since a batch was handed out
        self._suspected: Any = None  # the sample that a worker was at in the last loss
        self._stuck_in_a_row = 0
        self._longest = 0.0
        self._asked_at = 0.0

    def batches(self, source: Source) -> Generator[tuple[Any, Report]]:
        """Yield the batches of a source with their reports."""
        pool = self._take_kept() or self._start(source)
        begun = again = False
        self._in_a_row = self._stuck_in_a_row = 0
        try:
            while True:
                loss: Loss | None = None
                try:
                    if not begun:
                        pool.begin(source.entries(again=again, suspect=self._suspected))
                        begun = True
                    if source.is_finished():
                        return
                    self._asked_at = time.monotonic()
                    batch, report = pool.next()
                    report = source.complete(report)
                except StopIteration:
                    if not source.is_short():
                        return
                    loss = Loss(cause="the workers ended before the epoch did", kind="machinery")
                except WorkersLostError as error:
                    loss = error.loss
                else:
                    if report.shortage is not None:
                        cause = f"a worker ran out of {report.shortage}"
                        loss = Loss(cause=cause, kind="machinery", shortage=report.shortage)
                if loss is not None:
                    pool = self._replace(pool, loss, source)
                    begun, again = False, True
                    continue
                self._note(report)
                source.delivered(report)
                if report.number >= 0:  # else a worker of a stream has passed its turn
                    yield batch, report
        finally:
            self._leave(pool)

    def _note(self, report: Report) -> None:
        """Note that a batch, or an error in the place of one, has arrived."""
        self._in_a_row = self._stuck_in_a_row = 0
        if self.settings.timeout_seconds:  # one that was too short for this batch is so for others
            self.settings.timeout_seconds = max(self.settings.timeout_seconds, 2 * report.seconds)
        if report.fatal is None and self._strikes:
            for index in report.indices or ():
                self._strikes.pop(key_of(index), None)  # it could be read after all

    def _start(self, source: Source) -> WorkerPool:
        doubled = 2**self._stuck_in_a_row
        return WorkerPool(
            source.dataset,
            self.settings,
            limit_seconds=max(_LIMIT_SECONDS, 8 * self._longest) * doubled,
            timeout_seconds=self.settings.timeout_seconds * doubled,
        )

    def _take_kept(self) -> WorkerPool | None:
        kept, self._kept = self._kept, None
        return kept

    def _leave(self, pool: WorkerPool) -> None:
        self._longest = max(self._longest, pool.longest_seconds)
        if self.settings.keep and self._kept is None and pool.can_go_on:
            self._kept = pool
        else:
            pool.close()

    def close(self) -> None:
        """End workers that were kept."""
        kept = self._take_kept()
        if kept is not None:
            kept.close()

    def _replace(self, lost: WorkerPool, loss: Loss, source: Source) -> WorkerPool:
        """Kill what is left of a pool, decide what has to change, and start the next."""
        # What training took until it asked is no part of it
        noticed = max(lost.lost_at or 0.0, self._asked_at)
        self._longest = max(self._longest, lost.longest_seconds)
        lost.abandon()
        self._in_a_row += 1
        self._stuck_in_a_row += loss.kind == "hung" or loss.waited
        before = self.settings.workers
        if before == 0:
            raise _no_way_on(f"no batch can be made even without workers: {loss.cause}")
        index = None if loss.showing is None else source.sample_at(loss.showing)
        self._suspected = index
        remedy = self._decide(loss, index, source)
        if source.needs_all_workers and self.settings.workers != before:
            raise _no_way_on(
                f"{loss.cause}, {self._in_a_row} times in a row, and a dataset that divides its"
                f" items among workers itself needs all {before}"
            )
        pool = self._start(source)
        event = run_events.LoaderHealed(
            cause=loss.cause,
            sample=None if index is None else plain(index),
            remedy=remedy,
            workers_before=before,
            workers=self.settings.workers,
            seconds=round(time.monotonic() - noticed, 4),
        )
        self._emit(event)
        return pool

    def _decide(self, loss: Loss, index: Any, source: Source) -> str:
        """Change the settings as the loss demands; return the remedy in words."""
        settings, repeated = self.settings, self._in_a_row > 1
        if loss.shortage == "file descriptors" and not settings.share_by_file:
            settings.share_by_file = True
            self._raise_limit_of_descriptors()
            return "tensors are shared through files from now on"
        at_sample = index is not None and loss.kind in {"died", "hung"}
        if loss.shortage is not None and not at_sample:
            return self._fewer()
        if "Pin memory" in loss.cause and repeated:
            settings.options = {**settings.options, "pin_memory": False}
            return "memory is no longer pinned"
        if at_sample:
            return self._suspect(loss, index, source, repeated=repeated)
        if loss.kind == "hung" and repeated and loss.showing is not None:
            return self._blocked(loss, loss.showing)
        if not repeated:
            return "new workers"
        at_work = loss.kind == "died" and loss.showing is not None and loss.showing.is_at_work
        if settings.workers == 1 and at_work and not loss.from_outside:
            raise _no_way_on(
                f"{loss.cause}, {self._in_a_row} times at the same place, which would end this"
                " process too"
            )
        return self._fewer()

    def _raise_limit_of_descriptors(self) -> None:
        """Let this process open as many files as it may, and say so.

        It stays that way after the loader.
        """
        before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if before != most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            why = "workers had run out of file descriptors"
            self._emit(run_events.DescriptorLimitRaised(before=before, now=most, why=why))

    def _blocked(self, loss: Loss, showing: Showing) -> str:
        if not showing.is_starting:
            raise _no_way_on(
                f"the workers were stuck at batch {showing.number} {self._in_a_row} times:"
                f" {loss.cause}"
            )
        self.settings.workers = 0
        unset = (
            ""
            if self.settings.options.get("worker_init_fn") is None
            else "; worker_init_fn is not called then"
        )
        return (
            "no workers from now on: they are blocked from the start, as by a lock that was held"
            f" at the fork{unset}"
        )

    def _suspect(self, loss: Loss, index: Any, source: Source, *, repeated: bool) -> str:
        """Decide about a loss in which a worker was at a sample."""
        key = key_of(index)
        again = key in self._strikes
        strikes = self._strikes.setdefault(key, 0)
        has_worked = loss.showing is not None and loss.showing.has_worked
        # Workers that start after a loss read another sample first
        if loss.others_fine or (again and has_worked):
            self._strikes[key] = strikes + 1
            if strikes + 1 >= _STRIKES:
                del self._strikes[key]
                self._in_a_row = 0
                source.quarantine(
                    index, "hung" if loss.kind == "hung" else "killed its worker", loss.cause
                )
                return "the sample is quarantined"
            if loss.shortage is not None:
                # Never none: the sample would do to this process what it did to them
                return self._fewer(least=1)
            return "new workers; the sample is tried again"
        if loss.shortage is not None:
            return self._fewer(least=0 if again else 1)
        if not repeated:
            return "new workers"
        if loss.kind == "hung":
            if self._in_a_row < _CONTROLS:
                return "new workers"
            self.settings.workers = 0
            return (
                "no workers from now on: all of them are blocked, as by a lock that was held at the"
                " fork"
            )
        return self._fewer()

    def _fewer(self, least: int = 0) -> str:
        self.settings.workers = max(least, self.settings.workers // 2)
        return f"{self.settings.workers} workers from now on"


def _no_way_on(what: str) -> LoaderError:
    return LoaderError(
        what,
        limit="no remedy is left",
        fix="look at the events loader_healed before it: they name each cause and what was tried.",
        rule="H614",
    )
