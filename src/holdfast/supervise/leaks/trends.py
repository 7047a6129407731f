"""Follow the memory of a run's trainers, from the supervisor, and ask for a trace when it leaks.

Each look applies the slope test of ``growth`` to the steps that were recorded since. Growth is
reported once it is certain, together with what a trainer has found to hold the memory (``tracer``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from holdfast.core.control_groups import memory_available_bytes
from holdfast.core.errors import RunDirectoryError
from holdfast.core.events.event import Event, EventData
from holdfast.core.events.process_events import MemoryTrend
from holdfast.core.text import duration, size
from holdfast.explain.signatures.leaks import signature_of
from holdfast.recorder.black_box import EVENTS_FILE
from holdfast.recorder.following import EventFollower, SampleFollower
from holdfast.recorder.progress import StepSample, request_trace
from holdfast.recorder.run_files import BOARD_FILE, SAMPLES_FILE, read_processes
from holdfast.supervise.leaks.growth import Growth, Reading, find_growth

MemoryKind = Literal["host", "device"]
# The slope of a long run needs no more readings, and the test compares only pairs of its windows.
_MAX_READINGS = 2_000
# Steps before the newest one that still count; a leak may begin late.
_MAX_STEPS = 32_768
# Growth is certain once the run has made this many times the steps at which it was first seen: by
# then, most warm-ups have come to rest.
_CERTAIN_AFTER = 1.25
# Growth of a run that is over must have reached this to be worth reporting.
_MIN_BYTES_LOOKING_BACK = 64 << 20
# A prediction is emitted again when the time that is left has come down to half.
_REPEAT_AT_SHARE = 0.5
_MAX_TEXT_LENGTH = 200
# Reading a ring again as a whole takes a fifth of a second; at most 1 % of the time goes into it.
_PAUSE_PER_LOOK = 100


@dataclass(frozen=True, slots=True)
class _NumberedReading:
    """A reading with the number of its step in this process, counted from 1."""

    number: int
    reading: Reading


@dataclass(slots=True)
class _ReadingHistory:
    """The readings of the newest steps; of many steps, every n-th.

    The whole ring would take 0.5 KiB per step.
    """

    readings: list[_NumberedReading] = field(default_factory=list)
    # How many readings were added so far, and which share of them is kept: every n-th.
    added: int = 0
    interval: int = 1

    def add(self, readings: Sequence[_NumberedReading], newest_number: int) -> None:
        """Add readings, and forget those of steps long before the newest one."""
        for reading in readings:
            if self.added % self.interval == 0:
                self.readings.append(reading)
            self.added += 1
        oldest_number = newest_number - _MAX_STEPS
        self.readings = [reading for reading in self.readings if reading.number > oldest_number]
        while len(self.readings) > _MAX_READINGS:
            self.readings = self.readings[::2]
            self.interval *= 2
        # Memory is read at fewer steps since these have become faster.
        if len(self.readings) < _MAX_READINGS // 4:
            self.interval = max(1, self.interval // 2)

    def find_growth(self) -> Growth | None:
        """Return how memory grows without end in these readings, or None."""
        return find_growth([reading.reading for reading in self.readings])

    def grew_early(self) -> bool:
        """Return whether memory grew already in the part after which a suspicion is certain."""
        count = int(len(self.readings) / _CERTAIN_AFTER)
        return find_growth([reading.reading for reading in self.readings[:count]]) is not None


@dataclass(slots=True)
class _Trainer:
    """What is known about the memory of one process, and what was reported of it."""

    folder: Path
    pid: int
    events: EventFollower
    samples: SampleFollower
    # Number of steps that were read, and the newest one as the training counts.
    step_count: int = 0
    step: int = 0
    history: dict[MemoryKind, _ReadingHistory] = field(
        default_factory=lambda: {"host": _ReadingHistory(), "device": _ReadingHistory()}
    )
    # Step at which growth was first seen.
    suspected_at: dict[MemoryKind, int] = field(default_factory=dict)
    # Growth that was reported, with the minutes that were left then, if that is known.
    reported: dict[MemoryKind, float | None] = field(default_factory=dict)
    trace_requests: int = 0


class MemoryTrends:
    """Follow the memory of the trainers of one attempt.

    Args:
        run_path: The run directory.
        emit: Records an event.
        say: Prints a message.
        attempt: Number of the attempt.
        clock: Monotonic seconds.
        available_bytes: Returns the memory that is left on the host, or None if unknown.
    """

    def __init__(
        self,
        run_path: Path,
        *,
        emit: Callable[[EventData], None],
        say: Callable[[str], None] = lambda _: None,
        attempt: int = 0,
        clock: Callable[[], float] = time.monotonic,
        available_bytes: Callable[[], int | None] = memory_available_bytes,
    ) -> None:
        self._run_path = run_path
        self._emit = emit
        self._say = say
        self._attempt = attempt
        self._clock = clock
        self._available_bytes = available_bytes
        # By the name of the process's folder.
        self._trainers: dict[str, _Trainer] = {}
        self._announced: set[str] = set()
        self._pause_until = 0.0
        # Whether the attempt is over: then nothing is printed, and nobody can trace it.
        self._is_over = False

    def look(self) -> None:
        """Read what was recorded since the last look, test it, and report what has changed."""
        began_at = self._clock()
        if began_at < self._pause_until:
            return
        for folder, process in read_processes(self._run_path):
            if process.role == "trainer" and process.attempt == self._attempt:
                # The files are being made, or a newer holdfast wrote them.
                with suppress(OSError, RunDirectoryError):
                    self._look_at(self._trainer_in(folder, process.pid))
        self._pause_until = began_at + _PAUSE_PER_LOOK * (self._clock() - began_at)

    def look_back(self) -> None:
        """Look at what an attempt that is over has recorded since the last look."""
        self._pause_until = 0.0
        self._is_over = True
        self.look()

    def _trainer_in(self, folder: Path, pid: int) -> _Trainer:
        trainer = self._trainers.get(folder.name)
        if trainer is None:
            trainer = _Trainer(
                folder=folder,
                pid=pid,
                events=EventFollower(folder / EVENTS_FILE),
                samples=SampleFollower(folder / SAMPLES_FILE),
            )
            self._trainers[folder.name] = trainer
        return trainer

    def _look_at(self, trainer: _Trainer) -> None:
        for event in trainer.events.new():
            if event.kind == "leak":
                line = _describe_leak(event)
                self._announce(line, key=line)
        samples = trainer.samples.new(hold_back=False)
        if samples:
            trainer.step = samples[-1].step
        elif not self._is_over:
            return
        first_number = trainer.step_count + 1
        trainer.step_count += len(samples)
        for kind, history in trainer.history.items():
            history.add(_readings_of(samples, kind, first_number), trainer.step_count)
            growth = history.find_growth()
            if growth is None:
                self._on_no_growth(trainer, kind)
            elif self._is_certain(trainer, kind, growth):
                self._on_growth(trainer, kind, growth)

    def _on_no_growth(self, trainer: _Trainer, kind: MemoryKind) -> None:
        """Drop a suspicion, and take back a report."""
        trainer.suspected_at.pop(kind, None)
        if kind in trainer.reported:
            del trainer.reported[kind]
            self._emit(MemoryTrend(pid=trainer.pid, what=kind, bytes_per_step=0))

    def _is_certain(self, trainer: _Trainer, kind: MemoryKind, growth: Growth) -> bool:
        """Return whether memory kept growing after it was suspected to.

        Of a run that is over, it must have grown in both parts of it.
        """
        suspected_at = trainer.suspected_at.setdefault(kind, trainer.step)
        if trainer.step >= _CERTAIN_AFTER * suspected_at:
            return True
        if not self._is_over or growth.grown_bytes < _MIN_BYTES_LOOKING_BACK:
            return False
        return trainer.history[kind].grew_early()

    def _on_growth(self, trainer: _Trainer, kind: MemoryKind, growth: Growth) -> None:
        """Report growth that is new, or whose end has come much nearer."""
        minutes_left = self._minutes_left(kind, growth)
        is_new = kind not in trainer.reported
        if not is_new and not _is_much_nearer(minutes_left, trainer.reported[kind]):
            return
        trainer.reported[kind] = minutes_left
        self._emit(
            MemoryTrend(
                pid=trainer.pid,
                what=kind,
                bytes_per_step=round(growth.bytes_per_step),
                between=(round(growth.low), round(growth.high)),
                grown_bytes=growth.grown_bytes,
                steps=growth.steps,
                minutes_left=None if minutes_left is None else round(minutes_left, 1),
                signature=signature_of("trend", on_host=kind == "host"),
            )
        )
        if is_new and not self._is_over:
            self._announce(_describe_growth(kind, growth, minutes_left), key=kind)
            trainer.trace_requests += 1
            with suppress(OSError):
                request_trace(trainer.folder / BOARD_FILE, trainer.trace_requests)

    def _minutes_left(self, kind: MemoryKind, growth: Growth) -> float | None:
        """Return the minutes until the host's memory is used up; None if unknown (a device)."""
        available_bytes = self._available_bytes() if kind == "host" else None
        if available_bytes is None:
            return None
        return growth.minutes_until_used(available_bytes)

    def _announce(self, line: str, *, key: str) -> None:
        """Print a line; if many ranks have one with the same key, only the first."""
        if key not in self._announced:
            self._announced.add(key)
            self._say(line)


def _readings_of(
    samples: Sequence[StepSample], kind: MemoryKind, first_number: int
) -> list[_NumberedReading]:
    """Return the readings in the samples of steps, the first of which has a number."""
    readings = []
    for number, sample in enumerate(samples, first_number):
        used_bytes = sample.host_bytes if kind == "host" else sample.device_allocated_bytes
        # 0 stands for a step at which memory was not read.
        if used_bytes > 0:
            reading = Reading(step=sample.step, seconds=sample.unix_seconds, used_bytes=used_bytes)
            readings.append(_NumberedReading(number, reading))
    return readings


def _is_much_nearer(minutes_left: float | None, minutes_before: float | None) -> bool:
    """Return whether the end has come so much nearer that it should be reported again."""
    if minutes_left is None:
        return False
    return minutes_before is None or minutes_left < _REPEAT_AT_SHARE * minutes_before


def _describe_growth(kind: MemoryKind, growth: Growth, minutes_left: float | None) -> str:
    memory = "memory" if kind == "host" else "device memory"
    text = f"{memory} grows by {size(growth.bytes_per_step)} per step"
    if minutes_left is not None:
        text += f", used up in about {duration(60 * minutes_left)}"
    return text


def _describe_leak(event: Event) -> str:
    def fact(name: str) -> str:
        return str(event.data.get(name) or "")[:_MAX_TEXT_LENGTH]

    text = f"what holds it: {fact('held_by') or fact('what') or 'something'}"
    # The place is followed by its function and its code.
    place, _, _ = fact("retained_at").partition(" in ")
    if place:
        text += f" at {place}"
    return text
