"""Copy a run's metrics and events to sinks, while the run is in progress or after it has ended.

Process names stay the same across restarts, so curves continue in the next attempt.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.core.clock import SystemClock
from holdfast.core.text import sanitise
from holdfast.recorder.progress import StepSample
from holdfast.recorder.run_files import read_optimizers
from holdfast.recorder.scalars import Scalar
from holdfast.report.live.live_run import LiveRun
from holdfast.report.live.watching import Watched
from holdfast.report.run_follower import News, events_in_time_order
from holdfast.report.sources import RecordedEvent, RunSource

POLL_SECONDS = 1.0
_MAX_ERROR_CHARACTERS = 300
_log = logging.getLogger("holdfast")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPoint:
    """What one process measured at one step.

    Args:
        process: "rank 3", or "trainer" without ranks: the same name in every attempt.
        rank: None without ranks.
        attempt: Number of the attempt, from 0.
        step: Optimizer step.
        unix_seconds: When it was recorded.
        values: What was measured, by name. If there are several optimizers, names such
            as "loss/critic" end with the optimizer.
        scalar: The logged value, if the script logged this point; its name in `values` starts with
            "logged/".
    """

    process: str
    rank: int | None
    attempt: int
    step: int
    unix_seconds: float
    values: Mapping[str, float]
    scalar: Scalar | None = None


class Sink(Protocol):
    """Where points and events go.

    Any method may raise an exception; then the sink is closed, and the others continue.

    Attributes:
        name: The display name.
    """

    name: str

    def write(self, points: list[MetricPoint], events: list[RecordedEvent]) -> None:
        """Write new points and events, oldest first for each process."""

    def close(self) -> None:
        """Finish what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySummary:
    """What was copied to the sinks.

    The field names are those of `holdfast metrics --json`.

    Args:
        points: Number of steps.
        events: Number of events.
        failures: Which sinks failed and why.
        gone: Sentences about steps that were overwritten before they could be copied.
    """

    points: int
    events: int
    failures: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


def follow(
    run: Path, sinks: Sequence[Sink], stop: threading.Event, *, poll_seconds: float = POLL_SECONDS
) -> CopySummary:
    """Copy everything recorded so far, then follow the run until it ends; close the sinks.

    Exceptions of sinks are not propagated: a sink that fails is closed and reported.

    Args:
        run: The run directory.
        sinks: Where to copy to.
        stop: When set, copying ends after one more look; if already set, everything is copied once.
        poll_seconds: Time between two looks.
    """
    watched = Watched(run, SystemClock())
    naming = _Naming()
    output = _Output(sinks)
    points_written = 0
    events_written = 0
    is_last_look = stop.is_set()
    while True:
        try:
            snapshot = watched.look(hold_back=not is_last_look)
        except Exception as error:  # noqa: BLE001 - whatever lies in the run directory, the next look may succeed
            output.note_unreadable_run(error)
            snapshot = LiveRun(path=run, state="running")
        points = [point for news in snapshot.news for point in naming.points(news)]
        events = events_in_time_order(snapshot.news)
        output.write(points, events)
        points_written += sum(point.scalar is None for point in points)
        events_written += len(events)
        if is_last_look:
            break
        is_last_look = snapshot.state == "ended" or stop.wait(poll_seconds)
    output.close()
    return CopySummary(
        points=points_written,
        events=events_written,
        failures=tuple(output.failures),
        gone=watched.lost,
    )


class _Output:
    """Writes to sinks, and closes those that fail.

    Attributes:
        failures: What failed and why, one sentence each.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._open_sinks = list(sinks)
        self.failures: list[str] = []

    def write(self, points: list[MetricPoint], events: list[RecordedEvent]) -> None:
        """Write to all sinks that have not failed yet."""
        if not points and not events:
            return
        for sink in list(self._open_sinks):
            try:
                sink.write(points, events)
            except Exception as error:  # noqa: BLE001 - the client of one sink must not end the others
                self._open_sinks.remove(sink)
                self._note_failure(sink, error)
                self._close(sink)

    def close(self) -> None:
        """Close all sinks that have not failed."""
        for sink in self._open_sinks:
            self._close(sink)

    def note_unreadable_run(self, error: Exception) -> None:
        """Note once that the run directory cannot be read."""
        failure = f"the run directory cannot be read: {_describe(error)}"
        if failure not in self.failures:
            self.failures.append(failure)
            _log.warning("%s", failure)

    def _close(self, sink: Sink) -> None:
        try:
            sink.close()
        except Exception as error:  # noqa: BLE001 - as in `write`
            self._note_failure(sink, error)

    def _note_failure(self, sink: Sink, error: Exception) -> None:
        failure = f"{sink.name}: {_describe(error)}"
        self.failures.append(failure)
        _log.warning("no more metrics are written to %s", failure)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {sanitise(error, most=_MAX_ERROR_CHARACTERS)}"


class _Naming:
    """Turns the news of a run into points, with process names that survive restarts."""

    def __init__(self) -> None:
        self._names: dict[Path, str] = {}
        # How many sources share a name, by attempt, kind and name.
        self._uses: dict[tuple[int, str, str], int] = {}
        self._steps_were_observed = False

    def points(self, news: News) -> Iterator[MetricPoint]:
        """Yield the points of a source.

        A guard's steps are skipped once an observed process has made steps: they are the same
        steps, and the process recorded more about them.
        """
        source = news.source
        if source.kind == "process" and news.samples:
            self._steps_were_observed = True
        name = self._name(source)
        if source.kind == "process" or not self._steps_were_observed:
            optimizers = read_optimizers(source.directory)
            for sample in news.samples:
                yield MetricPoint(
                    process=name,
                    rank=source.rank,
                    attempt=source.attempt,
                    step=sample.step,
                    unix_seconds=sample.unix_seconds,
                    values=_values(sample, _optimizer(sample, optimizers)),
                )
        for scalar in news.scalars:
            yield MetricPoint(
                process=name,
                rank=source.rank,
                attempt=source.attempt,
                step=scalar.step,
                unix_seconds=scalar.unix_seconds,
                values={f"logged/{scalar.name}": scalar.value},
                scalar=scalar,
            )

    def _name(self, source: RunSource) -> str:
        """Return a name that is unique within the attempt; a guard shares that of its process."""
        if source.directory not in self._names:
            name = "trainer" if source.rank is None else f"rank {source.rank}"
            key = (source.attempt, source.kind, name)
            number = self._uses.get(key, 0) + 1
            self._uses[key] = number
            self._names[source.directory] = name if number == 1 else f"{name} ({number})"
        return self._names[source.directory]


def _optimizer(sample: StepSample, optimizers: Sequence[str]) -> str | None:
    """Return the optimizer that stepped, if there are several; they are numbered from 1."""
    if len(optimizers) < 2 or not 1 <= sample.optimizer <= len(optimizers):
        return None
    return optimizers[sample.optimizer - 1]


def _values(sample: StepSample, optimizer: str | None) -> dict[str, float]:
    """Return the values measured at a step, without those that were not read.

    Args:
        sample: The step.
        optimizer: The optimizer that stepped; None if there is only one.
    """
    suffix = "" if optimizer is None else f"/{sanitise(optimizer, most=60)}"
    numbers = {
        "loss": sample.loss,
        "grad_norm": sample.grad_norm,
        "learning_rate": sample.learning_rate,
    }
    values = {name + suffix: number for name, number in numbers.items() if number is not None}
    if sample.seconds >= 0:
        values["step_seconds"] = sample.seconds
    if sample.seconds > 0 and sample.wait_seconds >= 0:
        values["wait_share"] = min(sample.wait_seconds / sample.seconds, 1.0)
    sizes = {
        "host_memory_bytes": sample.host_bytes,
        "device_allocated_bytes": sample.device_allocated_bytes,
        "device_reserved_bytes": sample.device_reserved_bytes,
        "device_peak_bytes": sample.device_peak_bytes,
    }
    return values | {name: float(size) for name, size in sizes.items() if size}
