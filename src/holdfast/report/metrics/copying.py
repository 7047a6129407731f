"""Copy what a run records to sinks, while it goes on or after its end, with names that outlive
restarts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.core.clock import SystemClock
from holdfast.core.events.event import Event
from holdfast.core.text import sanitise
from holdfast.recorder.progress import StepSample
from holdfast.recorder.run_files import read_optimizers
from holdfast.recorder.scalars import Scalar
from holdfast.report.run_follower import News
from holdfast.report.run_snapshot import RunSnapshot
from holdfast.report.sources import Source
from holdfast.report.watching import Watched

POLL_SECONDS = 1.0
# Of a sample
_SIZES = (
    "host_memory_bytes",
    "device_allocated_bytes",
    "device_reserved_bytes",
    "device_peak_bytes",
)
_log = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one process measured at one step; what was not read is not among the values.

    Names of values such as "loss/critic" end with the optimizer that stepped, where there are
    several. `scalar`: the script logged the value, whose name comes after ``logged/`` in `values`.
    `process` is "rank 3", or "trainer" where
    there are no ranks: the same in every attempt, which count from 0.
    """

    process: str
    rank: int | None
    attempt: int
    step: int
    unix_seconds: float
    values: Mapping[str, float]
    scalar: Scalar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """An event, and who recorded it."""

    process: str
    attempt: int
    event: Event


class Sink(Protocol):
    """Where points go. Every method may raise; the sink is then closed and the others go on."""

    name: str
    """What people call it in a message."""

    def write(self, points: list[Point], events: list[Happened]) -> None:
        """Take what is new, oldest first for each process."""

    def close(self) -> None:
        """Finish what is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """What sinks were given (steps as points), which failed and why, and which steps are not
    recorded any more.
    """

    points: int
    events: int
    failures: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


def follow(
    run: Path, sinks: Sequence[Sink], stop: threading.Event, *, poll_seconds: float = POLL_SECONDS
) -> Copied:
    """Copy everything recorded so far, then what is new every second, until the run ends.

    Then close the sinks.

    `stop` ends it too, after a last look; set already, one copy is made. Never raises for what a
    sink does: one that fails is closed, with a line in the log.
    """
    watched, naming = Watched(run, SystemClock()), _Naming()
    working, failures = list(sinks), list[str]()
    counts = {"points": 0, "events": 0}
    last = stop.is_set()
    while True:
        seen = _look(watched, failures, last=last)
        points = [point for each in seen.news for point in naming.points(each)]
        events = [
            Happened(process=each.source.label, attempt=each.source.attempt, event=event)
            for each in seen.news
            for event in each.events
        ]
        events.sort(key=lambda happened: happened.event.unix_seconds)
        counts["points"] += sum(point.scalar is None for point in points)
        counts["events"] += len(events)
        for sink in list(working) if points or events else ():
            try:
                sink.write(points, events)
            except Exception as error:  # noqa: BLE001 - a client of another project must not end the others
                working.remove(sink)
                failures.append(_failed(sink, error))
                _close(sink, failures)
        if last:
            break
        last = seen.state == "ended" or stop.wait(poll_seconds)
    for sink in working:
        _close(sink, failures)
    return Copied(**counts, failures=tuple(failures), gone=watched.lost)


def _look(watched: Watched, failures: list[str], *, last: bool) -> RunSnapshot:
    try:
        return watched.look(hold_back=not last)
    except Exception as error:  # noqa: BLE001 - whatever lies in the run directory: the next look may succeed
        failure = (
            f"the run directory cannot be read: {type(error).__name__}: {sanitise(error, most=300)}"
        )
        if failure not in failures:
            failures.append(failure)
            _log.warning("%s", failure)
        return RunSnapshot(path=watched.run, state="running")


def _close(sink: Sink, failures: list[str]) -> None:
    try:
        sink.close()
    except Exception as error:  # noqa: BLE001 - as above
        failures.append(_failed(sink, error))


def _failed(sink: Sink, error: Exception) -> str:
    failure = f"{sink.name}: {type(error).__name__}: {sanitise(error, most=300)}"
    _log.warning("metrics are not written any more to %s", failure)
    return failure


class _Naming:
    """Turns news of a run into points."""

    def __init__(self) -> None:
        self._names: dict[Path, str] = {}
        self._taken: dict[tuple[int, str, str], int] = {}
        self._observed = False

    def points(self, news: News) -> list[Point]:
        """Return the points of a source.

        No steps of a guard whose process is observed, which says more.
        """
        source, recorded = news.source, list[StepSample | Scalar](news.scalars)
        self._observed = self._observed or (source.kind == "process" and bool(news.samples))
        if source.kind == "process" or not self._observed:
            recorded = [*news.samples, *recorded]
        names = read_optimizers(source.directory)
        several = dict(enumerate(names, start=1)) if len(names) > 1 else {}
        return [
            Point(
                process=self._name(source),
                rank=source.rank,
                attempt=source.attempt,
                step=each.step,
                unix_seconds=each.unix_seconds,
                scalar=each if isinstance(each, Scalar) else None,
                values=(
                    {f"logged/{each.name}": each.value}
                    if isinstance(each, Scalar)
                    else _values(each, several.get(each.optimizer))
                ),
            )
            for each in recorded
        ]

    def _name(self, source: Source) -> str:
        if source.directory not in self._names:
            name = "trainer" if source.rank is None else f"rank {source.rank}"
            # A guard's are those of the process that it is in
            key = source.attempt, source.kind, name
            number = self._taken[key] = self._taken.get(key, 0) + 1
            self._names[source.directory] = name if number == 1 else f"{name} ({number})"
        return self._names[source.directory]


def _values(sample: StepSample, optimizer: str | None) -> dict[str, float]:
    often_unread = ("loss", "grad_norm", "learning_rate")
    of = "" if optimizer is None else f"/{sanitise(optimizer, most=60)}"
    values: dict[str, float] = {
        name + of: v for name in often_unread if (v := getattr(sample, name)) is not None
    }
    if sample.seconds >= 0:
        values["step_seconds"] = sample.seconds
    if sample.seconds > 0 and sample.wait_seconds >= 0:
        values["wait_share"] = min(sample.wait_seconds / sample.seconds, 1.0)
    return values | {
        name: float(count) for name, count in zip(_SIZES, sample[7:11], strict=True) if count
    }
