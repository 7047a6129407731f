"""Follow a run: at each poll, return the new records of each process and guard.

Processes and guards may appear at any time. In a run of many epochs, most process folders are those
of loader workers that ended long ago. The records of such workers are read completely, and their
folders are then ignored. ``page.gathering`` and ``live.watching`` build their views from the
records.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import RunDirectoryError
from holdfast.core.text import sanitise
from holdfast.recorder.black_box import EVENTS_FILE
from holdfast.recorder.following import EventFollower, RingFollower, SampleFollower
from holdfast.recorder.progress import StepSample
from holdfast.recorder.reader import describe_lost_steps
from holdfast.recorder.run_files import (
    PROCESS_FILE,
    PROCESSES_FOLDER,
    SUPERVISED_FILE,
    ProcessInfo,
    process_lives,
    read_process_file,
)
from holdfast.recorder.scalars import SCALARS_FILE, Scalar, scalars_of
from holdfast.report.sources import (
    RecordedEvent,
    RunSource,
    find_sources,
    guard_run_of,
    guard_sources,
    is_sound_event,
    ran_here,
    read_json,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """New records of a source since the previous poll, oldest first.

    Args:
        source: The source of the records.
        samples: Samples of steps. Samples that were overwritten before they could be read are
            replaced by means over many steps. A guard records only the loss, the gradient norm and
            the duration.
        events: Events with a valid time and step.
        scalars: Values that the script logged.
    """

    source: RunSource
    samples: list[StepSample]
    events: list[RecordedEvent]
    scalars: list[Scalar]


def events_in_time_order(all_news: Sequence[News]) -> list[RecordedEvent]:
    """Return the events of all sources in chronological order."""
    events = [recorded for news in all_news for recorded in news.events]
    return sorted(events, key=lambda recorded: recorded.event.unix_seconds)


class RunFollower:
    """Follows the recordings in a run directory.

    Args:
        run: The run directory.
        steps: Whether to read steps and scalars in addition to events.

    Attributes:
        sources: The sources at the last poll, without finished loader workers.
        problems: A sentence for each path that cannot be read, keyed by the path.
        lost_steps: A sentence for each source whose steps were overwritten before they could be
            read, keyed by the path of its directory.
    """

    def __init__(self, run: Path, *, steps: bool = True) -> None:
        self._run = run
        self._steps = steps
        # Folder names of finished loader workers whose records have been read completely.
        self._finished_workers: set[str] = set()
        self._followers: dict[Path, _SourceFollower] = {}
        # Guards that were opened outside the run directory by processes of the run, keyed by the
        # directory of their recordings.
        self._guards: dict[Path, RunSource] = {}
        self.sources: list[RunSource] = []
        self.problems: dict[str, str] = {}
        self.lost_steps: dict[str, str] = {}

    def new(self, *, hold_back: bool = True) -> list[News]:
        """Return the new records of each source since the previous call.

        Files that cannot be read are added to `problems`.

        Args:
            hold_back: Whether to hold back samples whose loss is still missing; see
                `SampleFollower.new`.
        """
        self._find_sources()
        runs_here = ran_here(read_json(self._run / SUPERVISED_FILE))
        all_news: list[News] = []
        finished: set[Path] = set()
        # `_add_guards` appends to this list during the loop, because events may name further
        # guards.
        for source in self.sources:
            # Check this before reading, because the records that are read are complete only if the
            # worker has already ended.
            if runs_here and _is_finished_worker(source):
                finished.add(source.directory)
            news = self._read(source, hold_back=hold_back and source.directory not in finished)
            if news is not None and (news.samples or news.events or news.scalars):
                all_news.append(news)
                self._add_guards(news)
        self._forget(finished)
        return all_news

    def guard_runs(self) -> set[Path]:
        """Return the run directories of guards outside this run directory, with links resolved."""
        return {directory.parent.parent.resolve() for directory in self._guards}

    def _find_sources(self) -> None:
        try:
            self.sources = find_sources(self._run, self._processes())
            self.sources += self._guards.values()
        except (OSError, TypeError) as error:
            self.problems[str(self._run)] = sanitise(error, most=200)

    def _processes(self) -> list[tuple[Path, ProcessInfo]]:
        """Return the folder and the description of each process, oldest first.

        Descriptions are read at every poll, because they change: for example, a process becomes a
        trainer at its first step.
        """
        folder = self._run / PROCESSES_FOLDER
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        # The supervisor removes the folders of most finished workers.
        self._finished_workers &= names
        processes = []
        for name in sorted(names - self._finished_workers):
            info = read_process_file(folder / name / PROCESS_FILE)
            if info is not None:
                processes.append((folder / name, info))
        return sorted(processes, key=lambda process: process[1].started)

    def _read(self, source: RunSource, *, hold_back: bool) -> News | None:
        """Return the new records of a source, or None if they cannot be read."""
        directory = source.directory
        if directory not in self._followers:
            self._followers[directory] = _SourceFollower(source, steps=self._steps)
        follower = self._followers[directory]
        lost_before = follower.lost
        try:
            news = follower.new(source, hold_back=hold_back)
            lost_steps = ""
            if follower.lost > lost_before:
                lost_steps = describe_lost_steps(directory)
        except RunDirectoryError as error:
            self.problems[str(directory)] = sanitise(error.what, most=200)
            return None
        if lost_steps:
            label = sanitise(source.label, most=60)
            self.lost_steps[str(directory)] = f"{label}: {lost_steps}"
        return news

    def _add_guards(self, news: News) -> None:
        """Follow the guards whose run directories are named in a process's new events."""
        if news.source.kind != "process":
            return
        for recorded in news.events:
            run = guard_run_of(recorded.event)
            if run is None:
                continue
            for guard in guard_sources(run, attempt=news.source.attempt):
                followed = {source.directory.resolve() for source in self.sources}
                if guard.directory.resolve() not in followed:
                    self._guards[guard.directory] = guard
                    self.sources.append(guard)

    def _forget(self, finished: set[Path]) -> None:
        self.sources = [source for source in self.sources if source.directory not in finished]
        for directory in finished:
            self._finished_workers.add(directory.name)
            del self._followers[directory]


def _is_finished_worker(source: RunSource) -> bool:
    """Return whether a source is a loader worker that has ended.

    Trainers that have ended are kept, because views show them.
    """
    info = source.info
    if info is None or info.role != "loader worker":
        return False
    return not process_lives(info.pid, info.ticks)


class _SourceFollower:
    """Follows the ring buffers of events, scalars and steps in the directory of one source."""

    def __init__(self, source: RunSource, *, steps: bool) -> None:
        directory = source.directory
        self._events = EventFollower(directory / EVENTS_FILE)
        self._scalars = RingFollower(directory / SCALARS_FILE)
        self._steps_path = source.steps_path
        self._samples: SampleFollower | None = None
        if steps and source.kind != "supervisor":
            self._samples = SampleFollower(self._steps_path)
        # Unix time of the newest step returned so far.
        self._newest = 0.0

    @property
    def lost(self) -> int:
        """Return the number of steps that were overwritten before they could be read."""
        return 0 if self._samples is None else self._samples.lost

    def new(self, source: RunSource, *, hold_back: bool) -> News:
        """Return the new records. Raises H305 if the ring of steps or events is damaged."""
        samples = self._new_samples(hold_back=hold_back)
        events = [
            RecordedEvent(source=source.label, event=event, attempt=source.attempt)
            for event in self._events.new()
            if is_sound_event(event)
        ]
        return News(source=source, samples=samples, events=events, scalars=self._new_scalars())

    def _new_samples(self, *, hold_back: bool) -> list[StepSample]:
        if self._samples is None:
            return []
        lost_before = self.lost
        samples = self._samples.new(hold_back=hold_back)
        if not samples:
            return []
        if self.lost > lost_before:
            means = _means_between(self._steps_path, self._newest, samples[0].unix_seconds)
            samples = [*means, *samples]
        self._newest = samples[-1].unix_seconds
        return samples

    def _new_scalars(self) -> list[Scalar]:
        if self._samples is None:
            return []
        # If this file is damaged, only logged values are lost. The page reports the damage.
        with suppress(RunDirectoryError):
            return scalars_of(self._scalars.records())
        return []


def _means_between(path: Path, after: float, before: float) -> Iterator[StepSample]:
    """Yield replacements for the steps between two Unix times that were overwritten in a ring.

    Each sample is the mean over many steps, with the time and the number of the first of them.
    """
    # This is not imported at the top, because it imports numpy, which takes 0.1 s.
    from holdfast.recorder.history import read_history

    rows = read_history(path).rows
    for row in rows[(rows["time"] > after * 1e9) & (rows["time"] < before * 1e9)]:
        yield _sample_of_means(row)


def _sample_of_means(row: Any) -> StepSample:
    """Convert a row of ``recorder.history`` to a sample."""
    from holdfast.recorder.history import NAMES

    def mean(name: str) -> float | None:
        """Return the mean of the finite values; NaN if none is finite, None if there are none."""
        place = NAMES.index(name)
        if row["finite"][place]:
            return float(row["mean"][place])
        return math.nan if row["odd"][place] else None

    def seconds(name: str) -> float:
        value = mean(name)
        return math.nan if value is None else value

    def size(name: str) -> int:
        value = mean(name)
        return 0 if value is None or math.isnan(value) else int(value)

    return StepSample(
        step=int(row["step"]),
        micro_steps=0,
        loss=mean("loss"),
        grad_norm=mean("grad_norm"),
        learning_rate=mean("learning_rate"),
        seconds=seconds("seconds"),
        wait_seconds=seconds("wait_seconds"),
        host_bytes=size("host_bytes"),
        device_allocated_bytes=size("device_allocated_bytes"),
        device_reserved_bytes=size("device_reserved_bytes"),
        device_peak_bytes=size("device_peak_bytes"),
        unix_seconds=int(row["time"]) / 1e9,
        optimizer=int(row["optimizer"]),
    )
