"""What can be seen of a run right now, a `RunSnapshot` for each look.

Works over a directory that is half written, that a killed run left behind, or that another machine
writes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.core.clock import Clock
from holdfast.core.errors import RunDirectoryError
from holdfast.core.lock import is_locked
from holdfast.core.text import duration
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
from holdfast.report.run_follower import News, RunFollower
from holdfast.report.run_snapshot import ProcessSnapshot, RunSnapshot, State, phase_seen
from holdfast.report.sources import EventSeen, Source, ran_here, read_json, runs_in
from holdfast.report.verdicts import verdict_from, verdict_of

_KEPT_SAMPLES = 600
_KEPT_EVENTS = 50
_RATE_SAMPLES = 50
_MOST_RUNS = 40
LOCK_FILE = "lock"  # in the supervisor's folder and in a guard's run directory
# A run has ended when nobody holds its lock, its processes are gone and it says nothing any more
# for this long.
_SILENT_SECONDS = 5.0


class Watched:
    """Look at a run directory again and again."""

    def __init__(self, run: Path, clock: Clock) -> None:
        self._run = run
        self._clock = clock
        self._follower = RunFollower(run)
        self._history: dict[Path, deque[StepSample]] = {}
        self._events: deque[EventSeen] = deque(maxlen=_KEPT_EVENTS)
        self._loops: dict[Path, dict[str, int]] = {}
        self._scalars: dict[str, Scalar] = {}
        self._supervisor_said = ""
        self._judged: Verdict | None = None
        self._attempt = 0
        # On the monotonic clock: when this began to look, and when the run last gave a sign of
        # life.
        self._began = clock.monotonic_seconds()
        self._last_sign = -math.inf
        self._newest = 0.0

    @property
    def run(self) -> Path:
        """Return the run directory."""
        return self._run

    @property
    def lost(self) -> tuple[str, ...]:
        """Return which steps were overwritten before they were read, one sentence for each
        process.
        """
        return tuple(text for key, text in self._follower.problems.items() if key.endswith(" lost"))

    def look(self, *, hold_back: bool = True) -> RunSnapshot:
        """Return the run as it stands.

        The newest samples may be held back, as in `SampleFollower.new`.
        """
        news = self._follower.new(hold_back=hold_back)
        self._take_in(news)
        supervised = read_json(self._run / SUPERVISED_FILE)
        sources = self._follower.sources
        self._attempt = max([self._attempt, *(source.attempt for source in sources)])
        start = next(
            (read_json(each.directory / START_FILE) for each in sources if each.kind == "guard"), {}
        )
        here = ran_here(supervised)
        processes = [self._process(source, here=here) for source in self._shown(sources)]
        lost = self._supervisor_is_lost(supervised.get("supervisor_pid"), here=here)
        state = self._state(processes, lost=lost)
        return RunSnapshot(
            path=self._run,
            supervised=supervised,
            start=supervised or start,
            state=state,
            attempt=self._attempt,
            now=self._clock.unix_seconds(),
            newest=self._newest or None,
            processes=tuple(processes),
            events=tuple(self._events),
            verdict=self._verdict(state, lost=lost),
            outlook=self._outlook() if state != "ended" else "",
            news=tuple(news),
            guards=tuple(self._follower.guard_runs()),
            scalars=tuple(self._scalars.values()),
            problems=(
                *self._follower.problems.values(),
                *(["its supervisor was killed"] if lost else []),
            ),
        )

    def _verdict(self, state: State, *, lost: bool) -> Verdict | None:
        values = read_json(self._run / VERDICT_FILE) if state != "running" else {}
        # Nobody else will judge it
        if not values and state == "ended" and lost and self._judged is None:
            self._judged = verdict_of(self._run, [])
        return verdict_from(values) if values else self._judged

    def _outlook(self) -> str:
        for folder, facts in self._loops.items():
            marks = [
                each
                for each in self._history.get(folder, ())
                if each.unix_seconds >= facts["since"]
            ]
            # By the clock: what a guard calls the duration of a step has no waiting
            newest = marks[-_RATE_SAMPLES:]
            seconds = self._clock.unix_seconds() - newest[0].unix_seconds if newest else 0.0
            rate = (newest[-1].step - newest[0].step) / seconds if seconds > 0 else 0.0
            ranks = sum(each.parent == folder.parent for each in self._loops)
            return _outlook(facts, newest[-1].step if newest else facts["at"], rate, ranks)
        unknown = "epoch, total, time left and samples/s are not known: no Guard records them"
        return unknown if any(self._history.values()) else ""

    def _take_in(self, all_news: Sequence[News]) -> None:
        arrived: list[EventSeen] = []
        for news in all_news:
            source = news.source
            self._last_sign = max(self._last_sign, self._recorded_at(news))
            self._history.setdefault(source.directory, deque(maxlen=_KEPT_SAMPLES)).extend(
                news.samples
            )
            for scalar in news.scalars:
                self._scalars.pop(scalar.name, None)  # so that the newest is the last
                self._scalars[scalar.name] = scalar
            for event in news.events:
                if event.kind in ("loop", "epoch_ended"):
                    facts = {
                        name: value
                        for name, value in event.data.items()
                        if type(value) is int and value >= 0
                    }
                    before = (
                        self._loops.get(source.directory, {}) if event.kind == "epoch_ended" else {}
                    )
                    since = before.get("since", int(event.unix_seconds))
                    self._loops[source.directory] = {
                        **before,
                        **facts,
                        "at": event.global_step,
                        "since": since,
                    }
                arrived.append(EventSeen(source=source.label, event=event))
                attempt = event.data.get("attempt")
                if source.kind == "supervisor":
                    self._supervisor_said = event.kind
                    # Which only announces it
                    if isinstance(attempt, int) and event.kind != "restart":
                        self._attempt = max(self._attempt, attempt)
        self._scalars = dict(list(self._scalars.items())[-_KEPT_EVENTS:])
        self._events.extend(sorted(arrived, key=lambda seen: seen.event.unix_seconds))

    def _recorded_at(self, news: News) -> float:
        """Return when the newest of it was recorded, on the monotonic clock.

        What is new here may be of last week.
        """
        times = [sample.unix_seconds for sample in news.samples] + [
            event.unix_seconds for event in news.events
        ]
        times += [scalar.unix_seconds for scalar in news.scalars]
        self._newest = max([self._newest, *times])
        ago = self._clock.unix_seconds() - max(times, default=0.0)
        return self._clock.monotonic_seconds() - max(0.0, ago)

    def _shown(self, sources: list[Source]) -> list[Source]:
        """Return the processes of the newest attempt, trainers first.

        Guards where nothing else trains.
        """
        newest = [
            source
            for source in sources
            if source.kind == "process" and source.attempt == self._attempt
        ]
        order = {"trainer": 0, "launcher": 1, "other": 2, "loader worker": 3}
        newest.sort(key=lambda source: order[source.info.role] if source.info else 2)
        if any(self._history.get(source.directory) for source in newest):
            return newest
        return newest + [source for source in sources if source.kind == "guard"]

    def _process(self, source: Source, *, here: bool) -> ProcessSnapshot:
        standing: Standing | None = None
        alive: bool | None = None
        if source.info is not None:
            try:
                standing = read_board(source.directory / BOARD_FILE)
            except (RunDirectoryError, OSError) as error:
                self._follower.problems[str(source.directory)] = getattr(error, "what", str(error))
            alive = process_lives(source.info.pid, source.info.ticks) if here else None
        elif here:
            alive = is_locked(source.directory.parent.parent / LOCK_FILE)
        since = None
        if standing is not None and alive:
            since = max(0.0, self._clock.monotonic_seconds() - standing.since_seconds)
        history = list(self._history.get(source.directory, ()))
        last_step = history[-1].step if history else 0
        seen = ProcessSnapshot(
            label=source.label,
            role=source.info.role if source.info else "guard",
            info=source.info,
            alive=alive,
            stopped=bool(alive and source.info is not None and process_is_stopped(source.info.pid)),
            phase=phase_seen(standing, source.info.role if source.info else "guard"),
            since_seconds=since,
            step=standing.step if standing and standing.step else last_step,
            steps_per_second=_rate(history, self._clock.unix_seconds() if alive else None),
            **_recent(history),
        )
        names = read_optimizers(source.directory)
        own = {
            n: [each for each in history if each.optimizer == n] for n in range(1, len(names) + 1)
        }
        apart = [
            replace(seen, label=f"{seen.label}, {names[n - 1]}", **_recent(own[n]))
            for n in own
            if own[n]
        ]
        return replace(seen, optimizers=tuple(apart) if len(names) > 1 else ())

    def _supervisor_is_lost(self, pid: object, *, here: bool) -> bool:
        """Return whether the supervisor has gone without a word.

        That was noted, or its process is gone.
        """
        if self._supervisor_said in ("", "stopped"):
            return False
        if (self._run / SUPERVISOR_FOLDER / LOST_FILE).exists():
            return True
        locked = is_locked(self._run / SUPERVISOR_FOLDER / LOCK_FILE)
        return (
            here and locked is False and isinstance(pid, int) and not Path(f"/proc/{pid}").exists()
        )

    def _state(self, processes: list[ProcessSnapshot], *, lost: bool) -> State:
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
        closed = self._events and self._events[-1].event.kind == "closed"
        if self._supervisor_said == "stopped" or lost or closed:
            return "ended"
        last = self._last_sign if math.isfinite(self._last_sign) else self._began
        silent = self._clock.monotonic_seconds() - last
        known = bool(processes or self._supervisor_said)
        return "ended" if known and silent >= _SILENT_SECONDS else "running"


class Runs:
    """Look again and again at the newest runs in a directory."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder, self._clock = folder, clock
        self._watched: dict[Path, Watched] = {}
        self._seen: dict[Path, RunSnapshot] = {}

    def look(self) -> tuple[RunSnapshot, ...]:
        """Return the runs: first those that live, then those that have ended, each the newest
        first.
        """
        for path in (found := runs_in(self._folder)[:_MOST_RUNS]):
            over = path in self._seen and path not in self._watched
            if not over or is_locked(path / SUPERVISOR_FOLDER / LOCK_FILE):
                watched = self._watched.setdefault(path, Watched(path, self._clock))
                self._seen[path] = watched.look()
                if self._seen[path].state == "ended":
                    del self._watched[path]  # with all that it has read
        runs = [self._seen[path] for path in found]
        shown = [run for run in runs if not any(_shows(other, run) for other in runs)]
        return tuple(sorted(shown, key=lambda run: run.state == "ended"))


def _shows(run: RunSnapshot, guard: RunSnapshot) -> bool:
    """Return whether the latter is the directory of a guard of a run, and nothing was recorded
    there after it.
    """
    after = (guard.newest or 0.0) - (run.newest or 0.0)
    return guard.path.resolve() in run.guards and (run.state != "ended" or after < _SILENT_SECONDS)


def _outlook(facts: Mapping[str, int], step: int, rate: float, ranks: int) -> str:
    """Say how far a guard's loop is, from its events.

    What they do not say is said to be unknown.
    """
    length, epochs, begun = (
        facts.get("steps", 0),
        facts.get("max_epochs"),
        facts.get("epochs", facts.get("epoch", 0)),
    )
    ends = [facts["max_steps"]] if "max_steps" in facts else []
    ends += [facts["at"] + (epochs - begun) * length] if epochs is not None and length else []
    epoch = begun + 1 + (max(0, step - facts["at"]) // length if length else 0)
    words = [f"epoch {epoch}" if epochs is None else f"epoch {min(epoch, epochs)} of {epochs}"]
    words.append(
        f"step {step:,} of " + (f"{min(ends):,}" if ends else "a total that is not known yet")
    )
    if ends and rate > 0:
        words.append(f"{duration(max(0, min(ends) - step) / rate)} left")
    samples = (
        ranks * facts.get("batches", 0) * facts.get("batch_size", 0) * rate / length
        if length
        else 0.0
    )
    both = (
        f"{float(f'{each:.3g}'):,g} {name}/s"
        for each, name in ((samples, "samples"), (rate, "steps"))
    )
    words.append(f"{' and '.join(both)} with all breaks" if samples else "samples/s not known")
    return ", ".join(words)


def _recent(history: Sequence[StepSample]) -> dict[str, Any]:
    """Return the fields of a `ProcessSnapshot` that its newest samples fill."""
    timed = [each for each in history if each.seconds > 0 and each.wait_seconds >= 0]
    seconds = math.fsum(each.seconds for each in timed)
    losses = [each.loss for each in history if each.loss is not None]
    norms = [each.grad_norm for each in history if each.grad_norm is not None]
    rates = [each.learning_rate for each in history if each.learning_rate is not None]
    return {
        "loss": losses[-1] if losses else None,
        "losses": tuple(losses),
        "grad_norm": norms[-1] if norms else None,
        "learning_rate": rates[-1] if rates else None,
        "wait_share": (
            math.fsum(each.wait_seconds for each in timed) / seconds if seconds > 0 else math.nan
        ),
        "host_bytes": next((each.host_bytes for each in reversed(history) if each.host_bytes), 0),
        "device_bytes": next(
            (b for each in reversed(history) if (b := each.device_allocated_bytes)), 0
        ),
    }


def _rate(history: list[StepSample], now: float | None) -> float:
    """Return steps a second.

    A process that runs and has been silent for longer than two steps slows down.
    """
    newest = [each for each in history[-_RATE_SAMPLES:] if each.seconds > 0]
    seconds = math.fsum(each.seconds for each in newest)
    if not seconds > 0:
        return math.nan
    silent = 0.0 if now is None else now - newest[-1].unix_seconds
    return len(newest) / (seconds + (silent if silent > 2 * seconds / len(newest) else 0.0))
