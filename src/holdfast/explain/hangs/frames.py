"""Determine from a stack what a process is executing, such as the loader or a collective.

Frames are ordered from outermost to innermost. ``classification`` combines the stack with the
process's CPU time and with the kernel's report on what the process waits for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from holdfast.explain.evidence import Frame, is_user_code
from holdfast.explain.hangs.process_samples import ExaminedProcess, clean_name

# Each of these patterns is searched for in the file of a frame.
TORCH = re.compile(
    r"/(?:site|dist)-packages/torch/|/torch/(?:nn|autograd|_ops|optim|utils|_tensor)"
)
COLLECTIVE = re.compile(
    r"/torch/distributed/(?!elastic|launcher)|/torch/nn/parallel/distributed\.py"
    r"|/torch/nn/modules/_functions\.py|/deepspeed/comm/|/horovod/"
)
BACKWARD = re.compile(r"/torch/autograd/(?:graph|__init__)\.py$")
CUDA = re.compile(r"/torch/(?:cuda|accelerator|xpu|npu)/")
THREADS = re.compile(r"(?:^|/)(?:threading|concurrent/futures/(?:_base|thread))\.py$")
THREAD_QUEUE = re.compile(r"/(?:queue|asyncio/\w+)\.py$")
QUEUE = re.compile(r"(?:^|/)(?:queue|multiprocessing/queues|multiprocessing/managers)\.py$")
CHILD_PROCESS = re.compile(
    r"(?:^|/)(?:subprocess"
    r"|multiprocessing/(?:process|popen_fork|popen_spawn_posix|popen_forkserver|pool)"
    r"|concurrent/futures/process)\.py$"
)
CONNECTION = re.compile(r"(?:^|/)multiprocessing/connection\.py$")
NETWORK = re.compile(
    r"(?:^|/)(?:socket|ssl|selectors|http/client|asyncio/\w+)\.py$"
    r"|/(?:urllib3?|requests|httpx|httpcore|aiohttp|botocore|fsspec|s3fs|gcsfs|grpc|redis"
    r"|huggingface_hub)/"
)
_C10D_WRAPPER = re.compile(r"/torch/distributed/c10d_logger\.py$")
_GUARD_WAIT = re.compile(r"/holdfast/guard/ranks/(?:messages|tape)\.py$")
_GUARD_CALL = re.compile(r"/holdfast/guard/(?:guard|hosted)\.py$")
_LOADER = re.compile(r"/torch/utils/data/dataloader\.py$|/holdfast/loader/(?:\w+/)*\w+\.py$")
_IDLE_WORKER = re.compile(r"/(?:queues|connection|selectors)\.py$")
# This pattern is searched for in a frame's file and function, joined by a colon.
_FETCH = re.compile(r"/torch/utils/data/_utils/fetch\.py:|/holdfast/loader/workers/fetch\.py:")

# Guard functions whose name in the stack differs from the name in the user's script.
_NAMES_OF_GUARD_CALLS = {
    "__init__": "Guard(...)",
    "_loop": "guard.batches",
    "__exit__": "guard.close",
}
# A process whose stack is unknown is assumed to wait for a batch if it is in one of these phases.
_PHASES_OF_WAITING = ("data wait", "evaluation", "end of epoch")


def any_file_matches(pattern: re.Pattern[str], frames: Sequence[Frame]) -> bool:
    """Return whether the file of any frame matches a pattern."""
    return any(pattern.search(frame.file) for frame in frames)


def frames_since_fork(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the frames that were called since the process was forked.

    The outer frames, which only show where the parent process started this process, are omitted.
    """
    for index in reversed(range(len(frames))):
        frame = frames[index]
        if frame.function.endswith("_bootstrap") and frame.file.endswith(
            "multiprocessing/process.py"
        ):
            return tuple(frames[index + 1 :])
    return tuple(frames)


def frame_to_show(frames: Sequence[Frame]) -> Frame | None:
    """Return the frame of a stack that is most useful to the user.

    Returns:
        The innermost frame in user code or, if there is none, the innermost frame in an installed
        package other than torch. If there is no such frame either, the innermost frame of the
        stack. None for an empty stack.
    """
    frames = frames_since_fork(frames)
    for frame in reversed(frames):
        if is_user_code(frame):
            return frame
    for frame in reversed(frames):
        if "-packages/" in frame.file and not TORCH.search(frame.file):
            return frame
    return frames[-1] if frames else None


def called_by_user(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Return the frames that were called from the innermost frame in user code.

    Return all frames if none of them is in user code.
    """
    frames = frames_since_fork(frames)
    for index in reversed(range(len(frames))):
        if is_user_code(frames[index]):
            return tuple(frames[index + 1 :])
    return tuple(frames)


def short_place(frame: Frame) -> str:
    """Return a frame as text without its directory, such as ``"model.py:12 in forward"``."""
    return f"{clean_name(Path(frame.file).name)}:{frame.line} in {clean_name(frame.function)}"


def is_idle_worker(process: ExaminedProcess) -> bool:
    """Return whether a process is a loader worker that is waiting for work."""
    frames = frames_since_fork(process.newest.main_thread.frames)
    if not is_in_worker_loop(frames) or _makes_a_batch(frames):
        return False
    return _IDLE_WORKER.search(frames[-1].file) is not None


def is_in_worker_loop(frames: Sequence[Frame]) -> bool:
    """Return whether a stack is that of a worker of torch's or holdfast's loader."""
    return any("_worker_loop" in frame.function for frame in frames)


def waits_for_workers(process: ExaminedProcess) -> bool:
    """Return whether a process waits for a batch that a loader worker is to deliver."""
    frames = process.newest.main_thread.frames
    if not frames:
        return process.phase in _PHASES_OF_WAITING
    called = called_by_user(frames)
    return any_file_matches(_LOADER, called) and not _makes_a_batch(called)


def _makes_a_batch(frames: Sequence[Frame]) -> bool:
    """Return whether a stack shows that a process is loading the samples of a batch.

    Unpacking a batch that a worker has sent does not count, because it is part of waiting for the
    worker.
    """
    return any(_FETCH.search(f"{frame.file}:{frame.function}") for frame in frames)


def uses_holdfast_loader(process: ExaminedProcess) -> bool:
    """Return whether the main thread is in the code of holdfast's loader, not torch's."""
    return any("/holdfast/loader/" in frame.file for frame in process.newest.main_thread.frames)


def is_in_backward(process: ExaminedProcess) -> bool:
    """Return whether the main thread is in a backward pass.

    DDP averages gradients in the backward pass, so a process can wait in a collective that the
    user's code does not call.
    """
    return any_file_matches(BACKWARD, called_by_user(process.newest.main_thread.frames))


def find_guard_call(process: ExaminedProcess) -> str | None:
    """Return the Guard call in which a process waits for other ranks, or None if there is none.

    An example of a returned call is ``"guard.validated"``.
    """
    called = called_by_user(process.newest.main_thread.frames)
    if not any_file_matches(_GUARD_WAIT, called):
        return None
    for frame in called:
        if _GUARD_CALL.search(frame.file):
            # py-spy puts the class name before the method name.
            name = clean_name(frame.function.rpartition(".")[2])
            return _NAMES_OF_GUARD_CALLS.get(name, f"guard.{name}")
    return "a guard call"


def find_collective_call(process: ExaminedProcess) -> str | None:
    """Return the name of the ``torch.distributed`` function that user code called, or None.

    An example of a returned name is ``"barrier"``.
    """
    for frame in called_by_user(process.newest.main_thread.frames):
        if _C10D_WRAPPER.search(frame.file):
            continue
        if frame.file.endswith("/torch/distributed/distributed_c10d.py"):
            return clean_name(frame.function.rpartition(".")[2])
        return None
    return None
