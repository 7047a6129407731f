"""Detect when training makes no progress, find out where it is stuck, and propose a remedy.

The watchdog works from outside the training processes, without torch. It polls their progress
boards, the files in which they show their phase and count their progress, because a process may be
alive without making progress. If a phase exceeds its limit without progress, the watchdog samples
the stacks twice, a second apart. If there is still no progress, it reports a hang.

``launch.attempt`` acts on a hang, and ``explain.hangs`` interprets the stacks.
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
    HangDiagnosis,
    Remedy,
    describe_frame,
    diagnose_hang,
)
from holdfast.explain.hangs.frames import frame_to_show
from holdfast.explain.hangs.process_samples import ExaminedProcess
from holdfast.recorder.progress import ProcessPhase
from holdfast.recorder.run_files import STACKS_SIGNAL
from holdfast.supervise.process_tree import ProcessStat, descendants, read_process, read_table
from holdfast.supervise.watch.attempt_watch import AttemptWatch
from holdfast.supervise.watch.processes import WatchedProcess, WatchedProcesses
from holdfast.supervise.watch.stacks import StackDump, StackSampler, Subject

# Polling interval close to a limit. A hang should be detected within 0.2 s of exceeding the limit.
_POLL_SECONDS = 0.05
# Polling interval far from any limit.
_REST_SECONDS = 0.5
# If the watchdog itself has not run for this long, the machine or the container was suspended, and
# so was training.
_SUSPENDED_SECONDS = 5.0
# How long to wait for holdfast's own loader to replace a stuck worker before proposing a restart.
# The loader replaces a worker after a minute, or after 8 times the longest time that a sample has
# taken so far.
_WORKER_RECOVERY_SECONDS = 180.0
_MAX_EXAMINED = 64
# An event can only hold a few kilobytes.
_MAX_LISTED = 8
# The watchdog gives up after this many consecutive errors.
_MAX_ERRORS = 20
_ERROR_PAUSE_SECONDS = 1.0
_MAX_ERROR_LENGTH = 500
_MAX_MESSAGE_LENGTH = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class _Examination:
    """A process that has exceeded its limit, with the stacks that were then sampled."""

    suspect: WatchedProcess
    suspicion: HangSuspected
    # The suspect's `Standing.progress` before its stacks were sampled.
    progress: int
    dump: StackDump

    @property
    def suspect_has_ended(self) -> bool:
        if not self.suspect.is_alive:
            return True
        return all(process.pid != self.suspect.pid for process in self.dump.processes)


class Watchdog:
    """Watches the processes of one attempt for hangs, in its own thread.

    Args:
        watch: The watched attempt, and the callbacks for reports.
        clock: Returns monotonic seconds, as the clock of the progress boards does.
        stacks: Samples stacks. By default, they are written to the run directory.
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
        self._last_check_at: float | None = None
        # The kind and the innermost frame of each hang for which a message was printed.
        self._announced: set[tuple[str, str]] = set()
        # PIDs of stopped processes to which SIGCONT was sent. This is tried only once per process.
        self._continued: set[int] = set()
        # When each process that is currently stopped by a signal was found stopped, keyed by PID.
        self._stopped: dict[int, float] = {}

    # --- the loop ---

    def run(self, stop: threading.Event) -> None:
        """Check the processes until `stop` is set, or until too many consecutive checks fail."""
        self._stop = stop
        errors_in_a_row = 0
        while not stop.wait(self._pause_seconds()):
            try:
                self.check(self._clock())
                errors_in_a_row = 0
            except Exception as error:  # noqa: BLE001 - anything may fail here
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
            text = f"the watchdog gave up after {errors_in_a_row} consecutive errors: {error}"
            self._watch.say(text[:_MAX_MESSAGE_LENGTH])

    def _pause_seconds(self) -> float:
        """Return how long to sleep before the next check.

        The pause ends when a process may exceed its limit, but has a minimum and a maximum length.
        """
        now = self._clock()
        pause = _REST_SECONDS
        for process in self._processes.judged:
            pause = min(pause, process.seconds_until_examination(now))
        return max(_POLL_SECONDS, pause)

    def check(self, now: float) -> None:
        """Check all processes once, and examine at most one process that exceeds its limit.

        Args:
            now: The time on the watchdog's clock.
        """
        self._ignore_suspension(now)
        self._processes.update(now)
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
                # An examination takes seconds, which must not be mistaken for a suspension of the
                # machine.
                self._last_check_at = self._clock()
            # The other processes may have changed in the meantime, so leave them to the next check.
            return
        self._last_check_at = now

    # --- suspended, stopped and waiting processes ---

    def _ignore_suspension(self, now: float) -> None:
        """If the machine was suspended, do not count that time as time without progress.

        A long gap between two checks shows that it was suspended, for example by closing the lid.
        """
        if self._last_check_at is None or now - self._last_check_at <= _SUSPENDED_SECONDS:
            return
        seconds = round(now - self._last_check_at, 1)
        self._emit(process_events.WatchdogSuspended(seconds=seconds))
        for process in self._processes.alive:
            process.count_from(now)

    def _report_stopped_processes(self, now: float) -> None:
        """Report judged processes that a signal has stopped, and those that have continued."""
        judged = {process.pid: process for process in self._processes.judged}
        for process in judged.values():
            if process.stopped_since is None or process.pid in self._stopped:
                continue
            # Report only a stop that lasts until the next check.
            if now > process.stopped_since:
                self._stopped[process.pid] = process.stopped_since
                process.count_from(now)
                self._report_stop(process)
        for pid, stopped_at in list(self._stopped.items()):
            current = judged.get(pid)
            if current is None:
                # The process has ended or is no longer judged.
                del self._stopped[pid]
            elif current.stopped_since is None:
                del self._stopped[pid]
                current.count_from(now)
                self._report_continue(current, seconds=round(now - stopped_at, 1))

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
        self._watch.say(f"process {process.pid} continued after {seconds:g} s")

    def _is_paused(self, process: WatchedProcess, now: float) -> bool:
        """Return whether the process has ended, or is stopped by Ctrl-Z or a debugger.

        Time during which a process is stopped does not count as time without progress.
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
        """Return whether another rank is within its limit, so that this rank may wait for it.

        A stopped rank is always within its limit but makes no progress, so it is ignored.
        """
        return any(
            other.is_moving(now) and other.stopped_since is None
            for other in self._processes.judged
            if other is not process and other.is_in_same_group(process)
        )

    # --- a hang ---

    def _examine(self, suspect: WatchedProcess, now: float) -> None:
        """Sample the stacks of a process that has exceeded its limit, and report whether it hangs.

        The stacks of the other trainers and of all descendants are sampled too.
        """
        suspicion = process_events.HangSuspected(
            pid=suspect.pid,
            rank=suspect.info.rank,
            phase=suspect.phase_name,
            step=suspect.standing.step,
            seconds=round(suspect.age(now), 3),
            limit=round(suspect.limit(), 3),
        )
        self._emit(suspicion)
        # The result applies to all ranks in the group. Examine them again when the time without
        # progress has doubled.
        for process in self._group_of(suspect):
            process.postpone_examination(until_age=2.0 * process.age(now))
        progress = suspect.standing.progress
        dump = self._stacks.take(self._subjects(suspect, now))
        self._processes.update(self._clock())
        examination = _Examination(
            suspect=suspect, suspicion=suspicion, progress=progress, dump=dump
        )
        if suspect.standing.progress != progress:
            self._dismiss(examination, "the process has made progress in the meantime")
        elif examination.suspect_has_ended:
            self._dismiss(examination, "the process has ended in the meantime")
        else:
            self._diagnose(examination)

    def _group_of(self, suspect: WatchedProcess) -> list[WatchedProcess]:
        return [
            process
            for process in self._processes.judged
            if process is suspect or process.is_in_same_group(suspect)
        ]

    def _diagnose(self, examination: _Examination) -> None:
        """Report a hang, unless the process only waits for other processes that make progress."""
        suspect = examination.suspect
        diagnosis = diagnose_hang(
            examination.dump.processes,
            suspect.pid,
            gone_ranks=self._processes.gone_ranks(suspect),
        )
        # The processes may be ranks even if their rank numbers are unknown. A rank that waits for a
        # slow rank is not stuck.
        if diagnosis.kind == "collective" and self._any_other_moves(suspect):
            self._dismiss(examination, "it is waiting for other processes, which make progress")
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
            is_starting = suspect.standing.phase is ProcessPhase.STARTING
            self._announce_left_alone(hang, is_starting=is_starting, starved=diagnosis.starved)

    def _any_other_moves(self, suspect: WatchedProcess) -> bool:
        """Return whether any other judged process makes progress."""
        now = self._clock()
        return any(
            process.is_moving(now) for process in self._processes.judged if process is not suspect
        )

    def _dismiss(self, examination: _Examination, why: str) -> None:
        """Report that a suspected hang was a false alarm, and delete its stacks."""
        self._stacks.delete(examination.dump)
        suspect = examination.suspect
        self._emit(
            process_events.HangOver(
                pid=suspect.pid, phase=suspect.phase_name, step=suspect.standing.step, why=why
            )
        )

    def _announce_left_alone(self, hang: Hang, *, is_starting: bool, starved: bool) -> None:
        """Print a message about a process that is left running although it makes no progress.

        The message is printed only once for each kind of hang and innermost frame. While a process
        is starting, it is left running without a time limit.
        """
        place = (hang.hang_kind, hang.frame)
        if place in self._announced:
            return
        self._announced.add(place)
        seems = "is computing but makes no progress"
        if starved:
            seems = "gets too little CPU time to make progress"
        elif hang.hang_kind == "Python loop":
            seems = "seems to loop"
        where = f" at {hang.frame}" if hang.frame else ""
        text = (
            f"process {hang.pid} {seems}{where}, for {hang.seconds:.0f} s so far; it is left"
            " running"
        )
        if not is_starting and not starved:
            seconds = self._watch.limits.moving_seconds
            if seconds < math.inf:
                text += f" for up to {seconds / 60:.3g} min"
            text += "; use --hang-limit moving=SECONDS to change this"
        self._watch.say(text)

    def _make_hang(self, examination: _Examination, diagnosis: HangDiagnosis) -> Hang:
        """Return the event that reports a hang and proposes a remedy."""
        blamed = diagnosis.process
        dump = examination.dump
        # List the stacks of the blamed process (the cause of the hang) first.
        pids = dict.fromkeys([blamed.pid, *(process.pid for process in dump.processes)])
        files = [name for pid in pids for name in dump.files.get(pid, ())]
        return Hang(
            **examination.suspicion.facts(),
            hang_kind=diagnosis.kind,
            signature=SIGNATURES_OF[diagnosis.kind],
            certainty=diagnosis.certainty,
            blamed_pid=blamed.pid,
            blamed_role=blamed.role,
            blamed_rank=blamed.rank,
            ranks=_list_ranks(examination, blamed),
            frame=describe_frame(diagnosis.frame),
            odd_one_out=diagnosis.odd_one_out,
            sentence=diagnosis.sentence,
            remedy=self._choose_remedy(
                examination.suspect, diagnosis, examination.suspicion.seconds
            ),
            files=tuple(files),
        )

    def _choose_remedy(
        self, suspect: WatchedProcess, diagnosis: HangDiagnosis, seconds: float
    ) -> Remedy:
        """Choose the least costly remedy: killing a run that would recover costs more than waiting.

        Args:
            suspect: The process without progress.
            diagnosis: The diagnosis from the stacks of all examined processes.
            seconds: Time without progress.
        """
        blamed = diagnosis.process
        is_traced = blamed.newest.state == "t"
        # Only wait if the process is being debugged, or is not known to be a torch program. A
        # restart would not give a process more CPU time.
        if is_traced or suspect.info.torch is None or diagnosis.starved:
            return "wait"
        if diagnosis.kind == "stopped" and blamed.pid not in self._continued:
            self._continued.add(blamed.pid)
            return "continue"
        if self._may_recover(suspect, diagnosis, seconds):
            return "wait"
        return "end" if suspect.standing.phase is ProcessPhase.ENDING else "restart"

    def _may_recover(
        self, suspect: WatchedProcess, diagnosis: HangDiagnosis, seconds: float
    ) -> bool:
        """Return whether the run may still recover by itself, so that it is too early to kill it.

        Args:
            suspect: The process without progress.
            diagnosis: The diagnosis from the stacks of all examined processes.
            seconds: Time without progress.
        """
        if diagnosis.may_recover and seconds < _WORKER_RECOVERY_SECONDS:
            return True
        if not diagnosis.moving:
            return False
        is_starting = suspect.standing.phase is ProcessPhase.STARTING
        return is_starting or seconds < self._watch.limits.moving_seconds

    # --- which processes are examined ---

    def _subjects(self, suspect: WatchedProcess, now: float) -> list[Subject]:
        """Return the processes to examine: the suspect, other trainers and their descendants.

        Only descendants of the supervisor are included, the most important ones first, because at
        most `_MAX_EXAMINED` processes are examined.
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


def _list_ranks(
    examination: _Examination, blamed: ExaminedProcess
) -> tuple[process_events.HungRank, ...]:
    """Return where each judged process was; nothing if there is only one.

    The blamed process and the suspect come first, because at most `_MAX_LISTED` are returned.
    """
    judged = [process for process in examination.dump.processes if process.judged]
    if len(judged) < 2:
        return ()
    important = (blamed.pid, examination.suspect.pid)
    judged.sort(key=lambda process: (process.pid not in important, process.rank or 0))
    return tuple(
        process_events.HungRank(
            pid=process.pid,
            rank=process.rank,
            step=process.step,
            phase=process.phase,
            frame=describe_frame(frame_to_show(process.newest.main_thread.frames)),
        )
        for process in judged[:_MAX_LISTED]
    )


def _make_subject(
    process: ProcessStat, watched: WatchedProcess | None, judged_at: float | None
) -> Subject:
    """Return the `Subject` for a process to examine.

    Args:
        process: The process, as listed in ``/proc``.
        watched: The watchdog's record of the process; None if the process is not observed.
        judged_at: Time of the current check; None if the process is not judged.
    """
    if watched is None:
        return Subject(
            process=ExaminedProcess(pid=process.pid, ppid=process.ppid, role="unobserved")
        )
    examined = ExaminedProcess(
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
    return Subject(
        process=examined, folder=watched.folder if can_answer else None, runs_python=True
    )
