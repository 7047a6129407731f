"""`ResourceWatch`: measure from outside what keeps a training loop busy or waiting.

The progress boards show that a loop waits for data or runs code of its own, but not why. This
module adds what only the kernel and py-spy know: how busy loader workers are, whether a process
that loads its own data computes or sleeps, and in which Python line a loop spends its time. Stacks
are sampled only if a loop spends much of its time outside of backward, optimizer and loader.

The measurements become events, at intervals that double, so that a long run has few of them.
``explain.speed`` judges them.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.core.control_groups import cpu_quota, read_fields
from holdfast.core.errors import RunDirectoryError
from holdfast.core.events.data import EventData
from holdfast.core.events.process_events import ResourcesUsed, StacksSampled
from holdfast.explain.evidence import (
    Frame,
    innermost_user_frame,
    is_holdfast_code,
    is_user_code,
)
from holdfast.explain.hangs.evidence import ThreadLook
from holdfast.recorder.progress import ProcessPhase, Standing, read_board
from holdfast.recorder.run_files import (
    BOARD_FILE,
    PROCESS_FILE,
    PROCESSES_FOLDER,
    ProcessInfo,
    read_process_file,
)
from holdfast.supervise.process_tree import ProcessStat, read_process
from holdfast.supervise.watch.py_spy import PySpy, find_py_spy

# Interval between updates. Reading the board and the state of a trainer takes 50 microseconds.
UPDATE_SECONDS = 0.25
# Interval between two readings of the CPU time of all processes, and of the list of processes.
_CPU_SECONDS = 1.0
# Age of the loop at which the measurements are first recorded. The age then doubles each time.
_FIRST_RECORD_SECONDS = 4.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

# Stacks are sampled if a loop spends at least this share of its time outside of backward,
# optimizer, loader, evaluation and saving. In a loop that mostly computes, the forward pass takes
# about a third.
_MIN_OWN_SHARE = 0.4
_MIN_LOOP_SECONDS = 2.0
# A sample takes py-spy about 0.03 s of one CPU. The pause between samples doubles after every 16.
_SAMPLE_SECONDS = 0.4
_SAMPLES_PER_PAUSE = 16
_MAX_SAMPLES = 96
# Give up if py-spy fails this often in a row, for example because tracing is not permitted.
_MAX_FAILURES = 5
# Code of these files shows that the thread is not in the script's own code or in a forward pass.
_OTHER_PARTS = ("/torch/utils/data/", "/torch/autograd/", "/torch/optim/", "/torch/serialization.")


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


@dataclass(slots=True)
class _Stacks:
    """The stack samples of a trainer.

    Attributes:
        pid: PID of the trainer.
        samples: Number of samples.
        in_python: Samples in which the main thread executed Python code of the loop itself.
        places: How often each line was the innermost line of user code in these samples.
    """

    pid: int
    samples: int = 0
    in_python: int = 0
    places: Counter[str] = field(default_factory=Counter)

    def add(self, main_thread: ThreadLook) -> None:
        """Add a sample of the main thread."""
        self.samples += 1
        is_other_part = any(
            part in frame.file for frame in main_thread.frames for part in _OTHER_PARTS
        )
        is_other_part = is_other_part or _runs_holdfast(main_thread.frames)
        # Operations of torch release the interpreter lock while they compute or wait for a device.
        if is_other_part or not main_thread.holds_gil or not main_thread.frames:
            return
        self.in_python += 1
        frame = innermost_user_frame(main_thread.frames)
        self.places[f"{Path(frame.file).name}:{frame.line} in {frame.function}"] += 1


def _runs_holdfast(frames: Sequence[Frame]) -> bool:
    """Return whether a thread runs code of holdfast, which may call the script's functions.

    The script cannot make this code faster, for example a save between two batches.
    """
    for frame in reversed(frames):
        if is_holdfast_code(frame):
            return True
        if is_user_code(frame):
            return False
    return False


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
        self._py_spy = PySpy(find_py_spy())
        self._failures = 0
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
        self._stacks: _Stacks | None = None
        self._sample_at = 0.0

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
        self._sample_stacks(*boards[0], now)
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
        worker_seconds = sum(use.seconds for use in workers)
        busy_seconds = sum(use.busy_seconds for use in (*workers, *others))
        worker_busy = None
        if worker_seconds > 0.0:
            worker_busy = round(sum(use.busy_seconds for use in workers) / worker_seconds, 3)
        self._emit(
            ResourcesUsed(
                attempt=self._attempt,
                seconds=round(seconds, 1),
                cpus=self._cpus,
                cpus_wanted=round(busy_seconds / seconds, 2),
                workers=round(self._most_workers, 1),
                worker_busy=worker_busy,
                bytes_read=sum(use.bytes_read for use in self._use.values()),
                waits_seen=self._waits_seen,
                waits_running=self._waits_running,
            )
        )
        self._record_stacks()

    def _record_stacks(self) -> None:
        """Record where the sampled stacks of the training loop were, if any were sampled."""
        stacks = self._stacks
        if stacks is None or not stacks.samples:
            return
        place, count = (stacks.places.most_common(1) or [("", 0)])[0]
        self._emit(
            StacksSampled(
                attempt=self._attempt,
                pid=stacks.pid,
                samples=stacks.samples,
                in_python=stacks.in_python,
                place=place,
                at_place=count,
            )
        )

    # --- stacks

    def _sample_stacks(self, info: ProcessInfo, standing: Standing, now: float) -> None:
        """Sample the stacks of a trainer if much of its time is spent in its own code."""
        loop = standing.loop
        if loop is None or loop.seconds < _MIN_LOOP_SECONDS or now < self._sample_at:
            return
        if loop.own_share < _MIN_OWN_SHARE or self._failures >= _MAX_FAILURES:
            return
        if self._stacks is None or self._stacks.pid != info.pid:
            self._stacks = _Stacks(info.pid)
        if self._stacks.samples >= _MAX_SAMPLES:
            return
        pause = _SAMPLE_SECONDS * 2 ** (self._stacks.samples // _SAMPLES_PER_PAUSE)
        self._sample_at = now + pause
        threads = self._py_spy.read_threads(info.pid, is_stopped=True)
        main_threads = [thread for thread in threads or () if thread.main]
        if main_threads:
            self._failures = 0
            self._stacks.add(main_threads[0])
        else:
            self._failures += 1


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
