"""Copy the metrics and events of a run to sinks, during the run or after it has ended.

A process keeps its name across restarts, so its curves continue in the next attempt.
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
    """The values that one process measured or logged at one step.

    Args:
        process: Name of the process, which is the same in every attempt: "rank 3", or "trainer"
            without ranks.
        rank: Rank of the process; None without ranks.
        attempt: Number of the attempt, from 0.
        step: Optimizer step.
        unix_seconds: Unix time of the measurement.
        values: The values, keyed by name. With several optimizers, a name ends with the name of the
            optimizer, as in "loss/critic".
        scalar: The scalar, if the script logged the value itself; otherwise None. The name of a
            logged value starts with "logged/".
    """

    process: str
    rank: int | None
    attempt: int
    step: int
    unix_seconds: float
    values: Mapping[str, float]
    scalar: Scalar | None = None


class Sink(Protocol):
    """A target to which points and events are copied.

    Any method may raise an exception. In that case, the sink is closed, and copying to the other
    sinks continues.

    Attributes:
        name: The name of the sink in messages.
    """

    name: str

    def write(self, points: list[MetricPoint], events: list[RecordedEvent]) -> None:
        """Write new points and events. Those of the same process are ordered oldest first."""

    def close(self) -> None:
        """Finish writing and release all resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySummary:
    """The result of copying a run.

    The field names are those of `holdfast metrics --json`.

    Args:
        points: Number of copied steps, not including values that the script logged itself.
        events: Number of copied events.
        failures: One sentence for each sink that failed.
        gone: One sentence for each process whose steps were overwritten before being copied.
    """

    points: int
    events: int
    failures: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


def follow(
    run: Path, sinks: Sequence[Sink], stop: threading.Event, *, poll_seconds: float = POLL_SECONDS
) -> CopySummary:
    """Copy all records of a run until it has ended, close the sinks, and return a summary.

    If a sink raises an exception, it is closed, and the summary reports the failure. The exception
    is not propagated.

    Args:
        run: The run directory.
        sinks: The sinks to copy to.
        stop: Setting this event ends copying after one more poll. If it is already set, the
            existing records are copied once.
        poll_seconds: Seconds between two polls.
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
        except Exception as error:  # noqa: BLE001 - the files may be in any state, and the next poll may succeed
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
    """Writes to all sinks, and closes each sink that fails.

    Attributes:
        failures: One sentence for each failure.
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
            except Exception as error:  # noqa: BLE001 - a failing sink must not affect the others
                self._open_sinks.remove(sink)
                self._note_failure(sink, error)
                self._close(sink)

    def close(self) -> None:
        """Close all sinks that have not failed."""
        for sink in self._open_sinks:
            self._close(sink)

    def note_unreadable_run(self, error: Exception) -> None:
        """Record that the run directory cannot be read, but only once per error."""
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
    """Turns new records into points, with process names that stay the same across restarts."""

    def __init__(self) -> None:
        self._names: dict[Path, str] = {}
        # The number of sources that share a name, keyed by attempt, kind and name.
        self._uses: dict[tuple[int, str, str], int] = {}
        self._steps_were_observed = False

    def points(self, news: News) -> Iterator[MetricPoint]:
        """Yield the points for the new records of a source.

        The steps of guards are skipped once an observed process has recorded steps, because they
        are the same steps and the process has recorded more about them.
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
        """Return the name of a source, unique within its attempt and its kind.

        A guard gets the same name as its process.
        """
        if source.directory not in self._names:
            name = "trainer" if source.rank is None else f"rank {source.rank}"
            key = (source.attempt, source.kind, name)
            number = self._uses.get(key, 0) + 1
            self._uses[key] = number
            self._names[source.directory] = name if number == 1 else f"{name} ({number})"
        return self._names[source.directory]


def _optimizer(sample: StepSample, optimizers: Sequence[str]) -> str | None:
    """Return the name of the optimizer that stepped, or None if there is only one."""
    # Optimizers are numbered from 1.
    if len(optimizers) < 2 or not 1 <= sample.optimizer <= len(optimizers):
        return None
    return optimizers[sample.optimizer - 1]


def _values(sample: StepSample, optimizer: str | None) -> dict[str, float]:
    """Return the values that were measured at a step, keyed by name.

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
