"""How one process stands still.

From its frames, from what the kernel says that it waits for, and from its CPU time.

Does not: compare processes with each other (``hangs``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from holdfast.explain.evidence import Frame, is_own_code
from holdfast.explain.hangs.evidence import KIND_OF, Examined, ThreadLook, clean

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
"""In the order of their signatures, H1401 and on."""

_BURNING_SHARE = 0.5
"""Of one processor. What waits uses below 1 %; what computes on a machine that is shared by two
uses half."""
_STARVED_SHARE = 0.05
"""Of a processor, for a thread that was found running each time: others compete with it."""
_MOVING_SHARE = 0.02
_MOVING_BYTES_A_SECOND = 65_536

_TORCH = re.compile(
    r"/(?:site|dist)-packages/torch/|/torch/(?:nn|autograd|_ops|optim|utils|_tensor)"
)
_COLLECTIVE = re.compile(
    r"/torch/distributed/(?!elastic|launcher)|/torch/nn/parallel/distributed\.py|/torch/nn/modules/_functions\.py"
    r"|/deepspeed/comm/|/horovod/"
)
_GUARD_WAIT = re.compile(r"/holdfast/guard/ranks/(?:messages|tape)\.py$")
_GUARD_CALL = re.compile(r"/holdfast/guard/(?:guard|hosted)\.py$")
# The frame of a public call, where it is not called as users call it.
_GUARD_NAMES = {"__init__": "Guard(...)", "_loop": "guard.batches", "__exit__": "guard.close"}
_WRAPPERS = re.compile(r"/torch/distributed/c10d_logger\.py$")
_BACKWARD = re.compile(r"/torch/autograd/(?:graph|__init__)\.py$")
_CUDA = re.compile(r"/torch/(?:cuda|accelerator|xpu|npu)/")
_NATIVE_CUDA = re.compile(r"\bcu[A-Z]|cuda|nccl|\bhip[A-Z]")
_THREADS = re.compile(r"(?:^|/)(?:threading|concurrent/futures/(?:_base|thread))\.py$")
_QUEUE = re.compile(r"(?:^|/)(?:queue|multiprocessing/queues|multiprocessing/managers)\.py$")
_CHILD = re.compile(
    r"(?:^|/)(?:subprocess|multiprocessing/(?:process|popen_fork|popen_spawn_posix|popen_forkserver|pool)"
    r"|concurrent/futures/process)\.py$"
)
_CONNECTION = re.compile(r"(?:^|/)multiprocessing/connection\.py$")
_NETWORK = re.compile(
    r"(?:^|/)(?:socket|ssl|selectors|http/client|asyncio/\w+)\.py$|/(?:urllib3?|requests|httpx|httpcore|aiohttp|botocore|"
    r"fsspec|s3fs|gcsfs|grpc|redis|huggingface_hub)/"
)
_LOADER = re.compile(r"/torch/utils/data/dataloader\.py$|/holdfast/loader/(?:\w+/)*\w+\.py$")
_IDLE = re.compile(r"/(?:queues|connection|selectors)\.py$")
# With the function
_FETCH = re.compile(r"/torch/utils/data/_utils/fetch\.py:|/holdfast/loader/workers/fetch\.py:")


class How(NamedTuple):
    """How a process stands still."""

    kind: HangKind  # see `HangKind`
    confidence: float  # between 0 and 1
    frame: Frame | None  # to blame, or None
    doing: str  # the rest of a sentence that begins with the process
    # Whether it uses a processor or moves bytes, so that it may come to an end
    moving: bool = False


def own_part(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the frames since the process was forked: those before are where its parent made it."""
    made = [
        index
        for index, frame in enumerate(frames)
        if frame.function.endswith("_bootstrap")
        and frame.file.endswith("multiprocessing/process.py")
    ]
    return tuple(frames[made[-1] + 1 :] if made else frames)


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame of user code, else the innermost outside torch and Python, else
    the innermost.
    """
    frames = own_part(frames)
    own = next((frame for frame in reversed(frames) if is_own_code(frame)), None)
    if own is not None:
        return own
    installed = (
        frame
        for frame in reversed(frames)
        if "-packages/" in frame.file and not _TORCH.search(frame.file)
    )
    return next(installed, frames[-1] if frames else None)


def short(frame: Frame) -> str:
    """Return a frame for a sentence: the file's name, the line and the function."""
    return f"{clean(Path(frame.file).name)}:{frame.line} in {clean(frame.function)}"


def _below(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the frames that user code has called, innermost last: what it waits in."""
    frames = own_part(frames)
    place = next(
        (index for index in range(len(frames) - 1, -1, -1) if is_own_code(frames[index])), -1
    )
    return tuple(frames[place + 1 :])


def _any(pattern: re.Pattern[str], frames: Sequence[Frame]) -> bool:
    return any(pattern.search(frame.file) for frame in frames)


def _fetches(frames: Sequence[Frame]) -> bool:
    """Say whether a batch is being made here.

    To unpack one that a worker has sent is to wait for the worker.
    """
    return any(_FETCH.search(f"{frame.file}:{frame.function}") for frame in frames)


def is_idle_worker(process: Examined) -> bool:
    """Say whether a loader worker waits for something to do."""
    frames = own_part(process.last.main.frames)
    inside = any("_worker_loop" in frame.function for frame in frames)
    return inside and not _fetches(frames) and bool(_IDLE.search(frames[-1].file))


def waits_for_workers(process: Examined) -> bool:
    """Say whether a process waits for a batch that a loader's worker makes."""
    frames = process.last.main.frames
    if not frames:
        return process.phase in ("data wait", "evaluation", "end of epoch")
    return _any(_LOADER, _below(frames)) and not _fetches(_below(frames))


def is_in_backward(process: Examined) -> bool:
    """Say whether the main thread waits in autograd, where gradients are averaged without being
    asked for.
    """
    return _any(_BACKWARD, _below(process.last.main.frames))


def call_of_guard(process: Examined) -> str | None:
    """Return the public call in which holdfast itself waits for the other ranks, such as
    ``guard.validated``.
    """
    below = _below(process.last.main.frames)
    if not _any(_GUARD_WAIT, below):
        return None
    call = next((frame.function for frame in below if _GUARD_CALL.search(frame.file)), None)
    if call is None:
        return "a call of the guard"
    name = clean(call.rpartition(".")[2])  # py-spy gives the class in front
    return _GUARD_NAMES.get(name, f"guard.{name}")


def collective_called(process: Examined) -> str | None:
    """Return the function of ``torch.distributed`` that user code waits in, such as ``barrier``,
    or None.
    """
    below = [
        frame for frame in _below(process.last.main.frames) if not _WRAPPERS.search(frame.file)
    ]
    if not below or not below[0].file.endswith("/torch/distributed/distributed_c10d.py"):
        return None
    return clean(below[0].function.rpartition(".")[2])


def has_own_loader(process: Examined) -> bool:
    """Say whether the batch that a process waits for is from holdfast's loader."""
    return any("/holdfast/loader/" in frame.file for frame in process.last.main.frames)


def how_it_stands(process: Examined, *, group: int) -> How:
    """Say how a process stands still, one of a `group` of so many that train together."""
    if process.last.state in "Tt":
        traced = " by a debugger" if process.last.state == "t" else " by a signal"
        frame = user_frame(process.last.main.frames)
        return How("stopped", 0.98, frame, f"was stopped{traced}")
    call = call_of_guard(process)
    if call is not None:  # it looks again and again, which is no work
        return How(
            "collective",
            0.9,
            user_frame(process.last.main.frames),
            f"waits for the other ranks in {call}",
        )
    thread = thread_to_blame(process)
    if _burns(process, thread):
        return _burning(process, thread, group)
    slow = _merely_slow(process, thread)
    return slow if slow is not None else _blocked(process, thread, group)


def _at_each_look(process: Examined, thread: ThreadLook) -> list[ThreadLook]:
    """Return how a thread was at each look, as far as it was there."""
    return [
        each
        for look in process.looks
        for each in look.threads
        if (each.main if thread.main else each.tid == thread.tid and not each.main)
    ]


def _stacks(process: Examined, thread: ThreadLook) -> list[tuple[Frame, ...]]:
    """Return the frames of a thread at each look, as far as they are known."""
    return [own_part(each.frames) for each in _at_each_look(process, thread) if each.frames]


def _burns(process: Examined, thread: ThreadLook) -> bool:
    """Say whether the thread itself computes: the time of its process may be another thread's."""
    runs = [each.waits == "running" for each in _at_each_look(process, thread) if each.waits]
    if not runs:
        return process.cpu_share >= _BURNING_SHARE
    return process.cpu_share >= (_STARVED_SHARE if all(runs) else _BURNING_SHARE) and any(runs)


def _burning(process: Examined, thread: ThreadLook, group: int) -> How:
    stacks = _stacks(process, thread)
    if not stacks:
        return How("merely slow", 0.4, None, "uses a processor", moving=True)
    frame = _common_user_frame(stacks)
    below = _below(stacks[-1])
    still = len(set(stacks)) == 1
    if group > 1 and _any(_COLLECTIVE, below):
        return How("collective", 0.8, frame, "waits in a collective, polling")
    native = " ".join(process.native or ())
    if still and (
        _any(_CUDA, below)
        or _NATIVE_CUDA.search(native)
        or (process.uses_gpu and process.native is None)
    ):
        if group > 1:
            return How("collective", 0.5, frame, "waits for the GPU, and that for others")
        return How("GPU sync", 0.75, frame, "waits for the GPU")
    if still and process.native != ():
        name = f" ({clean(process.native[0])})" if process.native else ", or in a loop on one line"
        what = f"is in native code{name}, using a processor,"
        sure = 0.9 if process.native else 0.6
        return How("native code", sure, frame, what, moving=True)
    if not any(_any(_TORCH, _below(stack)) for stack in stacks):
        functions = {
            (each.file, each.function) for each in map(user_frame, stacks) if each is not None
        }
        sure = 0.7 if still else 0.85 if len(functions) == 1 else 0.6
        what = "is in a loop on one line, or in a built-in function," if still else "is in a loop"
        return How("Python loop", sure, frame, what, moving=True)
    return How("merely slow", 0.6, frame, "computes, and its stack moves,", moving=True)


def _common_user_frame(stacks: Sequence[Sequence[Frame]]) -> Frame | None:
    """Return the innermost user frame whose function is on all stacks, at its newest line."""
    common = None
    for place, frame in enumerate(stacks[-1]):
        if any(
            len(stack) <= place
            or (stack[place].file, stack[place].function) != (frame.file, frame.function)
            for stack in stacks
        ):
            break
        if is_own_code(frame):
            common = frame
        if any(stack[place].line != frame.line for stack in stacks):
            break  # what follows was called from different lines
    return common if common is not None else user_frame(stacks[-1])


def _merely_slow(process: Examined, thread: ThreadLook) -> How | None:
    """Find one that waits much and works a little all the time, as reading from a slow disk
    does.
    """
    stacks = _stacks(process, thread)
    moved = len(set(stacks)) > 1
    if process.io_rate < _MOVING_BYTES_A_SECOND and not (
        moved and process.cpu_share >= _MOVING_SHARE
    ):
        return None
    frame = _common_user_frame(stacks) if stacks else None
    return How("merely slow", 0.6, frame, "works, mostly waiting,", moving=True)


def thread_to_blame(process: Examined) -> ThreadLook:
    """Return the main thread, or the thread that the main thread waits for."""
    main = process.last.main
    below = _below(main.frames)
    joins = _any(_THREADS, below) or _any(_BACKWARD, below)
    if not joins and not any(
        re.search(r"/(?:queue|asyncio/\w+)\.py$", frame.file) for frame in below
    ):
        return main
    others = [
        thread
        for thread in process.last.threads
        if not thread.main and any(map(is_own_code, thread.frames))
    ]
    others = [thread for thread in others if joins or thread.waits != "sleep"]
    others.sort(key=lambda thread: thread.waits == "sleep")
    return others[0] if others else main


def _blocked(process: Examined, thread: ThreadLook, group: int) -> How:
    below, frame = _below(thread.frames), user_frame(thread.frames)
    where = "" if thread.main else f", in its thread {clean(thread.name) or thread.tid},"
    if _any(_COLLECTIVE, below) or (group > 1 and _any(_BACKWARD, below)):
        return How("collective", 0.9, frame, f"waits in a collective{where}")
    if thread.waits == "openmp":
        return How("OpenMP", 0.95, frame, f"waits for threads of OpenMP{where}")
    if _holds_gil(process, thread):
        return How(
            "native code",
            0.9,
            frame,
            f"waits in native code and holds the interpreter's lock{where}",
        )
    kind, confidence, doing = _waiting(process, thread, below)
    return How(kind, confidence, frame, doing + where)


def _holds_gil(process: Examined, thread: ThreadLook) -> bool:
    """Say whether a thread held the interpreter's lock at each look, which no thread that merely
    waits does.
    """
    held = [each.holds_gil for each in _at_each_look(process, thread) if each.holds_gil is not None]
    return len(held) > 1 and all(held)


def _waiting(
    process: Examined, thread: ThreadLook, below: Sequence[Frame]
) -> tuple[HangKind, float, str]:
    """Return kind, confidence and words for a thread that waits.

    By its frames if they say it, else by the kernel.
    """
    waits = thread.waits
    if process.last.state == "D" and waits in ("", "device"):
        waits = "file"
    if _any(_CHILD, below) and not _any(_QUEUE, below):
        return "process", 0.9, "waits for a process"
    if _any(_QUEUE, below) and waits != "child":
        return "queue", 0.9, "waits for a queue"
    if _any(_CONNECTION, below) and waits != "child":
        return "pipe", 0.8, "waits for another process to say something"
    if waits == "poll":
        return "socket", 0.8 if _any(_NETWORK, below) else 0.5, "waits for a connection or a pipe"
    if waits == "device":
        return (
            ("GPU sync", 0.8, "waits for the GPU")
            if process.uses_gpu
            else ("I/O", 0.6, "waits for a device")
        )
    if waits == "futex" and process.uses_gpu and _any(_CUDA, below):
        return "GPU sync", 0.7, "waits for the GPU"
    kind, confidence, doing = KIND_OF.get(waits) or _by_frames(below)
    return kind, confidence, doing


def _by_frames(below: Sequence[Frame]) -> tuple[HangKind, float, str]:
    """Return what the frames alone say, where the kernel may not be asked."""
    if _any(_THREADS, below):
        return "lock", 0.6, "waits for a lock or a thread"
    if _any(_NETWORK, below):
        return "socket", 0.6, "waits for a connection"
    if _any(_CUDA, below):
        return "GPU sync", 0.6, "waits for the GPU"
    return "unknown", 0.3, "stands still"
