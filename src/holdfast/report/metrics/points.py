"""What is handed to a sink: points of curves, and events, with names that stay the same over restarts.

Does not: read a run, write to anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from holdfast.core.events import Event
from holdfast.recorder.progress import StepSample
from holdfast.report.run_follower import News
from holdfast.report.sources import Source

_OFTEN_UNREAD = ("loss", "grad_norm", "learning_rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What one process measured at one step.

    Args:
        process: "rank 3", or "trainer" where there are no ranks: the same in every attempt.
        rank: Or None.
        attempt: Of the supervisor, from 0.
        step: Optimizer steps.
        unix_seconds: When the step ended.
        values: By name, NaN where that was measured; what was not read is not there.
    """

    process: str
    rank: int | None
    attempt: int
    step: int
    unix_seconds: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """An event, and who recorded it."""

    process: str
    attempt: int
    event: Event


class Sink(Protocol):
    """Where points go. Every method may raise; the sink is then set aside and the others go on."""

    name: str
    """What people call it in a message."""

    def write(self, points: list[Point], events: list[Happened]) -> None:
        """Take what is new, oldest first for each process."""

    def close(self) -> None:
        """Finish what is written."""


class Naming:
    """Turn news of a run into points."""

    def __init__(self) -> None:
        self._names: dict[Path, str] = {}
        self._taken: dict[tuple[int, str], int] = {}
        self._observed = False

    def points(self, news: News) -> list[Point]:
        """Return the points of a source; none of a guard whose process is observed, which says more."""
        source = news.source
        if not news.samples:
            return []
        if source.kind == "process":
            self._observed = True
        elif self._observed:
            return []
        process = self._name(source)
        return [
            Point(
                process=process,
                rank=source.rank,
                attempt=source.attempt,
                step=sample.step,
                unix_seconds=sample.unix_seconds,
                values=_values(sample),
            )
            for sample in news.samples
        ]

    def _name(self, source: Source) -> str:
        if source.directory not in self._names:
            name = "trainer" if source.rank is None else f"rank {source.rank}"
            number = self._taken[source.attempt, name] = self._taken.get((source.attempt, name), 0) + 1
            self._names[source.directory] = name if number == 1 else f"{name} ({number})"
        return self._names[source.directory]


def _values(sample: StepSample) -> dict[str, float]:
    values: dict[str, float] = {name: v for name in _OFTEN_UNREAD if (v := getattr(sample, name)) is not None}
    if sample.seconds >= 0:
        values["step_seconds"] = sample.seconds
    if sample.seconds > 0 and sample.wait_seconds >= 0:
        values["wait_share"] = min(sample.wait_seconds / sample.seconds, 1.0)
    for name, count in (
        ("host_memory_bytes", sample.host_bytes),
        ("device_allocated_bytes", sample.device_allocated_bytes),
        ("device_reserved_bytes", sample.device_reserved_bytes),
        ("device_peak_bytes", sample.device_peak_bytes),
    ):
        if count:
            values[name] = float(count)
    return values
