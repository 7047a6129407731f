"""`MemoryTrends`: in the supervisor, test the trainers' memory for leaks and request traces.

Every few seconds, the slope test in ``growth`` is applied to the recorded steps. When growth is
certain, it is reported, and a trace is requested from the trainer (``tracer``), which then reports
the objects that hold the memory.
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
from holdfast.core.events.data import EventData
from holdfast.core.events.event import Event
from holdfast.core.events.process_events import MemoryTrend
from holdfast.core.text import duration, size
from holdfast.explain.signatures.leaks import signature_of
from holdfast.recorder.black_box import EVENTS_FILE
from holdfast.recorder.following import EventFollower, SampleFollower
from holdfast.recorder.progress import StepSample, request_trace
from holdfast.recorder.run_files import BOARD_FILE, SAMPLES_FILE, read_processes
from holdfast.supervise.leaks.growth import MemoryGrowth, MemoryReading, find_growth

MemoryKind = Literal["host", "device"]
# Maximum number of readings to keep, which is enough for the slope of a long run.
_MAX_READINGS = 2_000
# Only readings from this many newest steps are used, because a leak may begin late in the run.
_MAX_STEPS = 32_768
# Growth is certain if it persists until this multiple of the step at which it was first suspected.
# By then, most warm-ups have leveled off.
_CERTAIN_AFTER = 1.25
# In a run that has ended, less total growth than this is not worth reporting.
_MIN_BYTES_AT_END = 64 << 20
# Repeat a prediction when the remaining time has fallen to this share of the last prediction.
_REPEAT_AT_SHARE = 0.5
_MAX_TEXT_LENGTH = 200
# Pause between updates, as a multiple of the time that an update takes. Reading a whole ring buffer
# takes 0.2 s; with this factor, updates take at most 1 % of the time.
_PAUSE_PER_UPDATE = 100


@dataclass(slots=True)
class _ReadingHistory:
    """The memory readings of the newest steps. In long runs, only every n-th reading is kept.

    Keeping all of them would take 0.5 KiB per step.
    """

    readings: list[MemoryReading] = field(default_factory=list)
    # Number of readings added so far, of which every `interval`-th is kept.
    added: int = 0
    interval: int = 1

    def add(self, readings: Sequence[MemoryReading], newest_step: int) -> None:
        """Add readings, and drop those of old steps."""
        for reading in readings:
            if self.added % self.interval == 0:
                self.readings.append(reading)
            self.added += 1
        oldest_step = newest_step - _MAX_STEPS
        self.readings = [reading for reading in self.readings if reading.step > oldest_step]
        while len(self.readings) > _MAX_READINGS:
            self.readings = self.readings[::2]
            self.interval *= 2
        # If few readings are left, steps have become faster, so that memory is read at fewer of
        # them. Keep more of the future readings.
        if len(self.readings) < _MAX_READINGS // 4:
            self.interval = max(1, self.interval // 2)

    def find_growth(self) -> MemoryGrowth | None:
        """Return the growth of leaking memory in these readings, or None if there is no leak."""
        return find_growth(self.readings)

    def grew_early(self) -> bool:
        """Return whether memory was already growing in the earlier part of the readings."""
        count = int(len(self.readings) / _CERTAIN_AFTER)
        return find_growth(self.readings[:count]) is not None


@dataclass(slots=True)
class _Trainer:
    """Memory readings of one trainer, and the growth that was reported for it."""

    folder: Path
    pid: int
    events: EventFollower
    samples: SampleFollower
    # The trainer's newest step.
    step: int = 0
    history: dict[MemoryKind, _ReadingHistory] = field(
        default_factory=lambda: {"host": _ReadingHistory(), "device": _ReadingHistory()}
    )
    # The step at which growth was first suspected, for each kind of memory.
    suspected_at: dict[MemoryKind, int] = field(default_factory=dict)
    # The kinds of memory whose growth was reported, each with the minutes that were then left
    # before exhaustion, if known.
    reported: dict[MemoryKind, float | None] = field(default_factory=dict)
    trace_requests: int = 0


class MemoryTrends:
    """Tests the memory of all trainers of one attempt for leaks.

    Args:
        run_path: The run directory.
        emit: Records an event.
        say: Prints a message.
        attempt: Number of the attempt.
        clock: Returns monotonic seconds.
        available_bytes: Returns the available host memory in bytes, or None if unknown.
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
        # The trainers, keyed by the name of their process directory.
        self._trainers: dict[str, _Trainer] = {}
        self._announced: set[str] = set()
        self._pause_until = 0.0
        # Whether the attempt has ended. If so, nothing is printed, and no trace can be requested.
        self._is_over = False

    def update(self) -> None:
        """Read the newly recorded samples, test memory for growth, and report any change."""
        began_at = self._clock()
        if began_at < self._pause_until:
            return
        for folder, process in read_processes(self._run_path):
            if process.role == "trainer" and process.attempt == self._attempt:
                # Skip a trainer whose files are still being created, or were written by a newer
                # version of holdfast.
                with suppress(OSError, RunDirectoryError):
                    self._update_trainer(self._trainer_in(folder, process.pid))
        self._pause_until = began_at + _PAUSE_PER_UPDATE * (self._clock() - began_at)

    def finish(self) -> None:
        """Test the memory one last time, after the attempt has ended."""
        self._pause_until = 0.0
        self._is_over = True
        self.update()

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

    def _update_trainer(self, trainer: _Trainer) -> None:
        """Read the new events and samples of one trainer, and test its memory for growth."""
        for event in trainer.events.new():
            if event.kind == "leak":
                line = _describe_leak(event)
                self._announce(line, key=line)
        samples = trainer.samples.new(hold_back=False)
        if samples:
            trainer.step = samples[-1].step
        elif not self._is_over:
            return
        for kind, history in trainer.history.items():
            history.add(_readings_of(samples, kind), trainer.step)
            growth = history.find_growth()
            if growth is None:
                self._on_no_growth(trainer, kind)
            elif self._is_certain(trainer, kind, growth):
                self._on_growth(trainer, kind, growth)

    def _on_no_growth(self, trainer: _Trainer, kind: MemoryKind) -> None:
        """Forget a suspected leak, and record that it is over if it has been reported."""
        trainer.suspected_at.pop(kind, None)
        if kind in trainer.reported:
            del trainer.reported[kind]
            self._emit(MemoryTrend(pid=trainer.pid, what=kind, bytes_per_step=0))

    def _is_certain(self, trainer: _Trainer, kind: MemoryKind, growth: MemoryGrowth) -> bool:
        """Return whether memory has kept growing for long enough since growth was suspected.

        In a run that has ended, the memory must already have grown in its earlier part.
        """
        suspected_at = trainer.suspected_at.setdefault(kind, trainer.step)
        if trainer.step >= _CERTAIN_AFTER * suspected_at:
            return True
        if not self._is_over or growth.grown_bytes < _MIN_BYTES_AT_END:
            return False
        return trainer.history[kind].grew_early()

    def _on_growth(self, trainer: _Trainer, kind: MemoryKind, growth: MemoryGrowth) -> None:
        """Report new growth, and growth that will exhaust memory much sooner than last reported."""
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

    def _minutes_left(self, kind: MemoryKind, growth: MemoryGrowth) -> float | None:
        """Return the minutes until host memory is exhausted; None for a device or if unknown."""
        available_bytes = self._available_bytes() if kind == "host" else None
        if available_bytes is None:
            return None
        return growth.minutes_until_used(available_bytes)

    def _announce(self, line: str, *, key: str) -> None:
        """Print a line, unless another rank has already printed one with the same key."""
        if key not in self._announced:
            self._announced.add(key)
            self._say(line)


def _readings_of(samples: Sequence[StepSample], kind: MemoryKind) -> list[MemoryReading]:
    """Return the readings of one kind of memory that the samples contain."""
    readings = []
    for sample in samples:
        used_bytes = sample.host_bytes if kind == "host" else sample.device_allocated_bytes
        # 0 means that memory was not read at this step.
        if used_bytes > 0:
            readings.append(
                MemoryReading(step=sample.step, seconds=sample.unix_seconds, used_bytes=used_bytes)
            )
    return readings


def _is_much_nearer(minutes_left: float | None, minutes_before: float | None) -> bool:
    """Return whether so much less time is left that the prediction should be repeated."""
    if minutes_left is None:
        return False
    return minutes_before is None or minutes_left < _REPEAT_AT_SHARE * minutes_before


def _describe_growth(kind: MemoryKind, growth: MemoryGrowth, minutes_left: float | None) -> str:
    memory = "memory" if kind == "host" else "device memory"
    text = f"{memory} grows by {size(growth.bytes_per_step)} per step"
    if minutes_left is not None:
        text += f" and will be exhausted in about {duration(60 * minutes_left)}"
    return text


def _describe_leak(event: Event) -> str:
    def fact(name: str) -> str:
        return str(event.data.get(name) or "")[:_MAX_TEXT_LENGTH]

    text = f"the memory is held by {fact('held_by') or fact('what') or 'something'}"
    # In the fact, the location is followed by the name of the function and the code of the line.
    place, _, _ = fact("retained_at").partition(" in ")
    if place:
        text += f" at {place}"
    return text
