"""Where the memory of a run goes: the slope test on each trainer's samples, and a request to trace on suspicion.

Growth is printed when it is found first, and so is what a process itself has found to hold the memory.
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
from holdfast.recorder.following import EventFollower
from holdfast.recorder.progress import StepSample, read_samples, request_trace
from holdfast.recorder.run_files import BOARD_FILE, SAMPLES_FILE, read_processes

What = Literal["host", "device"]
_MOST_READINGS = 2_000  # the slope of a long run needs no more, and the test compares pairs of its windows only
_SURE_AFTER = 1.25  # times the steps at which it was suspected: what still warms up has mostly come to rest by then
_MOST_SHOWN = 200
_AGAIN_AFTER = 2.0  # a prediction is emitted again when it has come down to half


@dataclass(slots=True)
class _State:
    """What was said of one process."""

    seen: tuple[int, float] = (0, 0.0)
    said: dict[str, float | None] = field(default_factory=dict)  # by what, the minutes that were left
    suspected: dict[str, int] = field(default_factory=dict)  # by what, the step at which it was first seen to grow
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
        self._followers: dict[str, EventFollower] = {}
        self._printed: set[str] = set()
        self._pause_until = 0.0

    def look(self) -> None:
        """Read what is new, test it, and emit what has changed."""
        began = self._clock()
        if began < self._pause_until:
            return
        for folder, process in read_processes(self._run):
            if process.role == "trainer" and process.attempt == self._attempt:
                with suppress(OSError, RunDirectoryError):  # being made, or of a newer holdfast
                    follower = self._followers.setdefault(folder.name, EventFollower(folder / EVENTS_FILE))
                    for event in follower.new():
                        if event.kind == "leak":
                            self._say_once(_leak_line(event))
                    self._look_at(folder, process.pid, self._states.setdefault(folder.name, _State()))
        # Reading a full ring takes a fifth of a second: at most 1 % of the time is spent on it.
        self._pause_until = began + 100 * (self._clock() - began)

    def _say_once(self, line: str, key: str | None = None) -> None:
        """Print a line; of many ranks with the same key the first one."""
        if (key or line) not in self._printed:
            self._printed.add(key or line)
            self._say(line)

    def _look_at(self, folder: Path, pid: int, state: _State) -> None:
        path = folder / SAMPLES_FILE
        samples = read_samples(path)
        newest = (samples[-1].step, samples[-1].unix_seconds) if samples else (0, 0.0)
        if newest == state.seen:
            return
        state.seen = newest
        for what in ("host", "device"):
            growth = find_growth(_readings(samples, what))
            if growth is None:
                state.suspected.pop(what, None)
                if what in state.said:
                    del state.said[what]
                    self._emit(MemoryTrend(pid=pid, what=what, bytes_per_step=0))
            elif newest[0] >= _SURE_AFTER * state.suspected.setdefault(what, newest[0]):
                self._on_growth(folder, pid, state, what, growth)

    def _on_growth(self, folder: Path, pid: int, state: _State, what: What, growth: Growth) -> None:
        left = self._available() if what == "host" else None
        minutes = None if left is None else growth.minutes_until(left)
        first, before = what not in state.said, state.said.get(what)
        if not first and (minutes is None or (before is not None and minutes * _AGAIN_AFTER >= before)):
            return
        state.said[what] = minutes
        trend = MemoryTrend(
            pid=pid, what=what, bytes_per_step=round(growth.bytes_per_step),
            between=(round(growth.low), round(growth.high)), grown_bytes=growth.grown_bytes, steps=growth.steps,
            minutes_left=None if minutes is None else round(minutes, 1),
            signature=signature_of("trend", on_host=what == "host"),
        )  # fmt: skip
        self._emit(trend)
        if first:
            until = "" if minutes is None else f", used up in about {duration(60 * minutes)}"
            where = "memory" if what == "host" else "memory of the device"
            self._say_once(f"{where} grows by {size(growth.bytes_per_step)} a step{until}", what)
            state.requests += 1
            with suppress(OSError):
                request_trace(folder / BOARD_FILE, state.requests)


def _leak_line(event: Event) -> str:
    held, at, what = (str(event.data.get(name) or "")[:_MOST_SHOWN] for name in ("held_by", "retained_at", "what"))
    return f"what holds it: {held or what or 'something'}" + (f" at {at.partition(' in ')[0]}" if at else "")


def _readings(samples: list[StepSample], what: What) -> list[Reading]:
    """Return readings, those of steps at which nothing was read left out, and of many each n-th."""
    found = [
        Reading(step=sample.step, seconds=sample.unix_seconds, used_bytes=used)
        for sample in samples
        if (used := sample.host_bytes if what == "host" else sample.device_allocated_bytes)
    ]
    return found[:: len(found) // _MOST_READINGS + 1]
