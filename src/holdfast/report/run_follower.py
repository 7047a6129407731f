"""Follow a run: what every process recorded since the last look, whoever comes and goes.

Does not: keep what it read, wait, draw.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import RunDirectoryError
from holdfast.core.events import Event
from holdfast.recorder.black_box import EVENTS_FILE, STEPS_FILE, StepMark
from holdfast.recorder.following import EventFollower, MarkFollower, SampleFollower
from holdfast.recorder.progress import StepSample
from holdfast.recorder.run_files import SAMPLES_FILE
from holdfast.report.inert import inert
from holdfast.report.sources import Source, find_sources, guard_run_of, guard_sources, is_sound_event


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What one source recorded since the last look.

    Args:
        source: Who.
        samples: Steps, oldest first; of a plain guard with loss, gradient norm and duration only.
        events: Oldest first.
        lost: Samples that were overwritten before they were read, since the last look.
    """

    source: Source
    samples: list[StepSample]
    events: list[Event]
    lost: int = 0


class RunFollower:
    """Follow the recordings of a run directory.

    Args:
        run: The directory; processes and guards may appear later.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._tracks: dict[Path, _Track] = {}
        self._guards: dict[Path, Source] = {}
        self.sources: list[Source] = []
        """All that were seen at the last look."""
        self.problems: dict[str, str] = {}
        """What cannot be read, by directory."""

    def new(self, *, hold_back: bool = True) -> list[News]:
        """Return the news of every source that has some; what cannot be read is noted in `problems`.

        Args:
            hold_back: As `SampleFollower.new`.
        """
        try:
            self.sources = [*find_sources(self._run), *self._guards.values()]
        except (OSError, TypeError) as error:
            self.problems[str(self._run)] = inert(error, most=200)
        found = []
        for source in self.sources:
            track = self._tracks.setdefault(source.directory, _Track(source))
            try:
                news = track.new(source, hold_back=hold_back)
            except RunDirectoryError as error:
                self.problems[str(source.directory)] = inert(error.what, most=200)
                continue
            if news.samples or news.events or news.lost:
                found.append(news)
                self._remember_guards(news)
        return found

    def _remember_guards(self, news: News) -> None:
        own = {source.directory.resolve() for source in self.sources}
        for event in news.events:
            path = guard_run_of(event) if news.source.kind == "process" else None
            for guard in guard_sources(path, attempt=news.source.attempt) if path is not None else ():
                if guard.directory.resolve() not in own:
                    self._guards[guard.directory] = guard


class _Track:
    """The followers of one directory."""

    def __init__(self, source: Source) -> None:
        self._events = EventFollower(source.directory / EVENTS_FILE)
        self._samples = SampleFollower(source.directory / SAMPLES_FILE)
        self._marks = MarkFollower(source.directory / STEPS_FILE)
        self._lost = 0

    def new(self, source: Source, *, hold_back: bool) -> News:
        samples: list[StepSample] = []
        if source.kind == "process":
            samples = self._samples.new(hold_back=hold_back)
        elif source.kind == "guard":
            samples = [
                StepSample(
                    step=mark.global_step, micro_steps=0, unix_seconds=mark.unix_seconds, loss=mark.loss,
                    grad_norm=mark.grad_norm, learning_rate=math.nan, seconds=mark.seconds, wait_seconds=math.nan,
                )
                for mark in self._marks.new()
                if mark.mark is not StepMark.BEGUN
            ]  # fmt: skip
        lost, self._lost = self._samples.lost + self._marks.lost - self._lost, self._samples.lost + self._marks.lost
        events = [event for event in self._events.new() if is_sound_event(event)]
        return News(source=source, samples=samples, events=events, lost=lost)
