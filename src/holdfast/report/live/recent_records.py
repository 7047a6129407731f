"""`RecentRecords`: the newest records of a run, as many as the live view can show."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from holdfast.recorder.progress import StepSample
from holdfast.recorder.scalars import Scalar
from holdfast.report.live.outlook import LoopProgress, loop_progress
from holdfast.report.run_follower import News, events_in_time_order
from holdfast.report.sources import RecordedEvent, RunSource

# Maximum number of records of each kind. More would not fit on a screen.
_KEPT_SAMPLES = 600
_KEPT_EVENTS = 50
_KEPT_SCALARS = 50


class RecentRecords:
    """The newest records of a run.

    Attributes:
        samples: Samples of steps, oldest first, keyed by the directory of their source.
        events: Events of all sources, oldest first.
        scalars: The newest value of each name; the most recently logged comes last.
        loops: Progress of each guard's training loop, keyed by the guard's directory.
        supervisor_event: Kind of the supervisor's newest event; empty if there is none.
        attempt: Number of the newest attempt.
        newest: Unix time of the newest record; 0 if there is none.
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

    def samples_of(self, source: RunSource) -> list[StepSample]:
        """Return the newest steps of a source, oldest first."""
        return list(self.samples.get(source.directory, ()))

    def add(self, all_news: Sequence[News], sources: Sequence[RunSource]) -> None:
        """Add the records that are new since the previous poll.

        Args:
            all_news: The new records of each source that has any.
            sources: All sources, including those without new records.
        """
        for source in sources:
            self.attempt = max(self.attempt, source.attempt)
        for news in all_news:
            self.newest = max(self.newest, newest_time(news))
            self._add_samples(news)
            self._add_scalars(news.scalars)
            self._add_loop_events(news)
            if news.source.kind == "supervisor":
                self._add_supervisor_events(news)
        self.events.extend(events_in_time_order(all_news))

    def _add_samples(self, news: News) -> None:
        directory = news.source.directory
        if directory not in self.samples:
            self.samples[directory] = deque(maxlen=_KEPT_SAMPLES)
        self.samples[directory].extend(news.samples)

    def _add_scalars(self, scalars: Sequence[Scalar]) -> None:
        for scalar in scalars:
            # Remove the old value first, because updating a key would not move it to the end.
            self.scalars.pop(scalar.name, None)
            self.scalars[scalar.name] = scalar
        self.scalars = dict(list(self.scalars.items())[-_KEPT_SCALARS:])

    def _add_loop_events(self, news: News) -> None:
        directory = news.source.directory
        for recorded in news.events:
            progress = loop_progress(recorded.event, self.loops.get(directory))
            if progress is not None:
                self.loops[directory] = progress

    def _add_supervisor_events(self, news: News) -> None:
        for recorded in news.events:
            self.supervisor_event = recorded.event.kind
            attempt = recorded.event.data.get("attempt")
            # A restart event contains the number of the next attempt, which has not started yet.
            if isinstance(attempt, int) and recorded.event.kind != "restart":
                self.attempt = max(self.attempt, attempt)


def newest_time(news: News) -> float:
    """Return the Unix time of the newest of these records."""
    times = [sample.unix_seconds for sample in news.samples]
    times += [recorded.event.unix_seconds for recorded in news.events]
    times += [scalar.unix_seconds for scalar in news.scalars]
    return max(times, default=0.0)
