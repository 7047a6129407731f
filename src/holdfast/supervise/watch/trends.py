"""Where the memory of a run goes.

The slope test on each trainer's samples, and a request to trace on suspicion.

Growth is printed when it is found first, and so is what a process itself has found to hold the
memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
from holdfast.memory.leaks import Growth, Reading, find_growth
from holdfast.recorder.black_box import EVENTS_FILE
from holdfast.recorder.following import EventFollower, SampleFollower
from holdfast.recorder.progress import request_trace
from holdfast.recorder.run_files import BOARD_FILE, SAMPLES_FILE, read_processes

What = Literal["host", "device"]
# The slope of a long run needs no more, and the test compares pairs of its windows only
_MOST_READINGS = 2_000
_MOST_STEPS = 32_768  # of what was before a leak may have begun
# Times the steps at which it was suspected: what still warms up has mostly come to rest by then
_SURE_AFTER = 1.25
# Bytes by which a run that is over must have grown to be worth a word
_LEAST_LOOKING_BACK = 64 * 2**20
_MOST_SHOWN = 200
_AGAIN_AFTER = 2.0  # a prediction is emitted again when it has come down to half


@dataclass(slots=True)
class _Readings:
    """Those of the newest steps, of many each n-th.

    To read a ring as a whole each time takes 0.5 KiB a step.
    """

    # With the number of the step, as counted here
    kept: list[tuple[int, Reading]] = field(default_factory=list)
    seen: int = 0
    every: int = 1

    def add(self, found: list[tuple[int, Reading]], newest: int) -> None:
        kept = self.kept + [
            each for number, each in enumerate(found, self.seen) if number % self.every == 0
        ]
        self.seen += len(found)
        self.kept = [each for each in kept if each[0] > newest - _MOST_STEPS]
        while len(self.kept) > _MOST_READINGS:
            self.kept, self.every = self.kept[::2], 2 * self.every
        # Steps have become faster, so that fewer of them are read
        if len(self.kept) < _MOST_READINGS // 4:
            self.every = max(1, self.every // 2)

    def grew_before(self) -> bool:
        """Return whether memory grew already in the part after which a suspicion is sure."""
        count = int(len(self.kept) / _SURE_AFTER)
        return find_growth([reading for _, reading in self.kept[:count]]) is not None


@dataclass(slots=True)
class _State:
    """What is known and was said of one process."""

    events: EventFollower
    samples: SampleFollower
    steps: int = 0  # that were followed
    step: int = 0  # the newest
    readings: dict[What, _Readings] = field(
        default_factory=lambda: {"host": _Readings(), "device": _Readings()}
    )
    # By what, the minutes that were left
    said: dict[str, float | None] = field(default_factory=dict)
    # By what, the step at which it was first seen to grow
    suspected: dict[str, int] = field(default_factory=dict)
    requests: int = 0


class Trends:
    """Follow the memory of the trainers of a run."""

    def __init__(
        self,
        run: Path,
        *,
        emit: Callable[[EventData], None],
        clock: Callable[[], float] = time.monotonic,
        available_bytes: Callable[[], int | None] = memory_available_bytes,
        say: Callable[[str], None] = lambda _: None,
        attempt: int = 0,
    ) -> None:
        self._run, self._emit, self._clock, self._available = run, emit, clock, available_bytes
        self._say, self._attempt = say, attempt
        self._states: dict[str, _State] = {}
        self._printed: set[str] = set()
        self._pause_until = 0.0
        self._is_over = False

    def look(self) -> None:
        """Read what is new, test it, and emit what has changed."""
        began = self._clock()
        if began < self._pause_until:
            return
        for folder, process in read_processes(self._run):
            if process.role == "trainer" and process.attempt == self._attempt:
                with suppress(OSError, RunDirectoryError):  # being made, or of a newer holdfast
                    followers = (
                        EventFollower(folder / EVENTS_FILE),
                        SampleFollower(folder / SAMPLES_FILE),
                    )
                    state = self._states.setdefault(folder.name, _State(*followers))
                    for event in state.events.new():
                        if event.kind == "leak":
                            self._say_once(_leak_line(event))
                    self._look_at(folder, process.pid, state)
        # A ring that was written around meanwhile takes a fifth of a second: at most 1 % of the
        # time is spent on it.
        self._pause_until = began + 100 * (self._clock() - began)

    def look_back(self) -> None:
        """Look once more, at what an attempt that is over has recorded since the last look.

        A short one was never looked at, and it is over: nothing is printed, and nobody can trace it
            any more.
        """
        self._pause_until = 0.0
        self._is_over = True
        self.look()

    def _say_once(self, line: str, key: str | None = None) -> None:
        """Print a line; of many ranks with the same key the first one."""
        if (key or line) not in self._printed:
            self._printed.add(key or line)
            self._say(line)

    def _look_at(self, folder: Path, pid: int, state: _State) -> None:
        samples = state.samples.new(hold_back=False)
        if samples:
            state.step = samples[-1].step
        elif not self._is_over:
            return
        first, state.steps = state.steps + 1, state.steps + len(samples)
        for what, readings in state.readings.items():
            used = (
                each.host_bytes if what == "host" else each.device_allocated_bytes
                for each in samples
            )
            found = [
                (number, Reading(step=each.step, seconds=each.unix_seconds, used_bytes=size))
                for number, (each, size) in enumerate(zip(samples, used, strict=True), first)
                if size  # else nothing was read at this step
            ]
            readings.add(found, state.steps)
            growth = find_growth([reading for _, reading in readings.kept])
            if growth is None:
                state.suspected.pop(what, None)
                if what in state.said:
                    del state.said[what]
                    self._emit(MemoryTrend(pid=pid, what=what, bytes_per_step=0))
            elif self._is_sure(state, what, growth):
                self._on_growth(folder, pid, state, what, growth)

    def _is_sure(self, state: _State, what: What, growth: Growth) -> bool:
        """Return whether memory went on growing after it was suspected to, or did so in all of a
        run that is over.
        """
        if state.step >= _SURE_AFTER * state.suspected.setdefault(what, state.step):
            return True
        is_large = growth.grown_bytes >= _LEAST_LOOKING_BACK
        return self._is_over and is_large and state.readings[what].grew_before()

    def _on_growth(self, folder: Path, pid: int, state: _State, what: What, growth: Growth) -> None:
        left = self._available() if what == "host" else None
        minutes = None if left is None else growth.minutes_until(left)
        first, before = what not in state.said, state.said.get(what)
        if not first and (
            minutes is None or (before is not None and minutes * _AGAIN_AFTER >= before)
        ):
            return
        state.said[what] = minutes
        trend = MemoryTrend(
            pid=pid,
            what=what,
            bytes_per_step=round(growth.bytes_per_step),
            between=(round(growth.low), round(growth.high)),
            grown_bytes=growth.grown_bytes,
            steps=growth.steps,
            minutes_left=None if minutes is None else round(minutes, 1),
            signature=signature_of("trend", on_host=what == "host"),
        )
        self._emit(trend)
        if first and not self._is_over:
            until = "" if minutes is None else f", used up in about {duration(60 * minutes)}"
            where = "memory" if what == "host" else "memory of the device"
            self._say_once(f"{where} grows by {size(growth.bytes_per_step)} a step{until}", what)
            state.requests += 1
            with suppress(OSError):
                request_trace(folder / BOARD_FILE, state.requests)


def _leak_line(event: Event) -> str:
    held, at, what = (
        str(event.data.get(name) or "")[:_MOST_SHOWN] for name in ("held_by", "retained_at", "what")
    )
    return f"what holds it: {held or what or 'something'}" + (
        f" at {at.partition(' in ')[0]}" if at else ""
    )
