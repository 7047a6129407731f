"""How one process hangs: what it waits for, or what it computes instead of making progress.

The signs are its stack frames, the kernel's view of what it waits for, and its CPU time. ``blame``
compares processes with each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeVar

from holdfast.explain.evidence import Frame, is_user_code
from holdfast.explain.hangs.evidence import HANG_OF_WAIT, Examined, ThreadLook, Waits, clean
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
    call_of_guard,
    called_by_user,
    frames_since_fork,
    user_frame,
)

# In the order of their signatures, starting with H1401.
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

# A waiting process uses less than 1 % of a processor; a computing process that shares the machine
# with another one uses half of a processor.
_COMPUTING_SHARE = 0.5
# A lower threshold for a thread that was running at every look: it may be competing for a
# processor.
_STARVED_SHARE = 0.05
# Above these, a mostly waiting process still makes progress, for instance reading from a slow disk.
_SLOW_SHARE = 0.02
_SLOW_BYTES_PER_SECOND = 65_536

# The state letters of a process that a signal, or a debugger, has stopped.
_STOPPED_BY_SIGNAL = "T"
_STOPPED_BY_DEBUGGER = "t"
_UNINTERRUPTIBLE = "D"

_NATIVE_CUDA = re.compile(r"\bcu[A-Z]|cuda|nccl|\bhip[A-Z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHang:
    """How one process hangs."""

    kind: HangKind
    # Between 0 and 1.
    confidence: float
    # The frame to blame, if any is known.
    frame: Frame | None
    # The rest of a sentence that begins with the process, such as "waits for a file".
    activity: str
    # Whether it uses a processor or transfers data, so that it may still finish.
    moving: bool = False


class Wait(NamedTuple):
    """What a thread waits for."""

    kind: HangKind
    confidence: float
    # The rest of a sentence that begins with the process.
    activity: str


_Answer = TypeVar("_Answer", ProcessHang, Wait)


def classify_process(process: Examined, *, group_size: int) -> ProcessHang:
    """Return how a process hangs.

    Args:
        process: The process.
        group_size: The number of watched processes that train together; 0 if none is watched.
    """
    if is_stopped(process):
        return _stopped(process)
    call = call_of_guard(process)
    if call is not None:
        # The guard's wait polls, which would look like work.
        frame = user_frame(process.last.main.frames)
        return ProcessHang(
            kind="collective",
            confidence=0.9,
            frame=frame,
            activity=f"waits for the other ranks in {call}",
        )
    case = _ThreadCase(process, thread_to_blame(process), group_size)
    if case.is_computing:
        return _first_answer(_COMPUTING_RULES, case) or _computes(case)
    return _merely_slow(case) or _blocked(case)


def is_stopped(process: Examined) -> bool:
    """Return whether a signal or a debugger has stopped a process."""
    return process.last.state in (_STOPPED_BY_SIGNAL, _STOPPED_BY_DEBUGGER)


def _stopped(process: Examined) -> ProcessHang:
    by_debugger = process.last.state == _STOPPED_BY_DEBUGGER
    return ProcessHang(
        kind="stopped",
        confidence=0.98,
        frame=user_frame(process.last.main.frames),
        activity="was stopped by a debugger" if by_debugger else "was stopped by a signal",
    )


def thread_to_blame(process: Examined) -> ThreadLook:
    """Return the main thread, or the thread that the main thread waits for."""
    main = process.last.main
    called = called_by_user(main.frames)
    joins = any_file_matches(THREADS, called) or any_file_matches(BACKWARD, called)
    if not joins and not any_file_matches(THREAD_QUEUE, called):
        return main
    others = [
        thread
        for thread in process.last.threads
        if not thread.main and any(is_user_code(frame) for frame in thread.frames)
    ]
    if not joins:
        # A sleeping thread, such as a heartbeat, does not feed a queue.
        others = [thread for thread in others if thread.waits != "sleep"]
    return min(others, key=lambda thread: thread.waits == "sleep", default=main)


def _first_answer(
    rules: Iterable[Callable[[_ThreadCase], _Answer | None]], case: _ThreadCase
) -> _Answer | None:
    """Return the answer of the first rule that has one."""
    for rule in rules:
        answer = rule(case)
        if answer is not None:
            return answer
    return None


class _ThreadCase:
    """The thread to blame in a process, with the properties that the rules examine."""

    def __init__(self, process: Examined, thread: ThreadLook, group_size: int) -> None:
        self.process = process
        self.thread = thread
        self.group_size = group_size

    @cached_property
    def looks(self) -> list[ThreadLook]:
        """The thread at every look at which it existed, oldest first."""
        return [
            thread
            for look in self.process.looks
            for thread in look.threads
            if self._is_same_thread(thread)
        ]

    def _is_same_thread(self, thread: ThreadLook) -> bool:
        if self.thread.main:
            return thread.main
        return thread.tid == self.thread.tid and not thread.main

    @cached_property
    def stacks(self) -> list[tuple[Frame, ...]]:
        """The known stacks of the thread, one per look, oldest first."""
        return [frames_since_fork(look.frames) for look in self.looks if look.frames]

    @property
    def stack_is_constant(self) -> bool:
        """Whether at least one stack is known and all known stacks are equal."""
        return len(set(self.stacks)) == 1

    @cached_property
    def called(self) -> tuple[Frame, ...]:
        """The frames below the user's code in this thread, at the newest look."""
        return called_by_user(self.thread.frames)

    @property
    def is_computing(self) -> bool:
        """Whether this thread computes; the process's CPU time may be another thread's."""
        running = [look.waits == "running" for look in self.looks if look.waits]
        if not running:
            return self.process.cpu_share >= _COMPUTING_SHARE
        needed = _STARVED_SHARE if all(running) else _COMPUTING_SHARE
        return self.process.cpu_share >= needed and any(running)

    @property
    def holds_interpreter_lock(self) -> bool:
        """Whether the thread held the interpreter's lock at every look.

        A thread that merely waits would have released it.
        """
        held = [look.holds_gil for look in self.looks if look.holds_gil is not None]
        return len(held) > 1 and all(held)


# --- a thread that computes -----------------------------------------------------------------------


def _without_stacks(case: _ThreadCase) -> ProcessHang | None:
    if case.stacks:
        return None
    return ProcessHang(
        kind="merely slow", confidence=0.4, frame=None, activity="uses a processor", moving=True
    )


def _polls_in_collective(case: _ThreadCase) -> ProcessHang | None:
    if case.group_size <= 1 or not any_file_matches(COLLECTIVE, called_by_user(case.stacks[-1])):
        return None
    return ProcessHang(
        kind="collective",
        confidence=0.8,
        frame=_common_user_frame(case.stacks),
        activity="waits in a collective, polling",
    )


def _polls_the_gpu(case: _ThreadCase) -> ProcessHang | None:
    """CUDA waits for the GPU in a busy loop, visible in the native stack if that is known."""
    native = case.process.native
    in_cuda = any_file_matches(CUDA, called_by_user(case.stacks[-1]))
    in_native_cuda = _NATIVE_CUDA.search(" ".join(native or ())) is not None
    may_be_in_native_cuda = case.process.uses_gpu and native is None
    if not case.stack_is_constant or not (in_cuda or in_native_cuda or may_be_in_native_cuda):
        return None
    frame = _common_user_frame(case.stacks)
    if case.group_size > 1:
        return ProcessHang(
            kind="collective",
            confidence=0.5,
            frame=frame,
            activity="waits for the GPU, which waits for other ranks",
        )
    return ProcessHang(kind="GPU sync", confidence=0.75, frame=frame, activity="waits for the GPU")


def _is_in_native_code(case: _ThreadCase) -> ProcessHang | None:
    """A constant stack means native code, unless a native stack was taken and is empty."""
    native = case.process.native
    if not case.stack_is_constant or native == ():
        return None
    where = f" ({clean(native[0])})" if native else " or in a loop on one line"
    return ProcessHang(
        kind="native code",
        confidence=0.9 if native else 0.6,
        frame=_common_user_frame(case.stacks),
        activity=f"is using a processor in native code{where}",
        moving=True,
    )


def _loops_in_python(case: _ThreadCase) -> ProcessHang | None:
    """If torch was never below the user's code, the code itself loops."""
    if any(any_file_matches(TORCH, called_by_user(stack)) for stack in case.stacks):
        return None
    activity = "is in a loop"
    if case.stack_is_constant:
        activity = "is in a loop on one line or in a built-in function"
    return ProcessHang(
        kind="Python loop",
        confidence=_confidence_in_loop(case),
        frame=_common_user_frame(case.stacks),
        activity=activity,
        moving=True,
    )


def _confidence_in_loop(case: _ThreadCase) -> float:
    if case.stack_is_constant:
        return 0.7
    frames = [user_frame(stack) for stack in case.stacks]
    functions = {(frame.file, frame.function) for frame in frames if frame is not None}
    return 0.85 if len(functions) == 1 else 0.6


def _computes(case: _ThreadCase) -> ProcessHang:
    return ProcessHang(
        kind="merely slow",
        confidence=0.6,
        frame=_common_user_frame(case.stacks),
        activity="is computing (its stack changes)",
        moving=True,
    )


# The first rule that has an answer wins. If none has one, the thread computes and is merely slow.
_COMPUTING_RULES: tuple[Callable[[_ThreadCase], ProcessHang | None], ...] = (
    _without_stacks,
    _polls_in_collective,
    _polls_the_gpu,
    _is_in_native_code,
    _loops_in_python,
)


def _common_user_frame(stacks: Sequence[Sequence[Frame]]) -> Frame | None:
    """Return the innermost user frame that all stacks share, with its line in the newest stack."""
    newest = stacks[-1]
    common = None
    for depth, frame in enumerate(newest):
        if not all(_has_function_at(stack, depth, frame) for stack in stacks):
            break
        if is_user_code(frame):
            common = frame
        if any(stack[depth].line != frame.line for stack in stacks):
            # Deeper frames were called from different lines.
            break
    return common if common is not None else user_frame(newest)


def _has_function_at(stack: Sequence[Frame], depth: int, frame: Frame) -> bool:
    """Return whether a stack has a frame's function at this depth, whatever the line."""
    if len(stack) <= depth:
        return False
    other = stack[depth]
    return (other.file, other.function) == (frame.file, frame.function)


# --- a thread that waits --------------------------------------------------------------------------


def _merely_slow(case: _ThreadCase) -> ProcessHang | None:
    """A process that mostly waits but keeps doing some work is slow rather than stuck."""
    process = case.process
    transfers = process.io_rate >= _SLOW_BYTES_PER_SECOND
    stack_moves = len(set(case.stacks)) > 1
    if not transfers and not (stack_moves and process.cpu_share >= _SLOW_SHARE):
        return None
    return ProcessHang(
        kind="merely slow",
        confidence=0.6,
        frame=_common_user_frame(case.stacks) if case.stacks else None,
        activity="is working but mostly waiting",
        moving=True,
    )


def _blocked(case: _ThreadCase) -> ProcessHang:
    wait = _first_answer(_WAITING_RULES, case) or Wait(
        "unknown", 0.3, "makes no progress for an unknown reason"
    )
    thread = case.thread
    where = ""
    if not thread.main:
        where = f" (in its thread {clean(thread.name) or thread.tid})"
    return ProcessHang(
        kind=wait.kind,
        confidence=wait.confidence,
        frame=user_frame(thread.frames),
        activity=wait.activity + where,
    )


def _effective_waits(case: _ThreadCase) -> Waits:
    """Return what the thread waits for, according to the kernel.

    If nothing more is known, an uninterruptible process is assumed to wait for a file.
    """
    waits = case.thread.waits
    if case.process.last.state == _UNINTERRUPTIBLE and waits in ("", "device"):
        return "file"
    return waits


def _for_collective(case: _ThreadCase) -> Wait | None:
    in_collective = any_file_matches(COLLECTIVE, case.called)
    in_backward = case.group_size > 1 and any_file_matches(BACKWARD, case.called)
    if in_collective or in_backward:
        return Wait("collective", 0.9, "waits in a collective")
    return None


def _for_openmp(case: _ThreadCase) -> Wait | None:
    if case.thread.waits == "openmp":
        return Wait("OpenMP", 0.95, "waits for OpenMP threads")
    return None


def _in_native_code(case: _ThreadCase) -> Wait | None:
    if case.holds_interpreter_lock:
        return Wait("native code", 0.9, "waits in native code and holds the interpreter's lock")
    return None


def _for_process_by_frames(case: _ThreadCase) -> Wait | None:
    waits_for_child = any_file_matches(CHILD_PROCESS, case.called)
    if waits_for_child and not any_file_matches(QUEUE, case.called):
        return Wait("process", 0.9, "waits for a process")
    return None


def _for_queue(case: _ThreadCase) -> Wait | None:
    if any_file_matches(QUEUE, case.called) and _effective_waits(case) != "child":
        return Wait("queue", 0.9, "waits for a queue")
    return None


def _for_connection_of_processes(case: _ThreadCase) -> Wait | None:
    if any_file_matches(CONNECTION, case.called) and _effective_waits(case) != "child":
        return Wait("pipe", 0.8, "waits for a message from another process")
    return None


def _polls_descriptors(case: _ThreadCase) -> Wait | None:
    if _effective_waits(case) != "poll":
        return None
    confidence = 0.8 if any_file_matches(NETWORK, case.called) else 0.5
    return Wait("socket", confidence, "waits for a connection or a pipe")


def _for_device(case: _ThreadCase) -> Wait | None:
    if _effective_waits(case) != "device":
        return None
    if case.process.uses_gpu:
        return Wait("GPU sync", 0.8, "waits for the GPU")
    return Wait("I/O", 0.6, "waits for a device")


def _for_gpu(case: _ThreadCase) -> Wait | None:
    if not case.process.uses_gpu or _effective_waits(case) != "futex":
        return None
    if any_file_matches(CUDA, case.called):
        return Wait("GPU sync", 0.7, "waits for the GPU")
    return None


def _as_kernel_says(case: _ThreadCase) -> Wait | None:
    description = HANG_OF_WAIT.get(_effective_waits(case))
    return Wait(*description) if description is not None else None


def _for_thread_by_frames(case: _ThreadCase) -> Wait | None:
    if any_file_matches(THREADS, case.called):
        return Wait("lock", 0.6, "waits for a lock or a thread")
    return None


def _for_network_by_frames(case: _ThreadCase) -> Wait | None:
    if any_file_matches(NETWORK, case.called):
        return Wait("socket", 0.6, "waits for a connection")
    return None


def _for_gpu_by_frames(case: _ThreadCase) -> Wait | None:
    if any_file_matches(CUDA, case.called):
        return Wait("GPU sync", 0.6, "waits for the GPU")
    return None


# The first rule that has an answer wins. Frames take precedence over the kernel's view if both are
# clear; the last three rules are for systems that hide the kernel's view.
_WAITING_RULES: tuple[Callable[[_ThreadCase], Wait | None], ...] = (
    _for_collective,
    _for_openmp,
    _in_native_code,
    _for_process_by_frames,
    _for_queue,
    _for_connection_of_processes,
    _polls_descriptors,
    _for_device,
    _for_gpu,
    _as_kernel_says,
    _for_thread_by_frames,
    _for_network_by_frames,
    _for_gpu_by_frames,
)
