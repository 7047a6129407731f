"""Where the memory of a run goes: the slope test on each trainer's samples, and a request to trace on suspicion.

Does not: trace (the observed process does, see ``observe.retention``), stop anything.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from holdfast.diagnose.signatures.leaks import signature_of
from holdfast.memory.leaks import Growth, Reading, find_growth
from holdfast.recorder.progress import StepSample, read_samples, request_trace
from holdfast.recorder.run_files import BOARD_FILE, SAMPLES_FILE, read_processes

What = Literal["host", "device"]
_MOST_READINGS = 2_000  # the slope of a long run needs no more, and the test compares pairs of its windows only
_SURE_AFTER = 1.25  # times the steps at which it was suspected: what still warms up has mostly come to rest by then
_AGAIN_AFTER = 2.0  # a prediction is told again when it has come down to half


@dataclass(slots=True)
class _State:
    """What was told of one process."""

    seen: tuple[int, float] = (0, 0.0)
    told: dict[str, float | None] = field(default_factory=dict)
    suspected: dict[str, int] = field(default_factory=dict)  # by what, the step at which it was first seen to grow
    requests: int = 0


class Trends:
    """Follow the memory of the trainers of a run.

    Args:
        run: The run directory.
        tell: Records an event.
        clock: Seconds; unused samples are not read again before they grow.
        available_bytes: Asked for what the host may still take; None if unknown.
    """

    def __init__(
        self,
        run: Path,
        *,
        tell: Callable[..., None],
        clock: Callable[[], float],
        available_bytes: Callable[[], int | None],
    ) -> None:
        self._run, self._tell, self._clock, self._available = run, tell, clock, available_bytes
        self._states: dict[str, _State] = {}
        self._pause_until = 0.0

    def look(self) -> None:
        """Read what is new, test it, and tell what has changed."""
        began = self._clock()
        if began < self._pause_until:
            return
        for folder, process in read_processes(self._run):
            if process.role == "trainer":
                with suppress(OSError):
                    self._look_at(folder, process.pid, self._states.setdefault(process.folder, _State()))
        # Reading a full ring takes a fifth of a second: at most 1 % of the time is spent on it.
        self._pause_until = began + 100 * (self._clock() - began)

    def _look_at(self, folder: Path, pid: int, state: _State) -> None:
        path = folder / SAMPLES_FILE
        if not path.exists():
            return
        samples = read_samples(path)
        newest = (samples[-1].step, samples[-1].unix_seconds) if samples else (0, 0.0)
        if newest == state.seen:
            return
        state.seen = newest
        for what in ("host", "device"):
            growth = find_growth(_readings(samples, what))
            if growth is None:
                state.suspected.pop(what, None)
            elif newest[0] < _SURE_AFTER * state.suspected.setdefault(what, newest[0]):
                continue
            left = self._available() if what == "host" and growth is not None else None
            self._say(folder, pid, state, what, growth, left)

    def _say(
        self, folder: Path, pid: int, state: _State, what: What, growth: Growth | None, left: int | None
    ) -> None:
        if growth is None:
            if what in state.told:
                del state.told[what]
                self._tell("memory_trend", pid=pid, what=what, bytes_per_step=0, minutes_left=None)
            return
        minutes = None if left is None else growth.minutes_until(left)
        before = state.told.get(what, None)
        if what in state.told and not (minutes is not None and (before is None or minutes * _AGAIN_AFTER < before)):
            return
        first = what not in state.told
        state.told[what] = minutes
        self._tell(
            "memory_trend",
            pid=pid,
            what=what,
            bytes_per_step=round(growth.bytes_per_step),
            between=[round(growth.low), round(growth.high)],
            grown_bytes=growth.grown_bytes,
            steps=growth.steps,
            minutes_left=None if minutes is None else round(minutes, 1),
            signature=signature_of("trend", on_host=what == "host"),
        )
        if first:
            state.requests += 1
            with suppress(OSError):
                request_trace(folder / BOARD_FILE, state.requests)


def _readings(samples: list[StepSample], what: What) -> list[Reading]:
    """Return readings, those of steps at which nothing was read left out, and of many each n-th."""
    found = [
        Reading(step=sample.step, seconds=sample.unix_seconds, used_bytes=used)
        for sample in samples
        if (used := sample.host_bytes if what == "host" else sample.device_allocated_bytes)
    ]
    return found[:: len(found) // _MOST_READINGS + 1]
