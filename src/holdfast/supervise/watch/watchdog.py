"""Notice that training stands still, find out how and where, and propose what to do.

The watchdog works from outside, without torch. It polls the boards of the processes that train:
what counts is that something moves, not that the process exists. Once a phase has stood still for
longer than its limit, stacks are taken twice, a second apart; if nothing moved meanwhile, a hang is
reported.

Does not: act on a hang (``launch.attempt`` does), or interpret stacks (``explain.hangs`` does).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from holdfast.core.events import process_events
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
from holdfast.supervise.watch.attempt_watch import AttemptWatch
from holdfast.supervise.watch.processes import WatchedProcess, WatchedProcesses
from holdfast.supervise.watch.stacks import StackDump, StackSampler, Subject

# Near a limit: a part of the 0.2 s that may pass between the limit and its notice.
_POLL_SECONDS = 0.05
# Far from any limit.
_REST_SECONDS = 0.5
# If we did not run for this long, the machine or the container was suspended, and the training too.
_SUSPENDED_SECONDS = 5.0
# holdfast's own loader replaces a stuck worker after a minute, or after 8 times the longest sample
# so far.
_WORKER_RECOVERY_SECONDS = 180.0
_MAX_EXAMINED = 64
# After this many errors in a row the watchdog gives up.
_MAX_ERRORS = 20
_ERROR_PAUSE_SECONDS = 1.0
_MAX_ERROR_LENGTH = 500
_MAX_MESSAGE_LENGTH = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class _Examination:
    """A closer look at a process that has exceeded its limit, and what led to it."""

    suspect: WatchedProcess
    suspicion: HangSuspected
    # `Standing.progress` of the suspect before the stacks were taken.
    progress: int
    dump: StackDump

    @property
    def suspect_has_ended(self) -> bool:
        if not self.suspect.is_alive:
            return True
        return all(process.pid != self.suspect.pid for process in self.dump.processes)


class Watchdog:
    """Watch the processes of one attempt, from a thread of its own.

    Args:
        watch: The attempt, and where to report.
        clock: The clock of the boards: monotonic seconds.
        stacks: Takes the stacks; by default into the run directory.
    """

    def __init__(
        self,
        watch: AttemptWatch,
        *,
        clock: Callable[[], float] = time.monotonic,
        stacks: StackSampler | None = None,
    ) -> None:
        self._watch = watch
        self._emit = watch.emit
        self._clock = clock
        self._stop = threading.Event()
        if stacks is None:
            stacks = StackSampler(watch.run_path, pause=lambda seconds: self._stop.wait(seconds))
        self._stacks = stacks
        self._processes = WatchedProcesses(watch.run_path, watch.attempt, watch.limits)
        self._last_look_at: float | None = None
        # Kind and place of what was announced as left alone.
        self._announced: set[tuple[str, str]] = set()
        # PIDs that were continued after a signal had stopped them: it helps once or not at all.
        self._continued: set[int] = set()
        # PIDs that a signal has stopped, and since when.
        self._stopped: dict[int, float] = {}

    # --- the loop ---

    def run(self, stop: threading.Event) -> None:
        """Watch until the event is set: the body of a thread."""
        self._stop = stop
        errors_in_a_row = 0
        while not stop.wait(self._pause_seconds()):
            try:
                self.look(self._clock())
                errors_in_a_row = 0
            except Exception as error:  # noqa: BLE001 - whatever a stranger's process does to us
                errors_in_a_row += 1
                self._report_error(error, errors_in_a_row)
                if errors_in_a_row >= _MAX_ERRORS:
                    return
                stop.wait(_ERROR_PAUSE_SECONDS)

    def _report_error(self, error: Exception, errors_in_a_row: int) -> None:
        why = f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH]
        with suppress(Exception):
            self._emit(
                process_events.WatchingFailed(
                    what="watchdog", error=f"{why}, {errors_in_a_row} times"
                )
            )
        if errors_in_a_row >= _MAX_ERRORS:
            text = f"the watchdog has given up after {errors_in_a_row} errors in a row: {error}"
            self._watch.say(text[:_MAX_MESSAGE_LENGTH])

    def _pause_seconds(self) -> float:
        """Return how long no process can exceed its limit, within bounds."""
        now = self._clock()
        pause = _REST_SECONDS
        for process in self._processes.judged:
            pause = min(pause, process.seconds_until_examination(now))
        return max(_POLL_SECONDS, pause)

    def look(self, now: float) -> None:
        """Look once at all processes, and examine at most one of them.

        Args:
            now: The time on the watchdog's clock.
        """
        self._ignore_suspension(now)
        self._processes.look(now)
        self._report_stopped_processes(now)
        overdue = [
            process
            for process in self._processes.judged
            if process.seconds_until_examination(now) < 0.0
        ]
        for process in overdue:
            if self._is_paused(process, now) or self._waits_for_others(process, now):
                continue
            try:
                self._examine(process, now)
            finally:
                # An examination takes its time, which is no suspension.
                self._last_look_at = self._clock()
            # The others have changed meanwhile; the next look comes at once.
            return
        self._last_look_at = now

    # --- what is no hang ---

    def _ignore_suspension(self, now: float) -> None:
        """Do not count the time in which nothing ran on this machine: a laptop's lid was closed."""
        if self._last_look_at is None or now - self._last_look_at <= _SUSPENDED_SECONDS:
            return
        seconds = round(now - self._last_look_at, 1)
        self._emit(process_events.WatchdogSuspended(seconds=seconds))
        for process in self._processes.alive:
            process.count_from(now)

    def _report_stopped_processes(self, now: float) -> None:
        """Report which trainers a signal has stopped, and which continue."""
        judged = {process.pid: process for process in self._processes.judged}
        for process in judged.values():
            since = process.stopped_since
            is_new = process.pid not in self._stopped
            if since is not None and now > since and is_new:
                self._stopped[process.pid] = since
                process.count_from(now)
                self._report_stop(process)
        for pid in list(self._stopped):
            continued = judged.get(pid)
            if continued is not None and continued.stopped_since is not None:
                continue
            stopped_at = self._stopped.pop(pid)
            if continued is not None:
                continued.count_from(now)
                self._report_continue(continued, seconds=round(now - stopped_at, 1))

    def _report_stop(self, process: WatchedProcess) -> None:
        pid = process.pid
        step = process.standing.step
        self._emit(
            process_events.ProcessStopped(
                pid=pid, rank=process.info.rank, step=step, phase=process.phase_name
            )
        )
        self._watch.say(
            f"process {pid} was stopped by a signal at step {step}; `kill -CONT {pid}` continues it"
        )

    def _report_continue(self, process: WatchedProcess, seconds: float) -> None:
        step = process.standing.step
        self._emit(process_events.ProcessContinued(pid=process.pid, step=step, seconds=seconds))
        self._watch.say(f"process {process.pid} continues after {seconds:g} s")

    def _is_paused(self, process: WatchedProcess, now: float) -> bool:
        """Return whether Ctrl-Z or a debugger has stopped the process, or it has ended.

        The time in which it is stopped is not counted.
        """
        current = read_process(process.pid)
        if current is None or current.ticks != process.info.ticks or current.state in "ZX":
            process.is_alive = False
            return True
        if current.state in "Tt":
            process.count_from(now)
            return True
        return False

    def _waits_for_others(self, process: WatchedProcess, now: float) -> bool:
        """Return whether another rank is within its limit, so that this one may be waiting for it.

        A rank that a signal has stopped does not move, although its time is not counted either.
        """
        return any(
            other.is_moving(now) and other.stopped_since is None
            for other in self._processes.judged
            if other is not process and other.is_in_same_group(process)
        )

    # --- a hang ---

    def _examine(self, suspect: WatchedProcess, now: float) -> None:
        """Take stacks of a process that stands still, and report what they show."""
        suspicion = process_events.HangSuspected(
            pid=suspect.pid,
            rank=suspect.info.rank,
            phase=suspect.phase_name,
            step=suspect.standing.step,
            seconds=round(suspect.age(now), 3),
            limit=round(suspect.limit(), 3),
        )
        self._emit(suspicion)
        # The result holds for the whole group; the next look is due when the time has doubled.
        for process in self._group_of(suspect):
            process.postpone_examination(until_age=2.0 * process.age(now))
        progress = suspect.standing.progress
        dump = self._stacks.take(self._subjects(suspect, now))
        self._processes.look(self._clock())
        examination = _Examination(
            suspect=suspect, suspicion=suspicion, progress=progress, dump=dump
        )
        if suspect.standing.progress != progress:
            self._dismiss(examination, "it has moved meanwhile")
        elif examination.suspect_has_ended:
            self._dismiss(examination, "it has ended meanwhile")
        else:
            self._diagnose(examination)

    def _group_of(self, suspect: WatchedProcess) -> list[WatchedProcess]:
        return [
            process
            for process in self._processes.judged
            if process is suspect or process.is_in_same_group(suspect)
        ]

    def _diagnose(self, examination: _Examination) -> None:
        """Report a hang, unless the process only waits for others that move."""
        suspect = examination.suspect
        diagnosis = diagnose_hang(
            examination.dump.processes,
            suspect.pid,
            gone_ranks=self._processes.gone_ranks(suspect),
        )
        # Ranks that were not recognised as ranks: one that waits for a slow one is not stuck.
        if diagnosis.kind == "collective" and self._any_other_moves(suspect):
            self._dismiss(examination, "it waits for others, which move")
            return
        hang = self._make_hang(examination, diagnosis)
        if hang.remedy == "restart":
            for process in self._group_of(suspect):
                process.postpone_examination(until_age=math.inf)
        seconds = round(examination.dump.seconds, 3)
        self._emit(process_events.Stacks(pid=hang.blamed_pid, files=hang.files, seconds=seconds))
        self._emit(hang)
        self._watch.on_hang(hang)
        if hang.remedy == "wait" and diagnosis.moving and suspect.info.torch is not None:
            is_starting = suspect.standing.phase is Phase.STARTING
            self._announce_left_alone(hang, is_starting=is_starting)

    def _any_other_moves(self, suspect: WatchedProcess) -> bool:
        now = self._clock()
        return any(
            process.is_moving(now) for process in self._processes.judged if process is not suspect
        )

    def _dismiss(self, examination: _Examination, why: str) -> None:
        """Report that a suspicion was unfounded, and delete the stacks that were taken."""
        self._stacks.delete(examination.dump)
        suspect = examination.suspect
        self._emit(
            process_events.HangOver(
                pid=suspect.pid, phase=suspect.phase_name, step=suspect.standing.step, why=why
            )
        )

    def _announce_left_alone(self, hang: Hang, *, is_starting: bool) -> None:
        """Announce once for each place what computes without progress, and how long it may."""
        place = (hang.hang_kind, hang.frame)
        if place in self._announced:
            return
        self._announced.add(place)
        seems = "computes without progress"
        if hang.hang_kind == "Python loop":
            seems = "seems to loop"
        where = f" at {hang.frame}" if hang.frame else ""
        text = f"process {hang.pid} {seems}{where}, for {hang.seconds:.0f} s now; left alone"
        if not is_starting:
            seconds = self._watch.limits.moving_seconds
            if seconds < math.inf:
                text += f" for {seconds / 60:.3g} min"
            text += "; --hang-limit moving=SECONDS changes that"
        self._watch.say(text)

    def _make_hang(self, examination: _Examination, diagnosis: Diagnosis) -> Hang:
        blamed = diagnosis.process
        dump = examination.dump
        files = [name for process in dump.processes for name in dump.files.get(process.pid, ())]
        # The stacks of the process to blame come first; the sort keeps the order otherwise.
        files.sort(key=lambda name: f"-{blamed.pid}-" not in name)
        return Hang(
            **examination.suspicion.facts(),
            hang_kind=diagnosis.kind,
            signature=SIGNATURES_OF[diagnosis.kind],
            confidence=diagnosis.confidence,
            blamed_pid=blamed.pid,
            blamed_role=blamed.role,
            frame=describe_frame(diagnosis.frame),
            odd_one_out=diagnosis.odd_one_out,
            sentence=diagnosis.sentence,
            remedy=self._choose_remedy(
                examination.suspect, diagnosis, examination.suspicion.seconds
            ),
            files=tuple(files),
        )

    def _choose_remedy(
        self, suspect: WatchedProcess, diagnosis: Diagnosis, seconds: float
    ) -> Remedy:
        """Choose what costs least: ending a run that would continue costs more than an hour's wait.

        Args:
            suspect: The process that stands still.
            diagnosis: What its stacks, and those of the others, show.
            seconds: How long it has stood still.
        """
        blamed = diagnosis.process
        phase = suspect.standing.phase
        is_traced = blamed.last.state == "t"
        # A debugger holds it; or it is a program about which nothing is known.
        if is_traced or suspect.info.torch is None:
            return "wait"
        if diagnosis.kind == "stopped" and blamed.pid not in self._continued:
            self._continued.add(blamed.pid)
            return "continue"
        if diagnosis.heals and seconds < _WORKER_RECOVERY_SECONDS:
            return "wait"
        may_move_on = phase is Phase.STARTING or seconds < self._watch.limits.moving_seconds
        if diagnosis.moving and may_move_on:
            return "wait"
        return "end" if phase is Phase.ENDING else "restart"

    # --- which processes are examined ---

    def _subjects(self, suspect: WatchedProcess, now: float) -> list[Subject]:
        """Return the suspect, the other trainers, their workers, and whatever else they started.

        Only descendants of the supervisor are looked at. The order is that of their importance,
        since their number is limited.
        """
        table = read_table()
        own_pids = descendants(table, [os.getpid()])
        watched = {
            process.pid: process
            for process in self._processes.alive
            if process.pid in own_pids and table[process.pid].ticks == process.info.ticks
        }
        judged = [process.pid for process in self._processes.judged if process.pid in watched]
        suspects = [suspect.pid] if suspect.pid in watched else []
        pids = dict.fromkeys(
            [
                *suspects,
                *judged,
                *sorted(descendants(table, suspects)),
                *sorted(descendants(table, judged)),
                *watched,
            ]
        )
        subjects = []
        for pid in list(pids)[:_MAX_EXAMINED]:
            process = table.get(pid)
            if process is None or process.state in "ZX":
                continue
            judged_at = now if pid in judged else None
            subjects.append(_make_subject(process, watched.get(pid), judged_at))
        return subjects


def _make_subject(
    process: Process, watched: WatchedProcess | None, judged_at: float | None
) -> Subject:
    """Return a process to look at.

    Args:
        process: The process.
        watched: What is known about it; None if it does not record itself.
        judged_at: The time at which its progress was judged; None if its progress does not count.
    """
    if watched is None:
        return Subject(about=Examined(pid=process.pid, ppid=process.ppid, role="unobserved"))
    about = Examined(
        pid=process.pid,
        ppid=process.ppid,
        role=watched.info.role,
        rank=watched.info.rank,
        step=watched.standing.step,
        phase="" if judged_at is None else watched.phase_name,
        seconds=0.0 if judged_at is None else watched.age(judged_at),
        judged=judged_at is not None,
    )
    can_answer = watched.info.stacks_signal == STACKS_SIGNAL
    return Subject(about=about, folder=watched.folder if can_answer else None, is_observed=True)
