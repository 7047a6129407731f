"""Watch a pool of workers, and detect workers that have died, were stopped or are stuck.

A stuck worker is killed. Every failure of a worker therefore ends in the worker's death, and the
training loop that waits for a batch does not need its own timeout. Time is counted in ticks of the
watching thread, so workers do not appear stuck after the machine or container was suspended.
`remedies` determines how to react to a loss.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from holdfast.core.threads import start_thread
from holdfast.loader.workers.board import PREPARING, Board, WorkerStatus
from holdfast.loader.workers.child_signals import (
    WaitInterruptedError,
    wake_main_thread,
    wake_on_loss,
)
from holdfast.loader.workers.ending import (
    exit_code,
    how_it_ended,
    kill,
    kill_with_descendants,
    oom_kills,
)
from holdfast.recorder.run_files import process_is_stopped

# Time between two checks of the workers.
_TICK_SECONDS = 0.25

# After a loss: time between two interruptions of the main thread, which are repeated until the main
# thread stops waiting.
_WAKE_SECONDS = 0.01

# A worker counts as stuck after at least this multiple of the longest time that any sample has
# taken.
LONGEST_FACTOR = 8.0

# Starting a worker may take this multiple of the limit for a sample, because the worker imports
# modules and runs the user's ``worker_init_fn``.
_START_FACTOR = 10.0

# Exit codes of workers that may have been killed by another process or a person.
_SIGNALS_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoss:
    """Why a pool of workers has to be replaced.

    Args:
        cause: The cause, as shown to users.
        kind: ``"died"``, ``"stopped"``, ``"hung"``, or ``"machinery"`` if no single worker failed.
        worker: Number of the worker that failed, or None if no single worker failed.
        status: The status of that worker.
        others_fine: Whether workers were able to read other samples, in which case the current
            sample is suspected. None if unknown, because there were no other workers.
        shortage: The resource that the machine ran out of, or None if this was not the cause.
        is_timeout: Whether the loop waited longer than a time limit, which may be too short.
        from_outside: Whether the worker was killed by a signal that other processes commonly send.
    """

    cause: str
    kind: str
    worker: int | None = None
    status: WorkerStatus | None = None
    others_fine: bool | None = None
    shortage: str | None = None
    is_timeout: bool = False
    from_outside: bool = False


class WorkerWatch:
    """Watches the workers of a pool from a separate thread.

    The watch is a context manager. While the main thread waits for a batch in the ``with`` block,
    the loss of a worker interrupts it.

    Args:
        processes: The worker processes.
        board: The board on which the workers show their progress.
        limit_seconds: Time spent on one sample after which a worker counts as stuck. If a sample
            has taken longer than an eighth of this limit, the limit is raised to eight times that
            time. Starting a worker, including the user's ``worker_init_fn``, may take ten times
            this limit or ten times `timeout_seconds`, whichever is less. (Starting is limited
            because a lock that was held at the time of the fork would block a worker forever.)
        timeout_seconds: How long the loop may wait for a batch, not counting the time that workers
            need to start. 0 for no limit.
        may_end: Whether a worker that exits with code 0 has finished its work and is not lost.
    """

    def __init__(
        self,
        processes: Sequence[Any],
        board: Board,
        *,
        limit_seconds: float,
        timeout_seconds: float,
        may_end: bool = False,
    ) -> None:
        self._processes = processes
        self._parent = os.getpid()
        self._board = board
        self._limit_seconds = limit_seconds
        self._timeout_seconds = timeout_seconds
        self._may_end = may_end
        self._ended = threading.Event()
        self._oom_kills_before = oom_kills()
        # For each worker: its status at the last tick, and how long the status has been the same.
        self._statuses = [board.status_of(worker) for worker in range(len(processes))]
        self._unchanged_seconds = [0.0] * len(processes)
        # Workers that were stopped at the last tick.
        self._stopped: set[int] = set()
        # How many times the loop has begun to wait for a batch, and the number at the last tick.
        self._waits = 0
        self._waits_at_last_tick = 0
        # How long the loop has waited for the current batch, and how long the board has been
        # unchanged during this wait.
        self._waited_seconds = 0.0
        self._quiet_seconds = 0.0
        self._loss: WorkerLoss | None = None
        self.lost = False
        # When the loss was detected, on the monotonic clock.
        self.lost_at = 0.0
        # Identifier of the thread that is in the ``with`` block, or 0 for none.
        self.waiting_thread = 0
        # Whether the waiting thread has already been interrupted. The signal handler sets this.
        self.interrupted = False
        # The longest time that any worker has spent on a single sample.
        self.longest_seconds = 0.0
        wake_on_loss(self)
        start_thread(threading.Thread(target=self._run, daemon=True, name="holdfast-loader-watch"))

    def end(self, *, kills: bool = False) -> None:
        """Stop watching, so that a worker that exits no longer counts as lost.

        Args:
            kills: Whether to also kill the workers, if they were started by this process.
        """
        self._ended.set()
        if kills and self._parent == os.getpid():
            kill(self._processes)

    def __enter__(self) -> None:
        """Begin a wait in which a lost worker raises `WaitInterruptedError` in the main thread.

        If a worker has already been lost, the error is raised immediately.
        """
        self._waits += 1
        self.waiting_thread = threading.get_ident()
        if self.lost:
            self.waiting_thread = 0
            raise WaitInterruptedError

    def __exit__(self, *error: object) -> None:
        """End the wait, after which a lost worker no longer interrupts the main thread."""
        self.waiting_thread = 0

    def loss(self, patience_seconds: float = 0.0) -> WorkerLoss:
        """Return why the workers were lost.

        Args:
            patience_seconds: How long to wait for a worker to die if no loss has been detected yet.
        """
        loss = self._loss
        if loss is None:
            # torch detected the loss before this watch did.
            loss = self._wait_for_death(patience_seconds)
        if loss.kind == "died" and loss.worker is not None:
            return self._describe_death(loss.worker)
        return loss

    def _wait_for_death(self, patience_seconds: float) -> WorkerLoss:
        workers = self._workers_by_sentinel()
        dead = wait(list(workers), timeout=patience_seconds)
        if self._loss is not None:
            # The watching thread has found and killed a stuck worker in the meantime.
            return self._loss
        if not dead:
            return WorkerLoss(cause="the connection to the workers broke", kind="machinery")
        return WorkerLoss(cause="", kind="died", worker=workers[dead[0]])

    def _workers_by_sentinel(self) -> dict[Any, int]:
        return {process.sentinel: worker for worker, process in enumerate(self._processes)}

    def _describe_death(self, worker: int) -> WorkerLoss:
        process = self._processes[worker]
        how = how_it_ended(process, self._oom_kills_before)
        status = self._board.status_of(worker)
        shortage = None
        # The kernel sends SIGBUS if no memory is left for a page of shared memory.
        if "SIGBUS" in how:
            shortage = "shared memory"
        elif "out of memory" in how:
            shortage = "memory"
        return WorkerLoss(
            cause=f"worker {worker} {how}",
            kind="died",
            worker=worker,
            status=status,
            others_fine=self._any_has_worked(worker, status),
            shortage=shortage,
            from_outside=exit_code(process) in _SIGNALS_FROM_OUTSIDE,
        )

    def _any_has_worked(self, dead_worker: int, status: WorkerStatus) -> bool | None:
        """Return whether any worker has read a sample, or None if there is only the dead worker.

        Args:
            dead_worker: Number of the worker that died.
            status: The status of that worker.
        """
        if status.has_worked:
            return True
        others = [
            self._board.status_of(worker)
            for worker in range(len(self._processes))
            if worker != dead_worker
        ]
        if not others:
            return None
        return any(other.has_worked for other in others)

    # --- in the thread of the watch ---------------------------------------------------------------

    def _run(self) -> None:
        workers = self._workers_by_sentinel()
        last_tick = time.monotonic()
        while not self._ended.is_set():
            ready = wait(list(workers), timeout=_TICK_SECONDS)
            now = time.monotonic()
            # If more time has passed, the machine or container was probably suspended.
            passed_seconds = min(now - last_tick, 2 * _TICK_SECONDS)
            last_tick = now
            if self._ended.is_set():
                return
            dead = [workers.pop(sentinel) for sentinel in ready]
            loss = self._first_death(dead) or self._look_at_workers(passed_seconds)
            if loss is not None:
                self._note_loss(loss)
                self._interrupt_until_ended()
                return

    def _first_death(self, dead: list[int]) -> WorkerLoss | None:
        for worker in dead:
            # A worker that has finished its part of a stream is not lost.
            has_done_its_work = self._may_end and exit_code(self._processes[worker]) == 0
            if not has_done_its_work:
                return WorkerLoss(cause="", kind="died", worker=worker)
        return None

    def _note_loss(self, loss: WorkerLoss) -> None:
        """Record a loss, and kill the worker that caused it if it is still alive."""
        self._loss = loss
        self.lost_at = time.monotonic()
        self.lost = True
        if loss.worker is not None and loss.kind != "died":
            kill_with_descendants(self._processes[loss.worker])

    def _interrupt_until_ended(self) -> None:
        """Interrupt the main thread whenever it waits for a batch, until this watch ends.

        The signal handler (see `child_signals`) raises the exception in the main thread.
        """
        unheard_seconds = 0.0
        while not self._ended.wait(_WAKE_SECONDS):
            # Python discards an exception that is raised while a destructor is running. If the
            # thread is still waiting after an interruption, it is therefore interrupted again.
            if self.waiting_thread and self.interrupted:
                unheard_seconds += _WAKE_SECONDS
            else:
                unheard_seconds = 0.0
            if unheard_seconds > _TICK_SECONDS:
                self.interrupted = False
            if self.waiting_thread == threading.main_thread().ident and not self.interrupted:
                wake_main_thread()

    def _look_at_workers(self, passed_seconds: float) -> WorkerLoss | None:
        has_changed = self._update_statuses(passed_seconds)
        self._update_wait(passed_seconds, has_changed=has_changed)
        limit_seconds = max(self._limit_seconds, LONGEST_FACTOR * self.longest_seconds)
        return (
            self._find_stopped_worker()
            or self._find_stuck_worker(limit_seconds)
            or self._find_late_batch()
            or self._find_lost_batch(limit_seconds)
        )

    def _update_statuses(self, passed_seconds: float) -> bool:
        """Read the board, and return whether any status has changed since the last tick."""
        has_changed = False
        for worker, previous in enumerate(self._statuses):
            status = self._board.status_of(worker)
            if status == previous:
                self._unchanged_seconds[worker] += passed_seconds
                continue
            # The time that a worker spends on starting, or on waiting for work, is not counted.
            if previous.is_at_work:
                self.longest_seconds = max(self.longest_seconds, self._unchanged_seconds[worker])
            self._unchanged_seconds[worker] = 0.0
            self._statuses[worker] = status
            has_changed = True
        return has_changed

    def _update_wait(self, passed_seconds: float, *, has_changed: bool) -> None:
        """Update how long the loop has waited for the current batch."""
        waits_for_same_batch = bool(self.waiting_thread) and self._waits == self._waits_at_last_tick
        self._waits_at_last_tick = self._waits
        if not waits_for_same_batch:
            self._waited_seconds = 0.0
            self._quiet_seconds = 0.0
            return
        # While workers start, the loop's waiting time does not count, unless some workers are
        # already making batches.
        waits_for_start = any(status.is_starting for status in self._statuses) and not any(
            status.is_at_work for status in self._statuses
        )
        if not waits_for_start:
            self._waited_seconds += passed_seconds
        self._quiet_seconds += passed_seconds
        if has_changed:
            self._quiet_seconds = 0.0

    def _find_stopped_worker(self) -> WorkerLoss | None:
        """Return a loss if a worker was stopped both at this tick and at the last one.

        A single observation is not enough. If all processes of a job were stopped and are then
        continued, this process may run again slightly earlier than its workers.
        """
        stopped_before = self._stopped
        self._stopped = {
            worker
            for worker, process in enumerate(self._processes)
            if process_is_stopped(process.pid)
        }
        for worker in self._stopped & stopped_before:
            return WorkerLoss(cause=f"worker {worker} was stopped", kind="stopped", worker=worker)
        return None

    def _find_stuck_worker(self, limit_seconds: float) -> WorkerLoss | None:
        """Return a loss if a worker has spent too long on one sample or on starting."""
        start_limit_seconds = _START_FACTOR * limit_seconds
        if self._timeout_seconds:
            start_limit_seconds = _START_FACTOR * min(limit_seconds, self._timeout_seconds)
        for worker, status in enumerate(self._statuses):
            if not status.is_busy:
                continue
            seconds = self._unchanged_seconds[worker]
            allowed_seconds = start_limit_seconds if status.is_starting else limit_seconds
            if seconds > allowed_seconds:
                return self._hang_of(worker, f"made no progress for {seconds:.1f} s")
        return None

    def _find_late_batch(self) -> WorkerLoss | None:
        """Return a loss if the loop has waited for a batch for longer than the timeout."""
        if not self._timeout_seconds or self._waited_seconds <= self._timeout_seconds:
            return None
        busy = [worker for worker, status in enumerate(self._statuses) if status.is_busy]
        if not busy:
            cause = f"no batch arrived within {self._timeout_seconds:g} s"
            return WorkerLoss(cause=cause, kind="machinery", is_timeout=True)
        slowest = max(busy, key=lambda worker: self._unchanged_seconds[worker])
        return self._hang_of(slowest, f"kept the loop waiting for {self._timeout_seconds:g} s")

    def _find_lost_batch(self, limit_seconds: float) -> WorkerLoss | None:
        """Return a loss if the loop is waiting for a batch, but no worker is making one."""
        if self._quiet_seconds <= limit_seconds:
            return None
        if any(status.is_busy for status in self._statuses):
            return None
        cause = f"no batch arrived, and no worker was busy for {limit_seconds:.1f} s"
        return WorkerLoss(cause=cause, kind="machinery", is_timeout=True)

    def _hang_of(self, worker: int, how_long: str) -> WorkerLoss:
        status = self._statuses[worker]
        where = "at work"
        if status.place == PREPARING:
            where = "in worker_init_fn"
        elif status.is_starting:
            where = "starting"
        return WorkerLoss(
            cause=f"worker {worker} ({where}) {how_long}",
            kind="hung",
            worker=worker,
            status=status,
            others_fine=self._others_make_progress(worker),
        )

    def _others_make_progress(self, stuck_worker: int) -> bool | None:
        """Return whether another worker made progress while this one was stuck.

        Returns None if there is no other worker.

        Args:
            stuck_worker: Number of the stuck worker.
        """
        others = [worker for worker in range(len(self._processes)) if worker != stuck_worker]
        if not others:
            return None
        # A busy worker that has been unchanged for at least half as long counts as stuck, too.
        half_seconds = self._unchanged_seconds[stuck_worker] / 2
        for worker in others:
            status = self._statuses[worker]
            is_stuck_too = status.is_busy and self._unchanged_seconds[worker] >= half_seconds
            if status.has_worked and not is_stuck_too:
                return True
        return False
