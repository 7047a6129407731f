"""Where the memory of a run goes: the slope test on each trainer's samples, and a request to trace on suspicion.

What is found is said on the terminal when it is told first, and so is what a process itself has found to hold it.

Does not: trace (the observed process does, see ``observe.retention``), stop anything.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from holdfast.core.errors import RunDirectoryError
from holdfast.core.events import Event
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
_LIMITED = {"VmData": resource.RLIMIT_DATA, "VmSize": resource.RLIMIT_AS}
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
        say: Prints a line.
        attempt: Number of the attempt; processes of others are passed over.
    """

    def __init__(
        self,
        run: Path,
        *,
        tell: Callable[..., None],
        clock: Callable[[], float],
        available_bytes: Callable[[], int | None],
        say: Callable[[str], None] = lambda _: None,
        attempt: int = 0,
    ) -> None:
        self._run, self._tell, self._clock, self._available = run, tell, clock, available_bytes
        self._print, self._attempt = say, attempt
        self._states: dict[str, _State] = {}
        self._followers: dict[str, EventFollower] = {}
        self._printed: set[str] = set()
        self._pause_until = 0.0

    def look(self) -> None:
        """Read what is new, test it, and tell what has changed."""
        began = self._clock()
        if began < self._pause_until:
            return
        for folder, process in read_processes(self._run):
            if process.role == "trainer" and process.attempt == self._attempt:
                self._read_leaks(folder, process.folder)
                with suppress(OSError, RunDirectoryError):  # being made, or of a newer holdfast
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
            left = self._left(pid) if what == "host" and growth is not None else None
            self._say(folder, pid, state, what, growth, left)

    def _left(self, pid: int) -> int | None:
        """Return what a process may still take: of the host, and of its own limits."""
        left = [each for each in (self._available(), *_left_of_limits(pid)) if each is not None]
        return min(left, default=None)

    def _read_leaks(self, folder: Path, name: str) -> None:
        """Say what a process has found; of many ranks each place once."""
        try:
            events = self._followers.setdefault(name, EventFollower(folder / EVENTS_FILE)).new()
        except (OSError, RunDirectoryError):
            return
        for event in events:
            if event.kind == "leak":
                self._print_once(_leak_line(event))

    def _print_once(self, line: str) -> None:
        if line not in self._printed:
            self._printed.add(line)
            self._print(line)

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
            if what not in self._printed:  # of many ranks the first one
                self._printed.add(what)
                self._print(_trend_line(what, growth, minutes))
            state.requests += 1
            with suppress(OSError):
                request_trace(folder / BOARD_FILE, state.requests)


def _trend_line(what: What, growth: Growth, minutes: float | None) -> str:
    where = "memory" if what == "host" else "memory of the device"
    left = "" if minutes is None else f", used up in about {_about(minutes)}"
    mebibytes = growth.bytes_per_step / 2**20
    size = f"{mebibytes:.1f} MiB" if mebibytes >= 0.1 else f"{1024 * mebibytes:.1f} KiB"
    return f"{where} grows by {size} a step{left}"


def _about(minutes: float) -> str:
    for unit, most, divisor in (("minutes", 120, 1), ("hours", 48 * 60, 60)):
        if minutes < most:
            count = max(1, round(minutes / divisor))
            return f"{count} {unit if count > 1 else unit.removesuffix('s')}"
    return f"{minutes / 60 / 24:,.0f} days"


def _leak_line(event: Event) -> str:
    held, at = (str(event.data.get(name) or "")[:_MOST_SHOWN] for name in ("held_by", "retained_at"))
    held = held or str(event.data.get("what") or "")[:_MOST_SHOWN]
    return f"what holds it: {held or 'something'}" + (f" at {at.partition(' in ')[0]}" if at else "")


def _left_of_limits(pid: int) -> list[int]:
    """Return what the limits of a process (``ulimit -d``, ``-v``) leave it, as far as it has some."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        used = {
            name: int(rest.split()[0]) * 1024
            for name, _, rest in (line.partition(":") for line in lines)
            if name in _LIMITED
        }
        limits = {name: resource.prlimit(pid, limit)[0] for name, limit in _LIMITED.items()}
    except (OSError, ValueError, IndexError):  # it has ended, or is another user's
        return []
    return [limits[name] - size for name, size in used.items() if limits[name] != resource.RLIM_INFINITY]


def _readings(samples: list[StepSample], what: What) -> list[Reading]:
    """Return readings, those of steps at which nothing was read left out, and of many each n-th."""
    found = [
        Reading(step=sample.step, seconds=sample.unix_seconds, used_bytes=used)
        for sample in samples
        if (used := sample.host_bytes if what == "host" else sample.device_allocated_bytes)
    ]
    return found[:: len(found) // _MOST_READINGS + 1]
