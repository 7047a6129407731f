"""Follow a run: what every process recorded since the last look, whoever comes and goes.

Most folders of a run of many epochs are those of loader workers that ended long ago: these are read
    to their end and
forgotten.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import RunDirectoryError
from holdfast.core.events.event import Event
from holdfast.core.text import sanitise
from holdfast.recorder.black_box import EVENTS_FILE, STEPS_FILE
from holdfast.recorder.following import EventFollower, RingFollower, SampleFollower
from holdfast.recorder.progress import StepSample
from holdfast.recorder.reader import not_recorded_any_more
from holdfast.recorder.run_files import (
    PROCESS_FILE,
    PROCESSES_FOLDER,
    SAMPLES_FILE,
    SUPERVISED_FILE,
    ProcessInfo,
    process_lives,
    read_process_file,
)
from holdfast.recorder.scalars import SCALARS_FILE, Scalar, scalars_of
from holdfast.report.sources import (
    Source,
    find_sources,
    guard_run_of,
    guard_sources,
    is_sound_event,
    ran_here,
    read_json,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a source recorded since the last look, oldest first.

    Of a plain guard loss, norm and duration of steps.

    Steps that were overwritten before they were read are samples of the means of many.
    """

    source: Source
    samples: list[StepSample]
    events: list[Event]
    scalars: list[Scalar]


class RunFollower:
    """Follow the recordings of a run directory, events and `steps`.

    Processes and guards may appear later.
    """

    def __init__(self, run: Path, *, steps: bool = True) -> None:
        self._run = run
        self._steps = steps
        self._forgotten: set[str] = set()
        self._tracks: dict[Path, _Track] = {}
        self._guards: dict[Path, Source] = {}
        self.sources: list[Source] = []
        """All that were seen at the last look, without loader workers that have ended."""
        self.problems: dict[str, str] = {}
        """What cannot be read, by directory."""

    def new(self, *, hold_back: bool = True) -> list[News]:
        """Return the news of every source that has some.

        What cannot be read is noted in `problems`.
        """
        try:
            self.sources = [*find_sources(self._run, self._processes()), *self._guards.values()]
        except (OSError, TypeError) as error:
            self.problems[str(self._run)] = sanitise(error, most=200)
        here = ran_here(read_json(self._run / SUPERVISED_FILE))
        found: list[News] = []
        over: set[Path] = set()
        for source in self.sources:  # which grows by the guards that are named meanwhile
            if here and _is_over(source):  # asked before it is read: nothing comes after that
                over.add(source.directory)
            track = self._tracks.setdefault(source.directory, _Track(source, steps=self._steps))
            lost = track.lost
            try:
                news = track.new(source, hold_back=hold_back and source.directory not in over)
                words = not_recorded_any_more(source.directory) if track.lost > lost else ""
            except RunDirectoryError as error:
                self.problems[str(source.directory)] = sanitise(error.what, most=200)
                continue
            if words:
                self.problems[f"{source.directory} lost"] = (
                    f"of {sanitise(source.label, most=60)} {words}"
                )
            if news.samples or news.events or news.scalars:
                found.append(news)
                self._remember_guards(news)
        self.sources = [source for source in self.sources if source.directory not in over]
        for directory in over:
            self._forgotten.add(directory.name)
            del self._tracks[directory]
        return found

    def guard_runs(self) -> set[Path]:
        """Return the run directories of guards that processes of this run have opened, with
        links resolved.
        """
        return {folder.parent.parent.resolve() for folder in self._guards}

    def _processes(self) -> list[tuple[Path, ProcessInfo]]:
        """Return the folders of processes with what these say, oldest first.

        What they say may change.
        """
        folder = self._run / PROCESSES_FOLDER
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        self._forgotten &= names  # the supervisor removes those of most workers
        found = []
        for name in sorted(names - self._forgotten):
            info = read_process_file(folder / name / PROCESS_FILE)
            if info is not None:
                found.append((folder / name, info))
        return sorted(found, key=lambda pair: pair[1].started)

    def _remember_guards(self, news: News) -> None:
        for event in news.events:
            path = guard_run_of(event) if news.source.kind == "process" else None
            for guard in (
                guard_sources(path, attempt=news.source.attempt) if path is not None else ()
            ):
                if guard.directory.resolve() not in {
                    source.directory.resolve() for source in self.sources
                }:
                    self._guards[guard.directory] = guard
                    self.sources.append(guard)


def _is_over(source: Source) -> bool:
    """Return whether this is a loader worker that has ended.

    A trainer that has ended is still shown.
    """
    info = source.info
    return (
        info is not None
        and info.role == "loader worker"
        and not process_lives(info.pid, info.ticks)
    )


class _Track:
    """The followers of one directory."""

    def __init__(self, source: Source, *, steps: bool) -> None:
        self._events = EventFollower(source.directory / EVENTS_FILE)
        self._path = source.directory / (SAMPLES_FILE if source.kind == "process" else STEPS_FILE)
        self._samples = (
            SampleFollower(self._path) if steps and source.kind != "supervisor" else None
        )
        self._scalars = RingFollower(source.directory / SCALARS_FILE)
        self.lost = 0
        self._newest = 0.0

    def new(self, source: Source, *, hold_back: bool) -> News:
        samples = [] if self._samples is None else self._samples.new(hold_back=hold_back)
        lost, self.lost = self.lost, 0 if self._samples is None else self._samples.lost
        if samples and self.lost > lost:
            samples[:0] = _in_short(self._path, self._newest, samples[0].unix_seconds)
        self._newest = samples[-1].unix_seconds if samples else self._newest
        events = [event for event in self._events.new() if is_sound_event(event)]
        scalars: list[Scalar] = []
        # A damaged file costs its own values only; the report says so
        with suppress(RunDirectoryError):
            scalars = scalars_of(self._scalars.records()) if self._samples is not None else []
        return News(source=source, samples=samples, events=events, scalars=scalars)


def _in_short(path: Path, after: float, before: float) -> list[StepSample]:
    """Return what a ring does not hold any more between two times, as samples that are means of
    many.
    """
    from holdfast.recorder.history import read_history  # here: numpy takes a tenth of a second

    rows, found = read_history(path).rows, []
    for row in rows[(rows["time"] > after * 1e9) & (rows["time"] < before * 1e9)]:
        numbers = zip(row["mean"].tolist(), row["finite"], row["odd"], strict=True)
        known: list[Any] = [
            mean if finite else math.nan if odd else None for mean, finite, odd in numbers
        ]
        seconds, wait, *sizes = (math.nan if each is None else each for each in known[3:])
        sizes = [0 if math.isnan(each) else int(each) for each in sizes]
        where = int(row["time"]) / 1e9, int(row["optimizer"])
        found.append(
            StepSample._make([int(row["step"]), 0, *known[:3], seconds, wait, *sizes, *where])
        )
    return found
