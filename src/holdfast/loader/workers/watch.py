"""The watch over one pool of workers.

It finds who died, was stopped or is stuck, and kills what is stuck.

So whatever goes wrong with a worker arrives as one thing, its death, and the loop that waits for a
batch needs no timeouts. Time is counted in ticks of this watch, so a suspended machine or container
ages nobody.
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
from holdfast.loader.workers.board import PREPARING, Board, Showing
from holdfast.loader.workers.processes import (
    WorkerLostError,
    exit_code,
    how_it_ended,
    kill,
    oom_kills,
    strike,
    wake_main_thread,
    wake_on_loss,
)
from holdfast.recorder.run_files import process_is_stopped

_TICK_SECONDS = 0.25
_CALL_SECONDS = 0.01
_LONGEST_FACTOR = 8.0
"""A worker is stuck after so many times the longest that any sample has taken."""
_START_FACTOR = 10.0
"""So many limits long a worker may start.

Imports, and what the user does in it, take as long as they do.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Why a pool of workers has to be replaced.

    Args:
        cause: In words.
        kind: ``"died"``, ``"stopped"``, ``"hung"``, ``"machinery"``.
        worker: Which one, if it was one.
        showing: What it was doing.
        others_fine: Whether other workers were doing well, so that the sample is suspect; None if
            there were none.
        shortage: What the machine was short of, if it was.
        waited: Whether a limit of time was passed, which may have been too short.
        from_outside: Whether it was killed by a signal that others send.
    """

    cause: str
    kind: str
    worker: int | None = None
    showing: Showing | None = None
    others_fine: bool | None = None
    shortage: str | None = None
    waited: bool = False
    from_outside: bool = False


class Watch:
    """Watches workers from a thread of its own.

    A context in which a loss interrupts what the main thread waits for.

    A worker that has been at one thing for `limit_seconds` is stuck; that is raised to eight times
    the longest that one took so far. Its start, and the user's ``worker_init_fn``, may take ten
    times so long, or ten times `timeout_seconds` if that is less: a lock that was held at the fork
    blocks it for ever. The loop may wait `timeout_seconds` for a batch, the start of a worker that
    is not stuck apart; 0 for no limit. One that exits with code 0 has done its work if it
    `may_end`.
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
        self._limit = limit_seconds
        self._timeout = timeout_seconds
        self._may_end = may_end
        self._ended = threading.Event()
        self._oom_kills = oom_kills()
        self._stuck = [0.0] * len(processes)
        self._last = [board.look(worker) for worker in range(len(processes))]
        self._stopped: set[int] = set()
        self._waits = self._last_wait = 0  # how many there were
        self._waited = 0.0
        self._quiet = 0.0
        self._loss: Loss | None = None
        self.lost_at = 0.0
        self.waiter = 0  # the thread that is inside
        self.called = False
        self.lost = False
        self.longest_seconds = 0.0
        wake_on_loss(self)
        start_thread(threading.Thread(target=self._run, daemon=True, name="holdfast-loader-watch"))

    def end(self, *, kills: bool = False) -> None:
        """Stop watching, and maybe kill these workers, if they are this process's.

        What happens is meant.
        """
        self._ended.set()
        if kills and self._parent == os.getpid():
            kill(self._processes)

    def __enter__(self) -> None:
        """Let a loss interrupt what the main thread waits for inside, with a `WorkerLostError`."""
        self._waits += 1
        self.waiter = threading.get_ident()
        if self.lost:
            self.waiter = 0
            raise WorkerLostError

    def __exit__(self, *error: object) -> None:
        """Interrupt nothing any more."""
        self.waiter = 0

    def loss(self, patience_seconds: float = 0.0) -> Loss:
        """Return why the workers were lost.

        Called once they are, it waits so long for a death, if none is known.
        """
        found = self._loss
        if found is None:  # torch has noticed it before us
            sentinels = {process.sentinel: worker for worker, process in enumerate(self._processes)}
            dead = wait(list(sentinels), timeout=patience_seconds)
            found = self._loss  # what was found meanwhile, and killed, says more
            if found is None and not dead:
                return Loss(cause="the connection to the workers broke", kind="machinery")
            if found is None:
                return self._death(sentinels[dead[0]])
        if found.kind == "died" and found.worker is not None:
            return self._death(found.worker)
        return found

    def _death(self, worker: int) -> Loss:
        process = self._processes[worker]
        how = how_it_ended(process, self._oom_kills)
        others = [
            self._board.look(number) for number in range(len(self._processes)) if number != worker
        ]
        showing = self._board.look(worker)
        fine = (
            any(each.has_worked for each in (*others, showing))
            if others or showing.has_worked
            else None
        )
        shortage = (
            "shared memory" if "SIGBUS" in how else "memory" if "out of memory" in how else None
        )
        return Loss(
            cause=f"worker {worker} {how}",
            kind="died",
            worker=worker,
            showing=showing,
            others_fine=fine,
            shortage=shortage,
            from_outside=exit_code(process) in (-signal.SIGKILL, -signal.SIGTERM),
        )

    # --- in the thread

    def _run(self) -> None:
        sentinels = {process.sentinel: worker for worker, process in enumerate(self._processes)}
        before = time.monotonic()
        while not self._ended.is_set():
            ready = wait(list(sentinels), timeout=_TICK_SECONDS)
            now = time.monotonic()
            passed, before = min(now - before, 2 * _TICK_SECONDS), now
            if self._ended.is_set():
                return
            dead = [sentinels.pop(sentinel) for sentinel in ready]
            lost = [
                worker
                for worker in dead
                if not (self._may_end and exit_code(self._processes[worker]) == 0)
            ]
            found = Loss(cause="", kind="died", worker=lost[0]) if lost else self._look(passed)
            if found is not None:
                self._lose(found)
                return

    def _lose(self, loss: Loss) -> None:
        self._loss = loss
        self.lost_at = time.monotonic()
        self.lost = True
        if loss.worker is not None and loss.kind != "died":
            strike(self._processes[loss.worker])
        unheard = 0.0
        while not self._ended.wait(_CALL_SECONDS):
            # An exception in a destructor that happens to run is lost, so call again while nobody
            # comes out.
            unheard = unheard + _CALL_SECONDS if self.waiter and self.called else 0.0
            if unheard > _TICK_SECONDS:
                self.called = False
            if self.waiter == threading.main_thread().ident and not self.called:
                wake_main_thread()

    def _look(self, passed: float) -> Loss | None:
        moved = starts = False
        for worker in range(len(self._processes)):
            showing = self._board.look(worker)
            starts |= showing.is_starting
            if showing == self._last[worker]:
                self._stuck[worker] += passed
            else:
                # Else it was the loop, or the start, that took its time
                if self._last[worker].is_at_work:
                    self.longest_seconds = max(self.longest_seconds, self._stuck[worker])
                self._stuck[worker], self._last[worker], moved = 0.0, showing, True
        limit = max(self._limit, _LONGEST_FACTOR * self.longest_seconds)
        # For the same batch as at the last look
        waits_on = bool(self.waiter) and self._waits == self._last_wait
        self._last_wait = self._waits
        starts &= not any(showing.is_at_work for showing in self._last)
        self._waited = self._waited + passed * (not starts) if waits_on else 0.0
        self._quiet = self._quiet + passed if waits_on and not moved else 0.0
        return self._find_stopped() or self._find_stuck(limit) or self._find_late(limit)

    def _find_stopped(self) -> Loss | None:
        stopped = {
            worker for worker, each in enumerate(self._processes) if process_is_stopped(each.pid)
        }
        # Who stops us all lets us all go on together
        twice, self._stopped = stopped & self._stopped, stopped
        for worker in twice:
            return Loss(cause=f"worker {worker} was stopped", kind="stopped", worker=worker)
        return None

    def _find_stuck(self, limit: float) -> Loss | None:
        longest_start = _START_FACTOR * (min(limit, self._timeout) if self._timeout else limit)
        for worker, showing in enumerate(self._last):
            if showing.is_busy and self._stuck[worker] > (
                longest_start if showing.is_starting else limit
            ):
                return self._stuck_at(worker, f"has been at it for {self._stuck[worker]:.1f} s")
        return None

    def _find_late(self, limit: float) -> Loss | None:
        if self._timeout and self._waited > self._timeout:
            busy = [worker for worker, showing in enumerate(self._last) if showing.is_busy]
            worker = max(busy, key=lambda each: self._stuck[each], default=None)
            if worker is not None:
                return self._stuck_at(worker, f"kept the loop waiting for {self._timeout:g} s")
            return Loss(
                cause=f"no batch came for {self._timeout:g} s", kind="machinery", waited=True
            )
        if self._quiet > limit and not any(showing.is_busy for showing in self._last):
            cause = f"no worker was busy for {limit:.1f} s, and no batch came"
            return Loss(cause=cause, kind="machinery", waited=True)
        return None

    def _stuck_at(self, worker: int, how_long: str) -> Loss:
        showing = self._last[worker]
        others = [number for number in range(len(self._processes)) if number != worker]
        half = self._stuck[worker] / 2
        fine = [
            self._last[each].has_worked
            and (not self._last[each].is_busy or self._stuck[each] < half)
            for each in others
        ]
        where = "starting" if showing.is_starting else "at work"
        where = "in worker_init_fn" if showing.offset == PREPARING else where
        return Loss(
            cause=f"worker {worker}, {where}, {how_long}",
            kind="hung",
            worker=worker,
            showing=showing,
            others_fine=any(fine) if others else None,
        )
