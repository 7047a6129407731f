"""What can be seen of a run right now, one `Glance` for each look; the terminal draws it (``live``).

Works over a directory that is half written, that a killed run left behind, or that another machine writes.

Does not: draw, judge (a verdict is only read), signal a process.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from holdfast.core.clock import Clock
from holdfast.core.errors import RunDirectoryError
from holdfast.core.lock import is_locked
from holdfast.explain.verdict import Verdict
from holdfast.recorder.progress import Phase, Standing, StepSample, read_board
from holdfast.recorder.run_files import (
    BOARD_FILE,
    LOST_FILE,
    SUPERVISED_FILE,
    SUPERVISOR_FOLDER,
    VERDICT_FILE,
    process_is_stopped,
    process_lives,
)
from holdfast.report.run_follower import News, RunFollower
from holdfast.report.sources import EventSeen, Source, ran_here, read_json
from holdfast.report.verdicts import verdict_from

_KEPT_SAMPLES = 600
_KEPT_EVENTS = 50
_RATE_SAMPLES = 50
LOCK_FILE = "lock"  # in the supervisor's folder and in a guard's run directory
# A run has ended when nobody holds its lock, its processes are gone and it says nothing any more for this long.
_SILENT_SECONDS = 5.0

State = Literal["running", "waits to restart", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGlance:
    """One process at one moment; numbers are None, NaN or 0 where they are unknown.

    Args:
        label: What people call it.
        role: As ``ProcessInfo.role``, or "guard".
        alive: Whether it runs; None if that cannot be seen from here.
        stopped: Whether a signal has stopped it.
        phase: What its board shows, or None.
        since_seconds: How long already, or None.
        step: Optimizer steps.
        steps_per_second: Over the newest 50 steps, counting the time since the last one.
        loss: Newest that was read, or None; NaN is a loss that is NaN.
        losses: Kept history of those that were read, oldest first.
        grad_norm: Newest that was read, or None.
        learning_rate: Newest that was read, or None.
        wait_share: Of time, waiting for the loader, over the kept history.
        host_bytes: Newest that was read, 0 if never.
        host_change_bytes: Since the first one kept.
        device_bytes: Allocated; likewise.
        device_change_bytes: Likewise.
    """

    label: str
    role: str
    alive: bool | None = None
    stopped: bool = False
    phase: Phase | None = None
    since_seconds: float | None = None
    step: int = 0
    steps_per_second: float = math.nan
    loss: float | None = None
    losses: tuple[float, ...] = ()
    grad_norm: float | None = None
    learning_rate: float | None = None
    wait_share: float = math.nan
    host_bytes: int = 0
    host_change_bytes: int = 0
    device_bytes: int = 0
    device_change_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """A run at one moment.

    Args:
        name: Of the run directory.
        command: What runs, or an empty text.
        state: As far as it shows.
        attempt: Of the supervisor, from 0.
        began: Unix time, or None.
        now: Unix time of the look.
        newest: Unix time of the newest that was recorded, or None.
        processes: Of the newest attempt: trainers first, then by start.
        events: The newest, oldest first.
        limits: Of the watchdog, phase and seconds, as far as they were written down.
        verdict: Of a run that ended, or None.
        problems: What cannot be read.
    """

    name: str
    command: str
    state: State
    attempt: int
    began: float | None
    now: float
    newest: float | None = None
    processes: tuple[ProcessGlance, ...] = ()
    events: tuple[EventSeen, ...] = ()
    limits: tuple[tuple[str, float], ...] = ()
    verdict: Verdict | None = None
    problems: tuple[str, ...] = ()


class Watched:
    """Look at a run again and again.

    Args:
        run: The run directory.
        clock: Time.
    """

    def __init__(self, run: Path, clock: Clock) -> None:
        self._run = run
        self._clock = clock
        self._follower = RunFollower(run)
        self._history: dict[Path, deque[StepSample]] = {}
        self._events: deque[EventSeen] = deque(maxlen=_KEPT_EVENTS)
        self._supervisor_said = ""
        self._attempt = 0
        # On the monotonic clock: when this began to look, and when the run last gave a sign of life.
        self._began = clock.monotonic_seconds()
        self._last_sign = -math.inf
        self._newest = 0.0

    def look(self) -> Glance:
        """Return the run as it stands."""
        self._take_news()
        supervised = read_json(self._run / SUPERVISED_FILE)
        sources = self._follower.sources
        self._attempt = max([self._attempt, *(source.attempt for source in sources)])
        here = ran_here(supervised)
        glances = [(source, self._process(source, here=here)) for source in self._shown(sources)]
        lost = self._supervisor_is_lost(supervised.get("supervisor_pid"), here=here)
        state = self._state([glance for _, glance in glances], lost=lost)
        problems = [*self._follower.problems.values(), *(["its supervisor was killed"] if lost else [])]
        verdict = read_json(self._run / VERDICT_FILE) if state != "running" else {}
        argv, began = supervised.get("argv"), supervised.get("started")
        return Glance(
            name=self._run.name,
            command=" ".join(map(str, argv)) if isinstance(argv, list) else "",
            state=state,
            attempt=self._attempt,
            began=float(began) if isinstance(began, (int, float)) else None,
            now=self._clock.unix_seconds(),
            newest=self._newest or None,
            processes=tuple(glance for _, glance in glances),
            events=tuple(self._events),
            limits=_limits(supervised.get("limits")),
            verdict=verdict_from(verdict) if verdict else None,
            problems=tuple(problems),
        )

    def _take_news(self) -> None:
        arrived: list[EventSeen] = []
        for news in self._follower.new():
            source = news.source
            self._last_sign = max(self._last_sign, self._recorded_at(news))
            self._history.setdefault(source.directory, deque(maxlen=_KEPT_SAMPLES)).extend(news.samples)
            for event in news.events:
                arrived.append(EventSeen(source=source.label, event=event))
                attempt = event.data.get("attempt")
                if source.kind == "supervisor":
                    self._supervisor_said = event.kind
                    self._attempt = max(self._attempt, attempt if isinstance(attempt, int) else 0)
        self._events.extend(sorted(arrived, key=lambda seen: seen.event.unix_seconds))

    def _recorded_at(self, news: News) -> float:
        """Return when the newest of it was recorded, on the monotonic clock: what is new here may be of last week."""
        times = [sample.unix_seconds for sample in news.samples] + [event.unix_seconds for event in news.events]
        self._newest = max([self._newest, *times])
        ago = self._clock.unix_seconds() - max(times, default=0.0)
        return self._clock.monotonic_seconds() - max(0.0, ago)

    def _shown(self, sources: list[Source]) -> list[Source]:
        """Return the processes of the newest attempt, trainers first; guards where nothing else trains."""
        newest = [source for source in sources if source.kind == "process" and source.attempt == self._attempt]
        order = {"trainer": 0, "launcher": 1, "other": 2, "loader worker": 3}
        newest.sort(key=lambda source: order[source.info.role] if source.info else 2)
        if any(self._history.get(source.directory) for source in newest):
            return newest
        return newest + [source for source in sources if source.kind == "guard"]

    def _process(self, source: Source, *, here: bool) -> ProcessGlance:
        standing: Standing | None = None
        alive: bool | None = None
        if source.info is not None:
            try:
                standing = read_board(source.directory / BOARD_FILE)
            except RunDirectoryError as error:
                self._follower.problems[str(source.directory)] = error.what
            alive = process_lives(source.info.pid, source.info.ticks) if here else None
        elif here:
            alive = is_locked(source.directory.parent.parent / LOCK_FILE)
        since = None
        if standing is not None and alive:
            since = max(0.0, self._clock.monotonic_seconds() - standing.since_seconds)
        history = list(self._history.get(source.directory, ()))
        glance = _glance(source, standing, history, alive, since, self._clock.unix_seconds())
        stopped = bool(alive and source.info is not None and process_is_stopped(source.info.pid))
        return replace(glance, stopped=stopped)

    def _supervisor_is_lost(self, pid: object, *, here: bool) -> bool:
        """Return whether the supervisor has gone without a word: that was noted, or its process is gone."""
        if self._supervisor_said in ("", "stopped"):
            return False
        if (self._run / SUPERVISOR_FOLDER / LOST_FILE).exists():
            return True
        locked = is_locked(self._run / SUPERVISOR_FOLDER / LOCK_FILE)
        return here and locked is False and isinstance(pid, int) and not Path(f"/proc/{pid}").exists()

    def _state(self, processes: list[ProcessGlance], *, lost: bool) -> State:
        supervised = is_locked(self._run / SUPERVISOR_FOLDER / LOCK_FILE)
        if self._supervisor_said == "restart" and supervised is not False:
            return "waits to restart"
        if supervised:
            self._last_sign = self._clock.monotonic_seconds()
            return "running"
        if any(process.alive for process in processes):
            self._last_sign = self._clock.monotonic_seconds()
            return "running"
        if any(process.alive is None for process in processes) and not lost:
            return "running"  # on another machine: nobody here can tell
        if self._supervisor_said == "stopped" or lost:
            return "ended"
        last = self._last_sign if math.isfinite(self._last_sign) else self._began
        silent = self._clock.monotonic_seconds() - last
        known = bool(processes or self._supervisor_said)
        return "ended" if known and silent >= _SILENT_SECONDS else "running"


def _limits(value: object) -> tuple[tuple[str, float], ...]:
    if not isinstance(value, dict):
        return ()
    pairs = [(str(name), each) for name, each in value.items() if isinstance(each, (int, float))]
    return tuple((name, float(each)) for name, each in pairs if math.isfinite(each))


def _glance(
    source: Source,
    standing: Standing | None,
    history: list[StepSample],
    alive: bool | None,  # noqa: FBT001 - three states
    since: float | None,
    now: float,
) -> ProcessGlance:
    timed = [each for each in history if each.seconds > 0 and each.wait_seconds >= 0]
    in_all = math.fsum(each.seconds for each in timed)
    host = [each.host_bytes for each in history if each.host_bytes]
    device = [each.device_allocated_bytes for each in history if each.device_allocated_bytes]
    losses = [each.loss for each in history if each.loss is not None]
    newest = history[-1] if history else None
    return ProcessGlance(
        label=source.label,
        role=source.info.role if source.info else "guard",
        alive=alive,
        phase=standing.phase if standing else None,
        since_seconds=since,
        step=standing.step if standing and standing.step else newest.step if newest else 0,
        steps_per_second=_rate(history, now if alive else None),
        loss=losses[-1] if losses else None,
        losses=tuple(losses),
        grad_norm=_newest(each.grad_norm for each in reversed(history)),
        learning_rate=_newest(each.learning_rate for each in reversed(history)),
        wait_share=math.fsum(each.wait_seconds for each in timed) / in_all if in_all > 0 else math.nan,
        host_bytes=host[-1] if host else 0,
        host_change_bytes=host[-1] - host[0] if host else 0,
        device_bytes=device[-1] if device else 0,
        device_change_bytes=device[-1] - device[0] if device else 0,
    )


def _newest(values: Iterable[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _rate(history: list[StepSample], now: float | None) -> float:
    """Return steps a second; a process that lives and has been silent for longer than two steps slows down."""
    newest = [each for each in history[-_RATE_SAMPLES:] if each.seconds > 0]
    seconds = math.fsum(each.seconds for each in newest)
    if not seconds > 0:
        return math.nan
    silent = 0.0 if now is None else now - newest[-1].unix_seconds
    return len(newest) / (seconds + (silent if silent > 2 * seconds / len(newest) else 0.0))
