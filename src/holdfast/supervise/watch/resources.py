"""`ResourceWatch`: measure from outside what keeps a training loop busy or waiting.

The progress boards show that a loop waits for data or runs code of its own, but not why. This
module adds what only the kernel knows: how busy loader workers are, and whether a process that
loads its own data computes or sleeps. ``loop_stacks`` adds in which Python line a loop spends its
time.

The measurements become events, at intervals that double, so that a long run has few of them.
``explain.speed`` judges them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.control_groups import cpu_quota, read_fields
from holdfast.core.errors import RunDirectoryError
from holdfast.core.events.data import EventData
from holdfast.core.events.process_events import ResourcesUsed
from holdfast.recorder.progress import ProcessPhase, Standing, read_board
from holdfast.recorder.run_files import (
    BOARD_FILE,
    PROCESS_FILE,
    PROCESSES_FOLDER,
    ProcessInfo,
    read_process_file,
)
from holdfast.supervise.process_tree import ProcessStat, read_process
from holdfast.supervise.watch.loop_stacks import LoopStackSampler

# Interval between updates. Reading the board and the state of a trainer takes 50 microseconds.
UPDATE_SECONDS = 0.25
# Interval between two readings of the CPU time of all processes, and of the list of processes.
_CPU_SECONDS = 1.0
# Age of the loop at which the measurements are first recorded. The age then doubles each time.
_FIRST_RECORD_SECONDS = 4.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class _CpuUse:
    """What one process used between its first and its newest reading.

    `first_seconds` and `newest_seconds` are results of `_busy_seconds`.
    """

    first_at: float
    first_seconds: float
    first_bytes: int
    newest_at: float
    newest_seconds: float
    newest_bytes: int

    @property
    def seconds(self) -> float:
        """Return the time between the first and the newest reading."""
        return self.newest_at - self.first_at

    @property
    def busy_seconds(self) -> float:
        """Return how long the process was busy between the two readings."""
        return max(0.0, self.newest_seconds - self.first_seconds)

    @property
    def bytes_read(self) -> int:
        """Return how many bytes were read between the two readings."""
        return max(0, self.newest_bytes - self.first_bytes)


class ResourceWatch:
    """Measures the processes of one attempt.

    Args:
        run_path: The run directory.
        attempt: Number of the attempt.
        emit: Records an event.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self,
        run_path: Path,
        attempt: int,
        emit: Callable[[EventData], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = run_path / PROCESSES_FOLDER
        self._attempt = attempt
        self._emit = emit
        self._clock = clock
        self._cpus = cpu_quota()
        # The live trainers and loader workers, keyed by the names of their directories.
        self._processes: dict[str, ProcessInfo] = {}
        # Names of directories of processes that have ended or belong to another attempt.
        self._finished: set[str] = set()
        self._use: dict[str, _CpuUse] = {}
        # The names in `_use` that belong to loader workers.
        self._workers: set[str] = set()
        # The largest number of loader workers per trainer; None if they were never counted.
        self._most_workers: float | None = None
        self._refreshed_at = float("-inf")
        # How often a trainer was found waiting for data, and how often its main thread then ran.
        self._waits_seen = 0
        self._waits_running = 0
        self._record_at = _FIRST_RECORD_SECONDS
        self._sampler = LoopStackSampler()

    def update(self) -> None:
        """Measure once, and record the measurements if they are due."""
        now = self._clock()
        boards = self._read_boards()
        self._watch_waits(boards)
        if now - self._refreshed_at >= _CPU_SECONDS:
            self._refreshed_at = now
            self._refresh_processes()
            if boards:
                self._read_cpu(now)
        if not boards:
            return
        loop_seconds = max(loop.seconds for _, standing in boards if (loop := standing.loop))
        info, standing = boards[0]
        if standing.loop is not None:
            self._sampler.update(info.pid, standing.loop, now)
        if loop_seconds >= self._record_at:
            self._record_at = 2.0 * loop_seconds
            self._record()

    def finish(self) -> None:
        """Record the measurements one last time, after the attempt has ended."""
        self._record()

    # --- processes

    def _refresh_processes(self) -> None:
        """Find new trainers and loader workers, and forget those that have ended."""
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(self._folder)  # noqa: PTH208 - faster
        for name in names:
            if name in self._finished or name in self._processes:
                continue
            info = read_process_file(self._folder / name / PROCESS_FILE)
            if info is not None and info.role in ("trainer", "loader worker"):
                self._processes[name] = info
        for name, info in list(self._processes.items()):
            process = read_process(info.pid)
            has_ended = process is None or process.ticks != info.ticks or process.state in "ZX"
            if has_ended or info.attempt != self._attempt:
                del self._processes[name]
                self._finished.add(name)

    def _trainers(self) -> list[tuple[str, ProcessInfo]]:
        return [item for item in self._processes.items() if item[1].role == "trainer"]

    def _read_boards(self) -> list[tuple[ProcessInfo, Standing]]:
        """Return the trainers with a running loop and their boards, the lowest rank first."""
        boards = []
        for name, info in self._trainers():
            with suppress(OSError, RunDirectoryError):
                standing = read_board(self._folder / name / BOARD_FILE)
                # A process that shuts down has no workers any more, which says nothing of its loop.
                is_over = standing is None or standing.phase is ProcessPhase.ENDING
                if standing is not None and standing.loop is not None and not is_over:
                    boards.append((info, standing))
        return sorted(boards, key=lambda board: board[0].rank or 0)

    # --- CPU time

    def _watch_waits(self, boards: list[tuple[ProcessInfo, Standing]]) -> None:
        """Note whether the main threads of trainers that wait for data compute or sleep."""
        for info, standing in boards:
            if standing.phase is not ProcessPhase.DATA_WAIT:
                continue
            process = read_process(info.pid)
            if process is not None:
                self._waits_seen += 1
                # A process's state is that of its main thread.
                self._waits_running += process.state == "R"

    def _read_cpu(self, now: float) -> None:
        """Read the CPU time of all processes."""
        for name, info in self._processes.items():
            process = read_process(info.pid)
            if process is None:
                continue
            bytes_read = read_fields(Path(f"/proc/{info.pid}/io")).get("rchar", 0)
            busy_seconds = _busy_seconds(process)
            use = self._use.get(name)
            if use is None:
                self._use[name] = _CpuUse(
                    now, busy_seconds, bytes_read, now, busy_seconds, bytes_read
                )
            else:
                use.newest_at = now
                use.newest_seconds = busy_seconds
                use.newest_bytes = bytes_read
            if info.role == "loader worker":
                self._workers.add(name)
        trainers = len(self._trainers())
        if trainers:
            workers = (len(self._processes) - trainers) / trainers
            self._most_workers = max(self._most_workers or 0.0, workers)

    def _record(self) -> None:
        if self._most_workers is None:
            return
        workers = [use for name, use in self._use.items() if name in self._workers]
        others = [use for name, use in self._use.items() if name not in self._workers]
        seconds = max((use.seconds for use in self._use.values()), default=0.0)
        if seconds <= 0.0:
            return
        busy_seconds = sum(use.busy_seconds for use in (*workers, *others))
        self._emit(
            ResourcesUsed(
                attempt=self._attempt,
                seconds=round(seconds, 1),
                cpus=self._cpus,
                cpus_wanted=round(busy_seconds / seconds, 2),
                workers=round(self._most_workers, 1),
                worker_busy=_busy_share(workers),
                bytes_read=sum(use.bytes_read for use in self._use.values()),
                waits_seen=self._waits_seen,
                waits_running=self._waits_running,
            )
        )
        stacks = self._sampler.as_event(self._attempt)
        if stacks is not None:
            self._emit(stacks)


def _busy_share(workers: Sequence[_CpuUse]) -> float | None:
    """Return the share of their time in which workers were busy; None if none was measured."""
    seconds = sum(worker.seconds for worker in workers)
    if seconds <= 0.0:
        return None
    return round(sum(worker.busy_seconds for worker in workers) / seconds, 3)


def _busy_seconds(process: ProcessStat) -> float:
    """Return how long a process has been computing or waiting for a free CPU.

    On a machine that others use too, a busy process gets little CPU time, but it does not sleep.
    The kernel counts the time on the run queue for the main thread, in which a loader worker
    computes.
    """
    busy_seconds = process.cpu_ticks / _TICKS_PER_SECOND
    with suppress(OSError, ValueError, IndexError):
        words = Path(f"/proc/{process.pid}/schedstat").read_text().split()
        busy_seconds = max(busy_seconds, (int(words[0]) + int(words[1])) / 1e9)
    return busy_seconds
