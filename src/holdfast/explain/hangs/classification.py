"""Classify how a process hangs: what it waits for, or where it computes without making progress.

The classification uses the stacks of the process, its CPU time, and what the process waits for
according to the kernel. ``blame`` compares processes with each other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from holdfast.explain.certainty import Certainty
from holdfast.explain.evidence import Frame, is_user_code
from holdfast.explain.hangs.frames import (
    BACKWARD,
    CHILD_PROCESS,
    COLLECTIVE,
    CONNECTION,
    CUDA,
    NETWORK,
    QUEUE,
    THREAD_QUEUE,
    THREADS,
    TORCH,
    any_file_matches,
    called_by_user,
    find_guard_call,
    frame_to_show,
    frames_since_fork,
)
from holdfast.explain.hangs.process_samples import (
    ExaminedProcess,
    ThreadSample,
    WaitKind,
    clean_name,
)

# The kinds of hangs, in the order of their signatures, which start at H1401.
HangKind = Literal[
    "loader",
    "lock",
    "collective",
    "I/O",
    "GPU sync",
    "native code",
    "Python loop",
    "stopped",
    "pipe",
    "socket",
    "process",
    "queue",
    "sleep",
    "OpenMP",
    "merely slow",
    "unknown",
]

# A process computes if it uses at least this fraction of a CPU. A waiting process uses less than
# 1%, and a computing process that shares a CPU with one other process uses half of the CPU.
_COMPUTING_SHARE = 0.5
# The limit for a thread that was running in every sample. It is lower, because the thread may
# compete with several others for a CPU.
_STARVED_SHARE = 0.05
# A thread that was ready to run for at least this fraction of the time, but had no CPU, has had too
# little time to show progress. A thread that only wakes up for a moment waits for a CPU, too: with
# four busy loops on two CPUs, 1% of the time if it wakes up every second, 11% if 20 times a second.
# At the lowest priority (nice 19), the shares are 19% and 58%.
_WAITING_FOR_CPU_SHARE = 0.2
# A process that mostly waits is still making progress if it exceeds one of these limits, for
# example because it reads from a slow disk.
_SLOW_SHARE = 0.02
_SLOW_BYTES_PER_SECOND = 65_536

# State letters in ``/proc/<pid>/stat``.
_STOPPED_BY_SIGNAL = "T"
_STOPPED_BY_DEBUGGER = "t"
_UNINTERRUPTIBLE = "D"

# A line of Python that contains a loop: a `while`, a `for` with its body, or a comprehension.
_LOOP_ON_LINE = re.compile(
    r"^\s*while\b|^\s*(?:async\s+)?for\b.*:\s*[^\s#]|[(\[{].*\bfor\b.+\bin\b"
)

_NATIVE_CUDA = re.compile(r"\bcu[A-Z]|cuda|nccl|\bhip[A-Z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHang:
    """How one process hangs."""

    kind: HangKind
    # How certain `kind` is.
    certainty: Certainty
    # The frame at which the process hangs, or None if unknown.
    frame: Frame | None
    # What the process does, as the predicate of a sentence about it, such as "waits for a file".
    activity: str
    # Whether the process uses CPU time or reads or writes data, so that it may still finish. True
    # for a process that waits for a CPU, too.
    moving: bool = False
    # Whether the process is ready to run but gets too little CPU time to show progress.
    starved: bool = False


def classify_process(process: ExaminedProcess, *, group_size: int) -> ProcessHang:
    """Return how a process hangs.

    Args:
        process: The observations of the process.
        group_size: The number of watched processes that train together; 0 if no process is watched.
    """
    if is_stopped(process):
        by_debugger = process.newest.state == _STOPPED_BY_DEBUGGER
        return ProcessHang(
            kind="stopped",
            certainty="certain",
            frame=frame_to_show(process.newest.main_thread.frames),
            activity="was stopped by a debugger" if by_debugger else "was stopped by a signal",
        )
    call = find_guard_call(process)
    if call is not None:
        # This check comes first because a Guard polls while it waits, which resembles computing.
        return ProcessHang(
            kind="collective",
            certainty="likely",
            frame=frame_to_show(process.newest.main_thread.frames),
            activity=f"waits for the other ranks in {call}",
        )
    thread = _BlamedThread(process, thread_to_blame(process), group_size)
    if thread.is_computing:
        return _computing(thread)
    if thread.is_starved:
        return _waiting_for_a_cpu(thread)
    return _merely_slow(thread) or _blocked(thread)


def is_stopped(process: ExaminedProcess) -> bool:
    """Return whether a signal or a debugger has stopped a process."""
    return process.newest.state in (_STOPPED_BY_SIGNAL, _STOPPED_BY_DEBUGGER)


def thread_to_blame(process: ExaminedProcess) -> ThreadSample:
    """Return the thread that explains the hang: the main thread or one that it waits for."""
    main = process.newest.main_thread
    called = called_by_user(main.frames)
    joins = any_file_matches(THREADS, called) or any_file_matches(BACKWARD, called)
    if not joins and not any_file_matches(THREAD_QUEUE, called):
        return main
    others = [
        thread
        for thread in process.newest.threads
        if not thread.is_main and any(is_user_code(frame) for frame in thread.frames)
    ]
    if not joins:
        # The main thread waits for a queue. A sleeping thread, such as a heartbeat, is not the
        # thread that fills this queue.
        others = [thread for thread in others if thread.waits != "sleep"]
    return min(others, key=lambda thread: thread.waits == "sleep", default=main)


class _BlamedThread:
    """The thread to blame in a process, with the properties from which its hang is classified."""

    def __init__(self, process: ExaminedProcess, thread: ThreadSample, group_size: int) -> None:
        self.process = process
        self.newest = thread
        self.group_size = group_size
        # The samples of this thread, as far as the thread existed, oldest first. The main
        # thread is matched without its id, which may be unknown.
        self.samples = [
            candidate
            for sample in process.samples
            for candidate in sample.threads
            if candidate.is_main == thread.is_main
            and (thread.is_main or candidate.tid == thread.tid)
        ]
        # The thread's stack in each sample at which the stack is known, oldest first.
        self.stacks = [frames_since_fork(sample.frames) for sample in self.samples if sample.frames]
        # The frames that user code has called, in the newest sample.
        self.called = called_by_user(thread.frames)

    @property
    def stack_is_constant(self) -> bool:
        """Whether at least one stack is known and all known stacks are equal."""
        return len(set(self.stacks)) == 1

    @property
    def waits(self) -> WaitKind:
        """What the thread waits for, according to the kernel.

        A process in uninterruptible sleep is assumed to wait for a file unless the kernel reports
        something more specific.
        """
        waits = self.newest.waits
        if self.process.newest.state == _UNINTERRUPTIBLE and waits in ("", "device"):
            return "file"
        return waits

    @property
    def is_computing(self) -> bool:
        """Whether the thread computes.

        The CPU time of the process alone does not show this, because another thread may have used
        the CPU.
        """
        running = self._was_running
        if not running:
            return self.process.cpu_share >= _COMPUTING_SHARE
        needed = _STARVED_SHARE if all(running) else _COMPUTING_SHARE
        return self.process.cpu_share >= needed and any(running)

    @property
    def is_starved(self) -> bool:
        """Whether the thread, or a native thread that it waits for, lacks a CPU to run on.

        A waiting thread also waits for a CPU each time it wakes up, so the thread must also have
        been found ready to run in most of the samples.
        """
        running = self._was_running
        if len(running) > 1 and all(running):
            return True
        if 2 * sum(running) <= len(running):
            return False
        tids = [self.newest.tid]
        if self._waits_for_native_threads:
            tids += [thread.tid for thread in self.process.newest.native_threads]
        return any(self.process.cpu_wait_share_of(tid) >= _WAITING_FOR_CPU_SHARE for tid in tids)

    @property
    def _was_running(self) -> list[bool]:
        """For each sample, whether the thread, or a native thread that it waits for, could run.

        Looks at which the kernel reported nothing are omitted.
        """
        if not self._waits_for_native_threads:
            return [sample.waits == "running" for sample in self.samples if sample.waits]
        return [
            any(
                thread.waits == "running" for thread in (sample.main_thread, *sample.native_threads)
            )
            for sample in self.process.samples
            if sample.main_thread.waits
        ]

    @property
    def _waits_for_native_threads(self) -> bool:
        """Whether the main thread waits for the threads of OpenMP to finish their work.

        Other native threads do not count, because they may poll: Gloo's wakes up every 10 ms.
        """
        return self.newest.is_main and self.waits == "openmp"

    @property
    def holds_interpreter_lock(self) -> bool:
        """Whether the thread held the GIL in every sample.

        A thread that waits in Python code would have released the GIL. At least two samples are
        needed.
        """
        observations = [sample.holds_gil for sample in self.samples if sample.holds_gil is not None]
        return len(observations) > 1 and all(observations)

    @cached_property
    def common_frame(self) -> Frame | None:
        """The innermost user frame that all stacks share, with its line in the newest stack.

        If the stacks share no user frame, this is the frame to show for the newest stack. None if
        no stack is known.
        """
        if not self.stacks:
            return None
        newest = self.stacks[-1]
        common = None
        for depth, frame in enumerate(newest):
            if not all(_has_function_at(stack, depth, frame) for stack in self.stacks):
                break
            if is_user_code(frame):
                common = frame
            if any(stack[depth].line != frame.line for stack in self.stacks):
                # The next frames were called from different lines, so the stacks have no deeper
                # frame in common.
                break
        return common if common is not None else frame_to_show(newest)


def _has_function_at(stack: Sequence[Frame], depth: int, frame: Frame) -> bool:
    """Return whether a stack is in the same function as `frame` at the given depth, on any line."""
    if len(stack) <= depth:
        return False
    other = stack[depth]
    return (other.file, other.function) == (frame.file, frame.function)


# --- A thread that computes -----------------------------------------------------------------------


def _computing(thread: _BlamedThread) -> ProcessHang:
    """Classify the hang of a thread that computes or polls, which cannot be told apart."""
    stacks = thread.stacks
    native = thread.process.native
    if not stacks:
        return ProcessHang(
            kind="merely slow",
            certainty="a guess",
            frame=None,
            activity="uses a processor",
            moving=True,
        )
    if thread.group_size > 1 and any_file_matches(COLLECTIVE, called_by_user(stacks[-1])):
        return ProcessHang(
            kind="collective",
            certainty="likely",
            frame=thread.common_frame,
            activity="waits in a collective, polling",
        )
    if thread.stack_is_constant and _may_poll_the_gpu(thread):
        return _waiting_for_the_gpu(thread)
    if thread.stack_is_constant and native != () and not _may_loop_on_one_line(thread):
        # Without a native stack, the thread may also be in a Python loop on a single line.
        where = f" ({clean_name(native[0])})" if native else " or in a loop on one line"
        return ProcessHang(
            kind="native code",
            certainty="likely" if native else "a guess",
            frame=thread.common_frame,
            activity=f"is using a processor in native code{where}",
            moving=True,
        )
    if any(any_file_matches(TORCH, called_by_user(stack)) for stack in stacks):
        return ProcessHang(
            kind="merely slow",
            certainty="a guess",
            frame=thread.common_frame,
            activity="is computing (its stack changes)",
            moving=True,
        )
    return _looping(thread)


def _may_loop_on_one_line(thread: _BlamedThread) -> bool:
    """Return whether a thread whose native stack is unknown is in a Python loop on a single line.

    Such a line contains a loop, or the thread holds the GIL in every sample. A built-in function
    that does not release the GIL cannot be distinguished from a loop.
    """
    if thread.process.native is not None:
        return False
    if thread.holds_interpreter_lock:
        return True
    return _LOOP_ON_LINE.search(thread.process.source_line) is not None


def _may_poll_the_gpu(thread: _BlamedThread) -> bool:
    """Return whether CUDA may be waiting for the GPU in a busy loop.

    The native stack shows this. If there is no native stack, any process that uses a GPU may be
    waiting for it.
    """
    native = thread.process.native
    if any_file_matches(CUDA, called_by_user(thread.stacks[-1])):
        return True
    if native is None:
        return thread.process.uses_gpu
    return _NATIVE_CUDA.search(" ".join(native)) is not None


def _waiting_for_the_gpu(thread: _BlamedThread) -> ProcessHang:
    """Classify the hang of a thread that waits for the GPU or for a collective on the GPU."""
    if thread.group_size > 1:
        return ProcessHang(
            kind="collective",
            certainty="a guess",
            frame=thread.common_frame,
            activity="waits for the GPU, which waits for other ranks",
        )
    return ProcessHang(
        kind="GPU sync", certainty="likely", frame=thread.common_frame, activity="waits for the GPU"
    )


def _looping(thread: _BlamedThread) -> ProcessHang:
    """Classify the hang of a thread that loops in Python code without calling torch."""
    activity = "is in a loop"
    certainty: Certainty = "a guess"
    frames = [frame_to_show(stack) for stack in thread.stacks]
    functions = {(frame.file, frame.function) for frame in frames if frame is not None}
    if len(functions) == 1:
        certainty = "likely"
    if thread.stack_is_constant:
        activity = "is in a loop on one line or in a built-in function"
        certainty = "a guess" if thread.process.native is None else "likely"
    return ProcessHang(
        kind="Python loop",
        certainty=certainty,
        frame=thread.common_frame,
        activity=activity,
        moving=True,
    )


def _waiting_for_a_cpu(thread: _BlamedThread) -> ProcessHang:
    """Classify a thread that could run if there were a free CPU, unless it polls a collective."""
    in_collective = thread.stacks and any_file_matches(
        COLLECTIVE, called_by_user(thread.stacks[-1])
    )
    if thread.group_size > 1 and in_collective:
        return _blocked(thread)
    process = thread.process
    seconds = process.observed_seconds
    return ProcessHang(
        kind="merely slow",
        certainty="likely",
        frame=thread.common_frame,
        activity=(
            f"used the CPU for only {process.cpu_share * seconds:.2f} s of {seconds:.1f} s and is"
            " waiting for a free CPU"
        ),
        moving=True,
        starved=True,
    )


# --- A thread that waits --------------------------------------------------------------------------


def _merely_slow(thread: _BlamedThread) -> ProcessHang | None:
    """Return "merely slow" for a process that mostly waits but still does some work, or None."""
    process = thread.process
    transfers = process.io_rate >= _SLOW_BYTES_PER_SECOND
    stack_moves = len(set(thread.stacks)) > 1
    if not transfers and not (stack_moves and process.cpu_share >= _SLOW_SHARE):
        return None
    return ProcessHang(
        kind="merely slow",
        certainty="a guess",
        frame=thread.common_frame,
        activity="is working but mostly waiting",
        moving=True,
    )


def _blocked(thread: _BlamedThread) -> ProcessHang:
    """Classify the hang of a thread that waits and does no work."""
    way = next(way for way in _WAYS_OF_WAITING if way.fits(thread))
    where = ""
    if not thread.newest.is_main:
        where = f" (in its thread {clean_name(thread.newest.name) or thread.newest.tid})"
    return ProcessHang(
        kind=way.kind,
        certainty=way.certainty,
        frame=frame_to_show(thread.newest.frames),
        activity=way.activity + where,
    )


@dataclass(frozen=True, slots=True)
class _WayOfWaiting:
    """A way in which a thread can wait, and the conditions under which it is recognized.

    All conditions that are set must hold.
    """

    kind: HangKind
    certainty: Certainty
    activity: str
    # Condition: user code has called a function in a file that matches this pattern.
    calls: re.Pattern[str] | None = None
    # Condition: the kernel reports that the thread waits for this.
    waits: WaitKind | None = None
    # Condition: the kernel does not report that the thread waits for this.
    waits_not: WaitKind | None = None
    # Condition: the thread held the GIL in every sample.
    holds_interpreter_lock: bool = False
    # Condition: the process uses a GPU.
    uses_gpu: bool = False
    # Condition: several processes train together.
    in_group: bool = False

    def fits(self, thread: _BlamedThread) -> bool:
        """Return whether a thread waits in this way."""
        if self.calls is not None and not any_file_matches(self.calls, thread.called):
            return False
        if self.waits is not None and thread.waits != self.waits:
            return False
        if self.waits_not is not None and thread.waits == self.waits_not:
            return False
        if self.holds_interpreter_lock and not thread.holds_interpreter_lock:
            return False
        if self.uses_gpu and not thread.process.uses_gpu:
            return False
        return not self.in_group or thread.group_size > 1


# The first entry that fits wins. Conditions on frames take precedence over the kernel's report if
# both are conclusive. The last entries are for systems on which the kernel reports nothing.
_WAYS_OF_WAITING: tuple[_WayOfWaiting, ...] = (
    _WayOfWaiting("collective", "likely", "waits in a collective", calls=COLLECTIVE),
    _WayOfWaiting("collective", "likely", "waits in a collective", calls=BACKWARD, in_group=True),
    _WayOfWaiting("OpenMP", "certain", "waits for OpenMP threads", waits="openmp"),
    _WayOfWaiting(
        "native code",
        "likely",
        "waits in native code and holds the interpreter's lock",
        holds_interpreter_lock=True,
    ),
    _WayOfWaiting("queue", "likely", "waits for a queue", calls=QUEUE, waits_not="child"),
    _WayOfWaiting("process", "likely", "waits for a process", calls=CHILD_PROCESS),
    _WayOfWaiting(
        "pipe",
        "likely",
        "waits for a message from another process",
        calls=CONNECTION,
        waits_not="child",
    ),
    _WayOfWaiting(
        "socket", "likely", "waits for a connection or a pipe", calls=NETWORK, waits="poll"
    ),
    _WayOfWaiting("socket", "a guess", "waits for a connection or a pipe", waits="poll"),
    _WayOfWaiting("GPU sync", "likely", "waits for the GPU", waits="device", uses_gpu=True),
    _WayOfWaiting("I/O", "a guess", "waits for a device", waits="device"),
    _WayOfWaiting(
        "GPU sync", "likely", "waits for the GPU", calls=CUDA, waits="futex", uses_gpu=True
    ),
    _WayOfWaiting("process", "likely", "waits for a process to end", waits="child"),
    _WayOfWaiting(
        "pipe", "likely", "waits for a pipe to which no process writes", waits="pipe read"
    ),
    _WayOfWaiting(
        "pipe",
        "likely",
        "waits to write to a full pipe that nobody reads",
        waits="pipe write",
    ),
    _WayOfWaiting("socket", "likely", "waits for the other end of a connection", waits="socket"),
    _WayOfWaiting("I/O", "likely", "waits for a lock on a file", waits="file lock"),
    _WayOfWaiting("I/O", "likely", "waits for a file", waits="file"),
    _WayOfWaiting("sleep", "likely", "sleeps", waits="sleep"),
    _WayOfWaiting("sleep", "likely", "waits for a signal", waits="signal"),
    _WayOfWaiting("lock", "likely", "waits for a lock", waits="futex"),
    _WayOfWaiting("lock", "a guess", "waits for a lock or a thread", calls=THREADS),
    _WayOfWaiting("socket", "a guess", "waits for a connection", calls=NETWORK),
    _WayOfWaiting("GPU sync", "a guess", "waits for the GPU", calls=CUDA),
    _WayOfWaiting("unknown", "a guess", "makes no progress for an unknown reason"),
)
