"""Poll runs: every look returns a `RunSnapshot` of what can be seen.

This works on directories that are half written, that a killed run left behind, or that another
machine writes. ``run_follower`` reads the records, ``run_state`` decides whether a run has ended,
and ``outlook`` describes how far along it is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from holdfast.core.clock import Clock
from holdfast.core.errors import RunDirectoryError
from holdfast.core.lock import is_locked
from holdfast.explain.verdict import Verdict
from holdfast.recorder.progress import Standing, StepSample, read_board
from holdfast.recorder.run_files import (
    BOARD_FILE,
    LOST_FILE,
    SUPERVISED_FILE,
    SUPERVISOR_FOLDER,
    VERDICT_FILE,
    process_is_stopped,
    process_lives,
    read_optimizers,
)
from holdfast.recorder.scalars import Scalar
from holdfast.recorder.start import START_FILE
from holdfast.report.live.outlook import (
    NO_GUARD,
    RATE_SAMPLES,
    LoopProgress,
    describe_outlook,
    loop_progress,
)
from holdfast.report.live.run_state import SILENT_SECONDS, Signs, decide_state
from holdfast.report.run_follower import News, RunFollower
from holdfast.report.run_snapshot import ProcessSnapshot, RunSnapshot, State, visible_phase
from holdfast.report.sources import RecordedEvent, Source, ran_here, read_json, runs_in
from holdfast.report.verdicts import verdict_from, verdict_of

# Limits on what is kept for the views; more would not fit on a screen.
_KEPT_SAMPLES = 600
_KEPT_EVENTS = 50
_KEPT_SCALARS = 50
_MOST_RUNS = 40
# The lock file in a supervisor's folder, and in a guard's run directory.
LOCK_FILE = "lock"
# Order of processes in the view.
_ROLES = ("trainer", "launcher", "other", "loader worker")


class Watched:
    """One run directory to poll.

    Args:
        run: The run directory, with links resolved.
        clock: The clock.
    """

    def __init__(self, run: Path, clock: Clock) -> None:
        self._run = run
        self._clock = clock
        self._follower = RunFollower(run)
        self._recent = _RecentRecords()
        # Problems with the boards of processes, by process directory.
        self._board_problems: dict[str, str] = {}
        self._judged: Verdict | None = None
        # Monotonic times at which watching began and at which the run last gave a sign of life.
        self._began_to_watch = clock.monotonic_seconds()
        self._last_sign_of_life = -math.inf

    @property
    def run(self) -> Path:
        """Return the run directory."""
        return self._run

    @property
    def lost(self) -> tuple[str, ...]:
        """Return which steps were overwritten before being read, one sentence per process."""
        return tuple(self._follower.lost_steps.values())

    def look(self, *, hold_back: bool = True) -> RunSnapshot:
        """Return what can be seen of the run now.

        Args:
            hold_back: Whether the newest samples may be held back, as in `SampleFollower.new`.
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
        return RunSnapshot(
            path=self._run,
            start=supervised or _start_of_guard(sources),
            state=state,
            attempt=self._recent.attempt,
            now=self._clock.unix_seconds(),
            newest=self._recent.newest or None,
            processes=tuple(processes),
            events=tuple(self._recent.events),
            verdict=self._verdict(state, supervisor_is_lost=supervisor_is_lost),
            outlook="" if state == "ended" else self._outlook(),
            news=tuple(news),
            guards=tuple(self._follower.guard_runs()),
            scalars=tuple(self._recent.scalars.values()),
            problems=self._problems(supervisor_is_lost=supervisor_is_lost),
        )

    def _note_signs_of_life(self, all_news: Sequence[News]) -> None:
        if not all_news:
            return
        # Records that are new to us may have been written last week.
        newest = max(_newest_time(news) for news in all_news)
        age = max(0.0, self._clock.unix_seconds() - newest)
        recorded_at = self._clock.monotonic_seconds() - age
        self._last_sign_of_life = max(self._last_sign_of_life, recorded_at)

    # --- processes

    def _sources_to_show(self, sources: Sequence[Source]) -> list[Source]:
        """Return the sources of processes in the newest attempt, trainers first.

        Guards follow if no process was observed to train.
        """
        processes = [
            source
            for source in sources
            if source.kind == "process" and source.attempt == self._recent.attempt
        ]
        processes.sort(key=_order_of_roles)
        if any(self._recent.samples_of(source) for source in processes):
            return processes
        return processes + [source for source in sources if source.kind == "guard"]

    def _process(self, source: Source, *, is_here: bool) -> ProcessSnapshot:
        samples = self._recent.samples_of(source)
        standing = self._read_board(source)
        is_alive = _is_alive(source, is_here=is_here)
        role = "guard" if source.info is None else source.info.role
        process = ProcessSnapshot(
            label=source.label,
            role=role,
            info=source.info,
            alive=is_alive,
            stopped=_is_stopped(source, is_alive=is_alive),
            phase=visible_phase(standing, role),
            since_seconds=self._seconds_in_phase(standing, is_alive=is_alive),
            step=_newest_step(standing, samples),
            steps_per_second=_steps_per_second(
                samples, self._clock.unix_seconds() if is_alive else None
            ),
        )
        process = _with_numbers(process, samples)
        return replace(process, optimizers=_by_optimizer(process, source, samples))

    def _read_board(self, source: Source) -> Standing | None:
        """Return the progress on a process's board, or None; guards have no board."""
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

    def _state(self, processes: Sequence[ProcessSnapshot], *, supervisor_is_lost: bool) -> State:
        now = self._clock.monotonic_seconds()
        last_sign = self._last_sign_of_life
        if math.isinf(last_sign):
            last_sign = self._began_to_watch
        events = self._recent.events
        signs = Signs(
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

        Either its sentinel has recorded that, or its process no longer exists.

        Args:
            pid: The PID that the supervisor wrote, if any.
            is_here: Whether it ran on this machine.
        """
        if self._recent.supervisor_event in ("", "stopped"):
            return False
        folder = self._run / SUPERVISOR_FOLDER
        if (folder / LOST_FILE).exists():
            return True
        if not is_here or not isinstance(pid, int) or is_locked(folder / LOCK_FILE) is not False:
            return False
        return not Path(f"/proc/{pid}").exists()

    def _verdict(self, state: State, *, supervisor_is_lost: bool) -> Verdict | None:
        """Return the written verdict; without one, judge the run if its supervisor was killed."""
        if state == "running":
            return self._judged
        values = read_json(self._run / VERDICT_FILE)
        if values:
            return verdict_from(values)
        if state == "ended" and supervisor_is_lost and self._judged is None:
            self._judged = verdict_of(self._run, [])
        return self._judged

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


class _RecentRecords:
    """The newest records of a run, limited to what the views show.

    Attributes:
        samples: Steps, oldest first, by source directory.
        events: Events of all sources, oldest first.
        scalars: The newest value of each name, newest last.
        loops: The progress of each guard's loop, by guard directory.
        supervisor_event: Kind of the newest event of the supervisor; empty without one.
        attempt: Number of the newest attempt.
        newest: Unix time of the newest record; 0 without one.
    """

    def __init__(self) -> None:
        self.samples: dict[Path, deque[StepSample]] = {}
        self.events: deque[RecordedEvent] = deque(maxlen=_KEPT_EVENTS)
        self.scalars: dict[str, Scalar] = {}
        self.loops: dict[Path, LoopProgress] = {}
        self.supervisor_event = ""
        self.attempt = 0
        self.newest = 0.0

    @property
    def has_samples(self) -> bool:
        """Return whether any step was recorded."""
        return any(self.samples.values())

    def samples_of(self, source: Source) -> list[StepSample]:
        """Return the newest steps of a source, oldest first."""
        return list(self.samples.get(source.directory, ()))

    def add(self, all_news: Sequence[News], sources: Sequence[Source]) -> None:
        """Add what was recorded since the previous look.

        Args:
            all_news: The news of each source that has any.
            sources: All sources, with and without news.
        """
        for source in sources:
            self.attempt = max(self.attempt, source.attempt)
        new_events: list[RecordedEvent] = []
        for news in all_news:
            self.newest = max(self.newest, _newest_time(news))
            self._add_samples(news)
            self._add_scalars(news.scalars)
            self._add_loop_events(news)
            if news.source.kind == "supervisor":
                self._add_supervisor_events(news)
            new_events += [
                RecordedEvent(source=news.source.label, event=event) for event in news.events
            ]
        self.events.extend(sorted(new_events, key=lambda recorded: recorded.event.unix_seconds))

    def _add_samples(self, news: News) -> None:
        directory = news.source.directory
        if directory not in self.samples:
            self.samples[directory] = deque(maxlen=_KEPT_SAMPLES)
        self.samples[directory].extend(news.samples)

    def _add_scalars(self, scalars: Sequence[Scalar]) -> None:
        for scalar in scalars:
            # Remove it first, so that the newest value ends up last.
            self.scalars.pop(scalar.name, None)
            self.scalars[scalar.name] = scalar
        self.scalars = dict(list(self.scalars.items())[-_KEPT_SCALARS:])

    def _add_loop_events(self, news: News) -> None:
        directory = news.source.directory
        for event in news.events:
            progress = loop_progress(event, self.loops.get(directory))
            if progress is not None:
                self.loops[directory] = progress

    def _add_supervisor_events(self, news: News) -> None:
        for event in news.events:
            self.supervisor_event = event.kind
            attempt = event.data.get("attempt")
            # A restart event only announces the attempt.
            if isinstance(attempt, int) and event.kind != "restart":
                self.attempt = max(self.attempt, attempt)


def _newest_time(news: News) -> float:
    """Return the Unix time of the newest record of a source."""
    times = [sample.unix_seconds for sample in news.samples]
    times += [event.unix_seconds for event in news.events]
    times += [scalar.unix_seconds for scalar in news.scalars]
    return max(times, default=0.0)


def _start_of_guard(sources: Sequence[Source]) -> dict[str, object]:
    """Return what the first guard recorded when it began; empty without a guard."""
    for source in sources:
        if source.kind == "guard":
            return read_json(source.directory / START_FILE)
    return {}


def _order_of_roles(source: Source) -> int:
    role = "other" if source.info is None else source.info.role
    return _ROLES.index(role)


def _is_alive(source: Source, *, is_here: bool) -> bool | None:
    """Return whether the process of a source is alive; None if it runs on another machine."""
    if not is_here:
        return None
    if source.info is not None:
        return process_lives(source.info.pid, source.info.ticks)
    # A guard holds the lock of its run directory.
    return is_locked(source.directory.parent.parent / LOCK_FILE)


def _is_stopped(source: Source, *, is_alive: bool | None) -> bool:
    if source.info is None or not is_alive:
        return False
    return process_is_stopped(source.info.pid)


def _newest_step(standing: Standing | None, samples: Sequence[StepSample]) -> int:
    if standing is not None and standing.step:
        return standing.step
    return samples[-1].step if samples else 0


def _steps_per_second(samples: Sequence[StepSample], now: float | None) -> float:
    """Return the rate of the newest steps; NaN if it is unknown.

    The rate of a live process decreases once it has been silent for longer than two steps.

    Args:
        samples: Steps of a process, oldest first.
        now: Unix time; None if the process has ended.
    """
    newest = [sample for sample in samples[-RATE_SAMPLES:] if sample.seconds > 0]
    seconds = math.fsum(sample.seconds for sample in newest)
    if not seconds > 0:
        return math.nan
    if now is not None:
        silent_seconds = now - newest[-1].unix_seconds
        if silent_seconds > 2 * seconds / len(newest):
            seconds += silent_seconds
    return len(newest) / seconds


def _with_numbers(process: ProcessSnapshot, samples: Sequence[StepSample]) -> ProcessSnapshot:
    """Return a process with the numbers of its newest steps."""
    losses = tuple(sample.loss for sample in samples if sample.loss is not None)
    return replace(
        process,
        loss=losses[-1] if losses else None,
        losses=losses,
        grad_norm=_newest_number(samples, "grad_norm"),
        learning_rate=_newest_number(samples, "learning_rate"),
        wait_share=_wait_share(samples),
        host_bytes=_newest_size(samples, "host_bytes"),
        device_bytes=_newest_size(samples, "device_allocated_bytes"),
    )


def _by_optimizer(
    process: ProcessSnapshot, source: Source, samples: Sequence[StepSample]
) -> tuple[ProcessSnapshot, ...]:
    """Return one snapshot per optimizer that has stepped, if there are several optimizers."""
    names = read_optimizers(source.directory)
    if len(names) < 2:
        return ()
    processes = []
    for number, name in enumerate(names, start=1):
        own_samples = [sample for sample in samples if sample.optimizer == number]
        if own_samples:
            labelled = replace(process, label=f"{process.label}, {name}")
            processes.append(_with_numbers(labelled, own_samples))
    return tuple(processes)


def _newest_number(samples: Sequence[StepSample], name: str) -> float | None:
    """Return the newest value of a number that is not read at every step, or None."""
    for sample in reversed(samples):
        value: float | None = getattr(sample, name)
        if value is not None:
            return value
    return None


def _newest_size(samples: Sequence[StepSample], name: str) -> int:
    """Return the newest value of a size; it is 0 at steps where it was not read."""
    for sample in reversed(samples):
        size: int = getattr(sample, name)
        if size:
            return size
    return 0


def _wait_share(samples: Sequence[StepSample]) -> float:
    """Return the share of step time that was spent waiting for data; NaN if unknown."""
    timed = [sample for sample in samples if sample.seconds > 0 and sample.wait_seconds >= 0]
    seconds = math.fsum(sample.seconds for sample in timed)
    if not seconds > 0:
        return math.nan
    return math.fsum(sample.wait_seconds for sample in timed) / seconds


class Runs:
    """The newest runs in a directory, to poll.

    Args:
        folder: A directory of run directories, such as ``runs``.
        clock: The clock.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        # Runs that have not ended. Once a run has ended, its reader is dropped to free memory.
        self._watched: dict[Path, Watched] = {}
        self._snapshots: dict[Path, RunSnapshot] = {}

    def look(self) -> tuple[RunSnapshot, ...]:
        """Return the runs that have not ended, then those that have, each newest first."""
        paths = runs_in(self._folder)[:_MOST_RUNS]
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
        """Return whether a run has not ended, is new, or was restarted after its end."""
        if path in self._watched or path not in self._snapshots:
            return True
        return bool(is_locked(path / SUPERVISOR_FOLDER / LOCK_FILE))

    def _look_at(self, path: Path) -> None:
        if path not in self._watched:
            self._watched[path] = Watched(path, self._clock)
        self._snapshots[path] = self._watched[path].look()
        if self._snapshots[path].state == "ended":
            del self._watched[path]


def _contains_guard(run: RunSnapshot, guard: RunSnapshot) -> bool:
    """Return whether a run's snapshot makes the separate snapshot of its guard redundant.

    It does unless the guard's directory was used again after the run had ended.
    """
    if guard.path.resolve() not in run.guards:
        return False
    newer_seconds = (guard.newest or 0.0) - (run.newest or 0.0)
    return run.state != "ended" or newer_seconds < SILENT_SECONDS
