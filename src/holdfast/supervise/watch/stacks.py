"""Sample the stacks of stuck processes twice, and write them to the run directory.

Three sources are tried for each process. The first is py-spy, which reads the process from outside.
If py-spy is missing or not permitted, as in a container without ptrace, an observed process writes
its own stacks on a signal. If that fails too, only the kernel's view of the process remains. Each
source has a time limit, because a process in an uninterruptible wait must not block the supervisor.

``explain.hangs`` interprets the stacks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.core.files import create_file, make_folder, read_file
from holdfast.explain.evidence import Frame
from holdfast.explain.hangs.process_samples import (
    ExaminedProcess,
    ProcessSample,
    ThreadSample,
    clean_name,
)
from holdfast.recorder.run_files import FAULTHANDLER_FILE, STACKS_FOLDER
from holdfast.supervise.watch.faulthandler_dumps import ask_for_stacks
from holdfast.supervise.watch.process_evidence import (
    KernelView,
    ThreadWait,
    is_python,
    read_kernel_view,
    uses_gpu,
)
from holdfast.supervise.watch.py_spy import PySpy, find_py_spy
from holdfast.supervise.watch.stack_text import describe_stacks

# Time between the two samples. One second is enough to distinguish a blocked process (no CPU time,
# same frames) from a slow one.
_INTERVAL_SECONDS = 1.0
_PARALLEL_SAMPLES = 8
# Number of additional samples of a process that is computing, and their maximum number as long as
# the functions on the stack do not change. A loop that spends most of its time in a helper function
# shows that function in many consecutive samples.
_MORE_SAMPLES = 3
_MORE_SAMPLES_IF_SAME = 24
# Range of the random time between these samples, in seconds. At a fixed interval, every sample
# could find a regular loop at the same line.
_MORE_SAMPLES_INTERVAL_SECONDS = (0.01, 0.05)
# Leaves Python's global random state unchanged. Reproducibility does not matter here.
_RANDOM = random.SystemRandom()
# A process counts as computing if it uses at least this share of one CPU core.
_BUSY_CPU_SHARE = 0.3
# Source files that are larger than this are not read.
_MAX_SOURCE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A process to sample.

    Args:
        process: What is known about the process.
        folder: Directory to which the process writes its stacks on `STACKS_SIGNAL`; None if it does
            not handle the signal.
        runs_python: Whether the process is known to run Python.
    """

    process: ExaminedProcess
    folder: Path | None = None
    runs_python: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StackDump:
    """The stacks of several processes, sampled at the same time.

    Args:
        processes: The processes that still existed at the second sample, with their samples.
        files: Names of the files that contain the stacks, keyed by PID.
        seconds: How long the sampling took.
    """

    processes: tuple[ExaminedProcess, ...]
    files: Mapping[int, tuple[str, ...]]
    seconds: float


class StackSampler:
    """Samples stacks and writes them to numbered files.

    Args:
        run_path: The run directory.
        pause: Sleeps for the given number of seconds between the two samples.
        py_spy: Path of py-spy, or empty to do without it. By default, the installed py-spy is used.
    """

    def __init__(
        self,
        run_path: Path,
        *,
        pause: Callable[[float], Any] = time.sleep,
        py_spy: str | None = None,
    ) -> None:
        self._folder = run_path / STACKS_FOLDER
        self._pause = pause
        self._py_spy = PySpy(find_py_spy() if py_spy is None else py_spy)
        # Number of the newest dump. The numbering continues that of earlier attempts.
        prefixes = [path.name.partition("-")[0] for path in self._folder.glob("*.txt")]
        numbers = [int(prefix) for prefix in prefixes if prefix.isdigit()]
        self._number = max(numbers, default=0)

    def take(self, subjects: Sequence[Subject]) -> StackDump:
        """Sample the stacks of processes twice, about a second apart, and write them to files.

        If a process cannot be sampled, no error is raised.
        """
        began_at = time.monotonic()
        self._number += 1
        files: dict[int, list[str]] = {}
        with ThreadPoolExecutor(_PARALLEL_SAMPLES, thread_name_prefix="holdfast-stacks") as pool:
            remaining = self._sample_all(pool, subjects, "a", files)
            elapsed_seconds = time.monotonic() - began_at
            self._pause(max(0.0, _INTERVAL_SECONDS - elapsed_seconds))
            remaining = self._sample_all(pool, remaining, "b", files)
            processes = tuple(pool.map(self._sample_further, remaining))
        return StackDump(
            processes=processes,
            files={pid: tuple(names) for pid, names in files.items()},
            seconds=time.monotonic() - began_at,
        )

    def delete(self, dump: StackDump) -> None:
        """Delete the files of a dump that is no longer needed."""
        for names in dump.files.values():
            for name in names:
                with suppress(OSError):
                    (self._folder / name).unlink()

    # --- files ---

    def _sample_all(
        self,
        pool: ThreadPoolExecutor,
        subjects: Sequence[Subject],
        letter: str,
        files: dict[int, list[str]],
    ) -> list[Subject]:
        """Sample each process once, write the samples to files, and return the remaining processes.

        A process that has ended is not returned.

        Args:
            pool: Threads that take the samples.
            subjects: The processes to sample.
            letter: Letter in the file names that distinguishes the first sample from the second.
            files: File names keyed by PID, to which the new names are added.
        """
        remaining = []
        for subject, sample in zip(subjects, pool.map(self._sample, subjects), strict=True):
            if sample is None:
                continue
            process = replace(subject.process, samples=(*subject.process.samples, sample))
            remaining.append(replace(subject, process=process))
            name = f"{self._number:04d}-{process.pid}-{letter}.txt"
            # If the disk is full, the event about the hang still contains the innermost frame.
            with suppress(OSError):
                self._write(name, process)
                files.setdefault(process.pid, []).append(name)
        return remaining

    def _write(self, name: str, process: ExaminedProcess) -> None:
        make_folder(self._folder.parent, self._folder.name)
        with create_file(self._folder / name) as file:
            file.write(describe_stacks(process).encode("utf-8", "replace"))

    # --- samples ---

    def _sample(self, subject: Subject) -> ProcessSample | None:
        """Return one sample of a process, or None if the process has ended."""
        pid = subject.process.pid
        view = read_kernel_view(pid)
        if view.state in ("", "Z", "X"):
            return None
        seconds = time.monotonic()
        source, python_threads = self._read_threads(subject, view)
        threads = _add_waits(pid, python_threads, view)
        return ProcessSample(
            seconds=seconds,
            source=source,
            state=view.state,
            cpu_seconds=view.cpu_seconds,
            io_bytes=view.io_bytes,
            threads=threads,
            native_threads=_native_threads(threads, view),
        )

    def _read_threads(
        self, subject: Subject, view: KernelView
    ) -> tuple[str, tuple[ThreadSample, ...]]:
        """Return the Python threads of a process, preceded by the name of the source.

        The source ``"/proc"`` means that the stacks could not be read.
        """
        pid = subject.process.pid
        # A process in an uninterruptible wait does not respond to anything.
        if view.state == "D" or not (subject.runs_python or is_python(pid)):
            return "/proc", ()
        is_stopped = view.state in "Tt"
        threads = self._py_spy.read_threads(pid, is_stopped=is_stopped)
        if threads is not None:
            return "py-spy", threads
        if subject.folder is not None and not is_stopped:
            threads = ask_for_stacks(pid, subject.folder / FAULTHANDLER_FILE)
            if threads is not None:
                return "faulthandler", threads
        return "/proc", ()

    def _sample_further(self, subject: Subject) -> ExaminedProcess:
        """Take a few more samples of a process that is computing, including its native stack.

        The native stack is sampled only if the Python stack does not change.
        """
        process = replace(subject.process, uses_gpu=uses_gpu(subject.process.pid))
        is_running = process.newest.main_thread.waits == "running"
        if process.cpu_share < _BUSY_CPU_SHARE and not is_running:
            return process
        for number in range(_MORE_SAMPLES_IF_SAME):
            # Compare functions rather than lines, because the innermost function may be a helper
            # that a loop calls.
            if number >= _MORE_SAMPLES and not stays_in_same_functions(process):
                break
            # Further samples without stacks are useless.
            if process.newest.source == "/proc":
                break
            _pause_randomly()
            sample = self._sample(subject)
            if sample is not None:
                process = replace(process, samples=(*process.samples, sample))
        if not stays_at_same_lines(process):
            return process
        innermost = process.newest.main_thread.frames[-1]
        native = self._py_spy.read_native_functions(process.pid, innermost.line, _pause_randomly)
        source_line = "" if native is not None else _read_source_line(innermost)
        return replace(process, native=native, source_line=source_line)


def _read_source_line(frame: Frame) -> str:
    """Return the source text of a frame's line; empty if it cannot be read."""
    text = b""
    with suppress(OSError):
        text = read_file(Path(frame.file), _MAX_SOURCE_BYTES)
    lines = text.decode("utf-8", "replace").splitlines()
    return clean_name(lines[frame.line - 1]) if 0 < frame.line <= len(lines) else ""


def _pause_randomly() -> None:
    time.sleep(_RANDOM.uniform(*_MORE_SAMPLES_INTERVAL_SECONDS))


def _add_waits(
    pid: int, threads: Sequence[ThreadSample], view: KernelView
) -> tuple[ThreadSample, ...]:
    """Add what each Python thread waits for, and return the threads, the main thread first.

    Threads without Python frames are omitted, except for the main thread.
    """
    main = [thread for thread in threads if thread.is_main]
    if not main:
        main = [ThreadSample(tid=pid, is_main=True)]
    others = [thread for thread in threads if not thread.is_main]
    other_tid = _tid_of_only_other_thread(pid, threads, view)
    complete = []
    for thread in [*main, *others]:
        # The thread ID of the main thread is the PID.
        tid = pid if thread.is_main else other_tid or thread.tid
        complete.append(_with_wait(replace(thread, tid=tid), view))
    return tuple(complete)


def _tid_of_only_other_thread(
    pid: int, threads: Sequence[ThreadSample], view: KernelView
) -> int | None:
    """Return the kernel's ID of the only thread beside the main thread; None if there are several.

    faulthandler does not report the kernel's thread IDs. If there are only two threads, the other
    thread can still be identified.
    """
    other_tids = [tid for tid in view.waits if tid != pid]
    if len(other_tids) == 1 and len(threads) == 2:
        return other_tids[0]
    return None


def _native_threads(threads: Sequence[ThreadSample], view: KernelView) -> tuple[ThreadSample, ...]:
    """Return the threads of a process that are not among its Python threads.

    If the kernel's IDs of the Python threads are unknown, these threads are returned too.
    """
    tids = {thread.tid for thread in threads}
    return tuple(_with_wait(ThreadSample(tid=tid), view) for tid in view.waits if tid not in tids)


def _with_wait(thread: ThreadSample, view: KernelView) -> ThreadSample:
    """Add to a thread what it waits for, according to the kernel."""
    wait = view.waits.get(thread.tid, ThreadWait())
    return replace(
        thread,
        waits=wait.waits,
        target=wait.target,
        cpu_wait_seconds=wait.cpu_wait_seconds,
    )


def stays_at_same_lines(process: ExaminedProcess) -> bool:
    """Return whether the main thread's stack had the same lines in every sample."""
    return _is_constant(process, lambda frame: frame)


def stays_in_same_functions(process: ExaminedProcess) -> bool:
    """Return whether the main thread's stack had the same functions in every sample."""
    return _is_constant(process, lambda frame: (frame.file, frame.function))


def _is_constant(process: ExaminedProcess, key: Callable[[Frame], Hashable]) -> bool:
    """Return whether `key` maps the main thread's frames to the same values in every sample."""
    stacks = {
        tuple(key(frame) for frame in sample.main_thread.frames) for sample in process.samples
    }
    return bool(process.newest.main_thread.frames) and len(stacks) == 1
