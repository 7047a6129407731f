"""Poll runs: `Watched` returns snapshots of one run, and `Runs` of all runs in a directory.

This works even if a run directory is incomplete, was left behind by a killed run, or is being
written by another machine. ``run_follower`` reads the records, ``run_state`` decides whether a run
has ended, and ``outlook`` describes its progress.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from holdfast.core.clock import Clock
from holdfast.core.errors import RunDirectoryError
from holdfast.core.lock import is_locked
from holdfast.explain.speed.reading import judge_speed_of_attempt
from holdfast.explain.speed_finding import SpeedFinding
from holdfast.explain.verdict import Verdict
from holdfast.recorder.progress import Standing, read_board
from holdfast.recorder.run_files import (
    BOARD_FILE,
    LOST_FILE,
    SUPERVISED_FILE,
    SUPERVISOR_FOLDER,
    VERDICT_FILE,
    process_is_stopped,
    process_lives,
)
from holdfast.recorder.start import START_FILE
from holdfast.report.live.live_run import LiveRun
from holdfast.report.live.outlook import NO_GUARD, describe_outlook
from holdfast.report.live.recent_records import RecentRecords, newest_time
from holdfast.report.live.run_state import SILENT_SECONDS, RunSigns, RunState, decide_state
from holdfast.report.live.step_numbers import (
    by_optimizer,
    newest_step,
    steps_per_second,
    with_numbers,
)
from holdfast.report.run_follower import News, RunFollower
from holdfast.report.run_snapshot import ProcessSnapshot, role_order, visible_phase
from holdfast.report.sources import RunSource, ran_here, read_json, runs_in
from holdfast.report.verdicts import verdict_from, verdict_of

# Maximum number of runs to show.
_MAX_RUNS = 40
# Interval between judgments of a run's speed, for which all events of the supervisor are read.
_SPEED_SECONDS = 5.0
# Name of the lock file in a supervisor's folder and in a guard's run directory.
LOCK_FILE = "lock"


class Watched:
    """Polls one run directory.

    Args:
        run: The run directory, with symbolic links resolved.
        clock: The source of the current time.
    """

    def __init__(self, run: Path, clock: Clock) -> None:
        self._run = run
        self._clock = clock
        self._follower = RunFollower(run)
        self._recent = RecentRecords()
        # Problems with reading progress boards, keyed by process directory.
        self._board_problems: dict[str, str] = {}
        self._judged: Verdict | None = None
        # What the running attempt spends its time on, and when to determine that again.
        self._speed: tuple[SpeedFinding, ...] = ()
        self._judge_speed_at = -math.inf
        # Monotonic times at which watching began and of the run's last sign of life.
        self._began_to_watch = clock.monotonic_seconds()
        self._last_sign_of_life = -math.inf

    @property
    def lost(self) -> tuple[str, ...]:
        """Return a sentence for each process whose steps were overwritten before being read."""
        return tuple(self._follower.lost_steps.values())

    def look(self, *, hold_back: bool = True) -> LiveRun:
        """Read the new records, and return a snapshot of the run.

        Args:
            hold_back: Whether to hold back samples whose loss is still missing; see
                `SampleFollower.new`.
        """
        news = self._follower.new(hold_back=hold_back)
        self._recent.add(news, self._follower.sources)
        self._note_signs_of_life(news)
        supervised = read_json(self._run / SUPERVISED_FILE)
        is_here = ran_here(supervised)
        sources = self._follower.sources
        processes = [
            self._process(source, is_here=is_here) for source in self._sources_to_show(sources)
        ]
        supervisor_is_lost = self._supervisor_is_lost(
            supervised.get("supervisor_pid"), is_here=is_here
        )
        state = self._state(processes, supervisor_is_lost=supervisor_is_lost)
        verdict = self._verdict(state, supervisor_is_lost=supervisor_is_lost)
        return LiveRun(
            path=self._run,
            start=supervised or _start_of_guard(sources),
            state=state,
            attempt=self._recent.attempt,
            now=self._clock.unix_seconds(),
            newest=self._recent.newest or None,
            processes=tuple(processes),
            events=tuple(self._recent.events),
            verdict=verdict,
            outlook="" if state == "ended" else self._outlook(),
            speed=self._speed_of_run(state, verdict),
            news=tuple(news),
            guards=tuple(self._follower.guard_runs()),
            scalars=tuple(self._recent.scalars.values()),
            problems=self._problems(supervisor_is_lost=supervisor_is_lost),
        )

    def _note_signs_of_life(self, all_news: Sequence[News]) -> None:
        """Update the time of the last sign of life to that of the newest record."""
        if not all_news:
            return
        # Use the time at which the record was written, which may be long before it was read.
        newest = max(newest_time(news) for news in all_news)
        age = max(0.0, self._clock.unix_seconds() - newest)
        recorded_at = self._clock.monotonic_seconds() - age
        self._last_sign_of_life = max(self._last_sign_of_life, recorded_at)

    # --- processes

    def _sources_to_show(self, sources: Sequence[RunSource]) -> list[RunSource]:
        """Return the sources of the newest attempt, trainers first.

        Guards are included only if no observed process has trained.
        """
        processes = [
            source
            for source in sources
            if source.kind == "process" and source.attempt == self._recent.attempt
        ]
        processes.sort(key=lambda source: role_order(_role(source)))
        if any(self._recent.samples_of(source) for source in processes):
            return processes
        return processes + [source for source in sources if source.kind == "guard"]

    def _process(self, source: RunSource, *, is_here: bool) -> ProcessSnapshot:
        samples = self._recent.samples_of(source)
        standing = self._read_board(source)
        is_alive = _is_alive(source, is_here=is_here)
        role = _role(source)
        process = ProcessSnapshot(
            label=source.label,
            role=role,
            info=source.info,
            alive=is_alive,
            stopped=_is_stopped(source, is_alive=is_alive),
            phase=visible_phase(standing, role),
            since_seconds=self._seconds_in_phase(standing, is_alive=is_alive),
            step=newest_step(standing, samples),
            steps_per_second=steps_per_second(
                samples, self._clock.unix_seconds() if is_alive else None
            ),
        )
        process = with_numbers(process, samples)
        return replace(process, optimizers=by_optimizer(process, source, samples))

    def _read_board(self, source: RunSource) -> Standing | None:
        """Return the contents of a process's progress board; None if unreadable, or for a guard."""
        if source.info is None:
            return None
        try:
            return read_board(source.directory / BOARD_FILE)
        except RunDirectoryError as error:
            self._board_problems[str(source.directory)] = error.what
        except OSError as error:
            self._board_problems[str(source.directory)] = str(error)
        return None

    def _seconds_in_phase(
        self, standing: Standing | None, *, is_alive: bool | None
    ) -> float | None:
        if standing is None or not is_alive:
            return None
        return max(0.0, self._clock.monotonic_seconds() - standing.since_seconds)

    # --- the run

    def _state(self, processes: Sequence[ProcessSnapshot], *, supervisor_is_lost: bool) -> RunState:
        now = self._clock.monotonic_seconds()
        last_sign = self._last_sign_of_life
        if math.isinf(last_sign):
            last_sign = self._began_to_watch
        events = self._recent.events
        signs = RunSigns(
            supervisor_event=self._recent.supervisor_event,
            lock_is_held=is_locked(self._run / SUPERVISOR_FOLDER / LOCK_FILE),
            supervisor_is_lost=supervisor_is_lost,
            processes_alive=tuple(process.alive for process in processes),
            closed=bool(events) and events[-1].event.kind == "closed",
            silent_seconds=now - last_sign,
        )
        state = decide_state(signs)
        if state == "running" and signs.of_life:
            self._last_sign_of_life = now
        return state

    def _supervisor_is_lost(self, pid: object, *, is_here: bool) -> bool:
        """Return whether the supervisor was killed.

        It was killed if the sentinel process that watches it has recorded that, or if its process
        no longer exists although it has not recorded its end.

        Args:
            pid: The PID that the supervisor recorded, if any.
            is_here: Whether the supervisor ran on this machine.
        """
        if self._recent.supervisor_event in ("", "stopped"):
            return False
        folder = self._run / SUPERVISOR_FOLDER
        if (folder / LOST_FILE).exists():
            return True
        if not is_here or not isinstance(pid, int) or is_locked(folder / LOCK_FILE) is not False:
            return False
        return not Path(f"/proc/{pid}").exists()

    def _verdict(self, state: RunState, *, supervisor_is_lost: bool) -> Verdict | None:
        """Return the recorded verdict, or determine it now if the supervisor was killed."""
        if state == "running":
            return self._judged
        values = read_json(self._run / VERDICT_FILE)
        if values:
            return verdict_from(values)
        if state == "ended" and supervisor_is_lost and self._judged is None:
            self._judged = verdict_of(self._run, [])
        return self._judged

    def _speed_of_run(self, state: RunState, verdict: Verdict | None) -> tuple[SpeedFinding, ...]:
        """Return what the run spends its time on; once it has ended, what its verdict says."""
        if state == "ended" and verdict is not None:
            return verdict.speed
        now = self._clock.monotonic_seconds()
        if now >= self._judge_speed_at:
            self._judge_speed_at = now + _SPEED_SECONDS
            self._speed = judge_speed_of_attempt(self._run, self._recent.attempt)
        return self._speed

    def _outlook(self) -> str:
        loops = self._recent.loops
        if not loops:
            return NO_GUARD if self._recent.has_samples else ""
        first = next(iter(loops))
        return describe_outlook(
            loops[first],
            self._recent.samples[first],
            now=self._clock.unix_seconds(),
            ranks=sum(directory.parent == first.parent for directory in loops),
        )

    def _problems(self, *, supervisor_is_lost: bool) -> tuple[str, ...]:
        problems = {**self._follower.problems, **self._board_problems}
        sentences = [*problems.values(), *self._follower.lost_steps.values()]
        if supervisor_is_lost:
            sentences.append("the supervisor was killed")
        return tuple(sentences)


def _start_of_guard(sources: Sequence[RunSource]) -> dict[str, object]:
    """Return the start record of the first guard; empty without a guard."""
    for source in sources:
        if source.kind == "guard":
            return read_json(source.directory / START_FILE)
    return {}


def _role(source: RunSource) -> str:
    return "guard" if source.info is None else source.info.role


def _is_alive(source: RunSource, *, is_here: bool) -> bool | None:
    """Return whether the process of a source is alive, or None if it is on another machine."""
    if not is_here:
        return None
    if source.info is not None:
        return process_lives(source.info.pid, source.info.ticks)
    # A guard holds the lock of its run directory while it is alive. It records in the subdirectory
    # ``recorder/rank0``, which is two levels below.
    return is_locked(source.directory.parent.parent / LOCK_FILE)


def _is_stopped(source: RunSource, *, is_alive: bool | None) -> bool:
    if source.info is None or not is_alive:
        return False
    return process_is_stopped(source.info.pid)


class Runs:
    """Polls the newest runs in a directory.

    Args:
        folder: A directory of run directories, such as ``runs``.
        clock: The source of the current time.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        # The readers of runs that have not ended. Once a run has ended, its reader is dropped to
        # free memory, and its last snapshot is kept.
        self._watched: dict[Path, Watched] = {}
        self._snapshots: dict[Path, LiveRun] = {}

    def look(self) -> tuple[LiveRun, ...]:
        """Return snapshots of active runs, then of ended ones, newest first within each group."""
        paths = runs_in(self._folder)[:_MAX_RUNS]
        for path in paths:
            if self._may_have_changed(path):
                self._look_at(path)
        snapshots = [self._snapshots[path] for path in paths]
        shown = [
            snapshot
            for snapshot in snapshots
            if not any(_contains_guard(run, snapshot) for run in snapshots)
        ]
        return tuple(sorted(shown, key=lambda run: run.state == "ended"))

    def _may_have_changed(self, path: Path) -> bool:
        """Return whether a run is new, is active, or was restarted after it had ended."""
        if path in self._watched or path not in self._snapshots:
            return True
        return bool(is_locked(path / SUPERVISOR_FOLDER / LOCK_FILE))

    def _look_at(self, path: Path) -> None:
        if path not in self._watched:
            self._watched[path] = Watched(path, self._clock)
        self._snapshots[path] = self._watched[path].look()
        if self._snapshots[path].state == "ended":
            del self._watched[path]


def _contains_guard(run: LiveRun, guard: LiveRun) -> bool:
    """Return whether a run's snapshot includes a guard, so that the guard's own one is redundant.

    It is not redundant if the guard's directory was used again after the run had ended.
    """
    if guard.path.resolve() not in run.guards:
        return False
    newer_seconds = (guard.newest or 0.0) - (run.newest or 0.0)
    return run.state != "ended" or newer_seconds < SILENT_SECONDS
