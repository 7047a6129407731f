"""Notice that training stands still, find out how and where, and say what is to be done.

From outside, without torch.

It polls the boards of the processes that train: what counts is that something moves, not that it
    exists. A hang
is noticed when a phase has stood still for longer than its limit; then stacks are taken twice, a
second apart, and if
nothing moved meanwhile, it is reported. Does not: act on it (``Attempt`` does), or judge stacks
    (``explain.hangs``).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.core.events import process_events
from holdfast.core.events.event import EventData
from holdfast.core.events.process_events import Hang, HangSuspected
from holdfast.explain.hangs.blame import (
    SIGNATURES_OF,
    Diagnosis,
    Remedy,
    describe_frame,
    diagnose_hang,
)
from holdfast.explain.hangs.evidence import Examined
from holdfast.recorder.progress import Phase
from holdfast.recorder.run_files import STACKS_SIGNAL
from holdfast.supervise.process_tree import Process, descendants, read_process, read_table
from holdfast.supervise.watch.limits import HangLimits
from holdfast.supervise.watch.stacks import Stacks, Subject, Taken
from holdfast.supervise.watch.watched import Watched, WatchedProcesses

_POLL_SECONDS = 0.05  # near a limit: of the 0.2 s from limit to notice
_REST_SECONDS = 0.5  # far from any
_GAP_SECONDS = (
    # Who was not run for so long was suspended, as were the others: a laptop's lid, a paused
    # container
    5.0
)
_WORKER_RECOVERY_SECONDS = 180.0
"""holdfast's own loader replaces a worker that is stuck after a minute, or 8 times the longest
sample so far."""
_MOST_EXAMINED = 64
_MOST_FAILURES = 20


class Watchdog:
    """Watch the processes of one attempt of a run; those of others are passed over.

    From its own thread it calls `emit` with events, `on_hang` with each hang, also one that needs
    nothing but
    patience, and `say` with a line about what is left alone. `clock` is that of the boards:
        monotonic seconds.
    """

    def __init__(
        self,
        run: Path,
        *,
        limits: HangLimits,
        emit: Callable[[EventData], None],
        on_hang: Callable[[Hang], None],
        say: Callable[[str], None] = lambda _: None,
        attempt: int = 0,
        clock: Callable[[], float] = time.monotonic,
        stacks: Stacks | None = None,
    ) -> None:
        self._limits, self._emit, self._on_hang, self._say, self._clock = (
            limits,
            emit,
            on_hang,
            say,
            clock,
        )
        self._stop = threading.Event()
        self._stacks = (
            Stacks(run, pause=lambda seconds: self._stop.wait(seconds))
            if stacks is None
            else stacks
        )
        self._watched = WatchedProcesses(run, attempt, limits)
        self._last_look: float | None = None
        self._said: set[tuple[str, str]] = set()
        self._continued: set[int] = set()
        self._stopped: dict[int, float] = {}

    def run(self, stop: threading.Event) -> None:
        """Watch until the event is set: the body of a thread."""
        self._stop = stop
        failures = 0
        while not stop.wait(self._pause()):
            try:
                self.look(self._clock())
                failures = 0
            except Exception as error:  # noqa: BLE001 - whatever a stranger's process does, the supervisor goes on
                failures += 1
                with suppress(Exception):
                    why = f"{type(error).__name__}: {error}"[:500]
                    self._emit(
                        process_events.WatchingFailed(
                            what="watchdog", error=f"{why}, {failures} times"
                        )
                    )
                if failures >= _MOST_FAILURES:
                    self._say(
                        f"the watchdog has given up, after {failures} failures in a row: {error}"[
                            :300
                        ]
                    )
                    return
                stop.wait(1.0)

    def _pause(self) -> float:
        """Return how long nothing can be overdue, within bounds."""
        now = self._clock()
        return max(
            _POLL_SECONDS,
            min([_REST_SECONDS, *(process.left(now) for process in self._watched.judged)]),
        )

    def look(self, now: float) -> None:
        """Look once at everything, at a time of the clock."""
        if self._last_look is not None and now - self._last_look > _GAP_SECONDS:
            self._emit(process_events.WatchdogSuspended(seconds=round(now - self._last_look, 1)))
            for process in self._watched.alive:
                process.count_from(now)
        self._watched.look(now)
        self._report_stops(now)
        for process in [process for process in self._watched.judged if process.left(now) < 0.0]:
            if self._is_paused(process, now) or self._others_move(process, now):
                continue
            try:
                self._examine(process, now)
            finally:
                self._last_look = self._clock()  # it takes its time, which is no gap
            return  # the others' state has changed; they are looked at again at once
        self._last_look = now

    # --- what is no hang
    # ------------------------------------------------------------------------

    def _report_stops(self, now: float) -> None:
        """Report which of those that train a signal has stopped, and which go on."""
        judged = {process.info.pid: process for process in self._watched.judged}
        for pid, process in judged.items():
            step, since = process.standing.step, process.stopped_since
            if since is not None and now > since and pid not in self._stopped:
                self._stopped[pid] = since
                process.count_from(now)
                about = process_events.ProcessStopped(
                    pid=pid, rank=process.info.rank, step=step, phase=process.phase_name
                )
                self._emit(about)
                self._say(
                    f"process {pid} was stopped by a signal at step {step}; `kill -CONT {pid}` lets"
                    " it go on"
                )
        for pid in [
            pid for pid in self._stopped if pid not in judged or judged[pid].stopped_since is None
        ]:
            seconds = round(now - self._stopped.pop(pid), 1)
            if pid in judged:
                judged[pid].count_from(now)
                step = judged[pid].standing.step
                self._emit(process_events.ProcessContinued(pid=pid, step=step, seconds=seconds))
                self._say(f"process {pid} goes on, after {seconds:g} s")

    def _is_paused(self, process: Watched, now: float) -> bool:
        """Return whether it was stopped itself, by Ctrl-Z or a debugger, or has ended.

        That time is not counted.
        """
        found = read_process(process.info.pid)
        if found is None or found.ticks != process.info.ticks or found.state in "ZX":
            process.alive = False
            return True
        if found.state in "Tt":
            process.count_from(now)
        return found.state in "Tt"

    def _others_move(self, process: Watched, now: float) -> bool:
        """Return whether another rank is within its limit.

        Then this one may well wait for it, in a collective.

        One that a signal has stopped does not move, although its own time is not counted.
        """
        others = [
            each
            for each in self._watched.judged
            if each is not process and each.is_of_same_group(process)
        ]
        return any(other.moves(now) and other.stopped_since is None for other in others)

    # --- a hang
    # ------------------------------------------------------------------------

    def _examine(self, process: Watched, now: float) -> None:
        seconds, limit, progress = process.age(now), process.limit(), process.standing.progress
        suspected = process_events.HangSuspected(
            pid=process.info.pid,
            rank=process.info.rank,
            phase=process.phase_name,
            step=process.standing.step,
            seconds=round(seconds, 3),
            limit=round(limit, 3),
        )
        self._emit(suspected)
        group = [
            each
            for each in self._watched.judged
            if each is process or each.is_of_same_group(process)
        ]
        for each in group:  # what is found is found for all of them
            each.look_again(2.0 * each.age(now))
        taken = self._stacks.take(self._subjects(process, now))
        self._watched.look(self._clock())
        if process.standing.progress != progress:
            self._over(process, taken, "it has moved meanwhile")
        elif not process.alive or all(each.pid != process.info.pid for each in taken.processes):
            self._over(process, taken, "it has ended meanwhile")
        else:
            found = diagnose_hang(
                taken.processes, process.info.pid, gone_ranks=self._watched.gone_ranks(process)
            )
            others = [each for each in self._watched.judged if each is not process]
            if found.kind == "collective" and any(other.moves(self._clock()) for other in others):
                # Ranks that do not say that they are ranks: who waits for a slow one is not stuck.
                self._over(process, taken, "it waits for others, which move")
                return
            hang = self._hang(process, found, taken, suspected)
            for each in group if hang.remedy == "restart" else ():
                each.look_again(math.inf)
            seconds = round(taken.seconds, 3)
            self._emit(
                process_events.Stacks(pid=hang.blamed_pid, files=hang.files, seconds=seconds)
            )
            self._emit(hang)
            self._on_hang(hang)
            if hang.remedy == "wait" and found.moving and process.info.torch is not None:
                self._say_left_alone(hang, starting=process.standing.phase is Phase.STARTING)

    def _over(self, process: Watched, taken: Taken, why: str) -> None:
        self._stacks.forget(taken)
        step = process.standing.step
        self._emit(
            process_events.HangOver(
                pid=process.info.pid, phase=process.phase_name, step=step, why=why
            )
        )

    def _say_left_alone(self, hang: Hang, *, starting: bool) -> None:
        """Say once for each place what computes without progress, and until when it may."""
        if (hang.hang_kind, hang.frame) in self._said:
            return
        self._said.add((hang.hang_kind, hang.frame))
        seems = "seems to loop" if hang.hang_kind == "Python loop" else "computes without progress"
        where = f" at {hang.frame}" if hang.frame else ""
        seconds = self._limits.moving_seconds
        until = f" for {seconds / 60:.3g} min" if seconds < math.inf and not starting else ""
        changes = "" if starting else "; --hang-limit moving=SECONDS changes that"
        self._say(
            f"process {hang.pid} {seems}{where}, for {hang.seconds:.0f} s now; left"
            f" alone{until}{changes}"
        )

    def _hang(
        self, process: Watched, found: Diagnosis, taken: Taken, suspected: HangSuspected
    ) -> Hang:
        about = found.process
        files = [name for each in taken.processes for name in taken.files.get(each.pid, ())]
        return Hang(
            **suspected.facts(),
            hang_kind=found.kind,
            signature=SIGNATURES_OF[found.kind],
            confidence=found.confidence,
            blamed_pid=about.pid,
            blamed_role=about.role,
            frame=describe_frame(found.frame),
            odd_one_out=found.odd_one_out,
            sentence=found.sentence,
            remedy=self._remedy(process, found, suspected.seconds),
            files=tuple(sorted(files, key=lambda name: f"-{about.pid}-" not in name)),
        )

    def _remedy(self, process: Watched, found: Diagnosis, seconds: float) -> Remedy:
        """Choose what costs least.

        To end a run that would have gone on costs more than an hour of waiting.
        """
        pid, phase = found.process.pid, process.standing.phase
        if found.process.last.state == "t" or process.info.torch is None:
            return "wait"  # a debugger holds it; or a program of which nothing is known
        if found.kind == "stopped" and pid not in self._continued:
            self._continued.add(pid)
            return "continue"
        if found.heals and seconds < _WORKER_RECOVERY_SECONDS:
            return "wait"
        if found.moving and (phase is Phase.STARTING or seconds < self._limits.moving_seconds):
            return "wait"
        return "end" if phase is Phase.ENDING else "restart"

    # --- who is looked at
    # ------------------------------------------------------------------------

    def _subjects(self, suspect: Watched, now: float) -> list[Subject]:
        """Return the suspect, the others that train, their workers and whatever else they have
        started.
        """
        table = read_table()
        ours = descendants(table, [os.getpid()])
        seen = {
            process.info.pid: process
            for process in self._watched.alive
            if process.info.pid in ours and table[process.info.pid].ticks == process.info.ticks
        }
        judged = [process.info.pid for process in self._watched.judged if process.info.pid in seen]
        first = [suspect.info.pid] if suspect.info.pid in seen else []
        of_suspect = sorted(descendants(table, first))
        others = sorted(descendants(table, judged)) + [pid for pid in seen if pid not in judged]
        pids = list(dict.fromkeys([*first, *judged, *of_suspect, *others]))[:_MOST_EXAMINED]
        found = [table[pid] for pid in pids if pid in table and table[pid].state not in "ZX"]
        return [
            _subject(each, seen.get(each.pid), now if each.pid in judged else None)
            for each in found
        ]


def _subject(found: Process, seen: Watched | None, judged_at: float | None) -> Subject:
    if seen is None:
        return Subject(about=Examined(pid=found.pid, ppid=found.ppid, role="unobserved"))
    about = Examined(
        pid=found.pid,
        ppid=found.ppid,
        role=seen.info.role,
        rank=seen.info.rank,
        step=seen.standing.step,
        phase="" if judged_at is None else seen.phase_name,
        seconds=0.0 if judged_at is None else seen.age(judged_at),
        judged=judged_at is not None,
    )
    answers = seen.info.stacks_signal == STACKS_SIGNAL
    return Subject(about=about, folder=seen.folder if answers else None, observed=True)
