"""Run a function in a forked copy of this process, so that its side effects do not occur here.

The function may use only the CPU: neither an accelerator's context nor autograd's accelerator
threads survive a fork (see `backward_works_in_a_copy`). Its result must consist of JSON values,
which the copy sends back through a pipe.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from holdfast.core.warned import ignore_warnings

# True during a fork. The observer of `holdfast run` reads it and does not record the copy.
is_copying = False

_TIMEOUT_SECONDS = 60.0
# The prctl(2) option that sets the signal that a process receives when its parent dies.
_PR_SET_PDEATHSIG = 1
# The highest value of oom_score_adj: if memory runs out, the kernel kills the copy first.
_KILLED_FIRST = "1000"
# The copy sends the length of its answer before the answer. Closing the pipe cannot mark the end,
# because other forks of the caller may keep the pipe open.
_LENGTH = struct.Struct("=Q")
_MAX_FAILURE_CHARACTERS = 300

Answer = dict[str, Any]


class NoAnswer(Exception):  # noqa: N818 - an outcome, not a mistake
    """There is no result, because the copy could not be made, failed, or did not answer.

    Attributes:
        died: Whether the copy ended without an answer.
        not_made: Whether the copy could not be made, because the system ran out of processes,
            descriptors or memory.
    """

    def __init__(self, why: str, *, died: bool = False, not_made: bool = False) -> None:
        super().__init__(why)
        self.died = died
        self.not_made = not_made


def backward_works_in_a_copy() -> bool:
    """Return whether a copy of this process can run a backward pass.

    torch refuses to run a backward pass in a forked process if autograd had already started its
    threads, one per accelerator, before the fork. On a machine with accelerators, the first
    backward pass of a process starts these threads, even if the model is on the CPU.

    Raises:
        NoAnswer: If the threads cannot be listed, for example because no descriptor is left.
    """
    return not any(name.startswith("pt_autograd") for name in _thread_names())


def _thread_names() -> list[str]:
    """Return the names under which the kernel lists this process's threads.

    Raises:
        NoAnswer: If the names cannot be read.
    """
    names = []
    try:
        for thread in Path("/proc/self/task").iterdir():
            # A thread may end before its name is read.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                names.append((thread / "comm").read_text())
    except OSError as error:
        raise NoAnswer(
            f"the threads of this process cannot be listed ({error})", not_made=True
        ) from error
    return names


def run_in_forked_copy(
    function: Callable[[], Answer], *, timeout_seconds: float = _TIMEOUT_SECONDS
) -> Answer:
    """Run a function in a forked copy of this process and return its result.

    The copy uses one thread, because OpenMP's worker threads do not survive a fork. The copy's
    output is discarded. If memory runs out, the kernel kills the copy before any other process. It
    also kills the copy when the parent dies.

    Args:
        function: The function to run. Its result must consist of JSON values (NaN and Inf are
            allowed).
        timeout_seconds: How long to wait for the copy to send data before killing it.

    Raises:
        NoAnswer: If the copy could not be made, failed, or did not answer in time.
    """
    try:
        reading, writing = os.pipe()
    except OSError as error:
        raise NoAnswer(
            f"cannot create a pipe for a copy of this process ({error})", not_made=True
        ) from error
    child = _fork(reading, writing)
    if child == 0:
        # Close `reading` first: the copy opens files, and if the process has reached its limit on
        # open files, no other descriptor is free.
        os.close(reading)
        _answer_and_exit(function, writing)
    os.close(writing)
    try:
        (length,) = _LENGTH.unpack(_read_bytes(reading, _LENGTH.size, timeout_seconds))
        message = json.loads(_read_bytes(reading, length, timeout_seconds))
    finally:
        os.close(reading)
        _kill(child)
    if "failure" in message:
        raise NoAnswer(message["failure"])
    answer: Answer = message["answer"]
    return answer


# --- in this process ------------------------------------------------------------------------------


def _fork(reading: int, writing: int) -> int:
    """Fork this process. Return the copy's process id in the parent, and 0 in the copy."""
    global is_copying
    # Python 3.12 warns about forking a process with threads.
    with ignore_warnings(DeprecationWarning):
        try:
            is_copying = True
            return os.fork()
        except (OSError, MemoryError) as error:
            os.close(reading)
            os.close(writing)
            raise NoAnswer(f"cannot fork ({error})", not_made=True) from error
        finally:
            is_copying = False


def _read_bytes(reading: int, count: int, timeout_seconds: float) -> bytes:
    """Return the next `count` bytes that the copy sends.

    Raises:
        NoAnswer: If the copy dies, or sends nothing for `timeout_seconds`.
    """
    received = b""
    while len(received) < count:
        ready, _, _ = select.select([reading], [], [], timeout_seconds)
        if not ready:
            raise NoAnswer(f"the copy of the process did not answer within {timeout_seconds:g} s")
        piece = os.read(reading, min(count - len(received), 65536))
        if not piece:
            raise NoAnswer("the copy of the process died", died=True)
        received += piece
    return received


def _kill(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


# --- in the copy ----------------------------------------------------------------------------------


def _answer_and_exit(function: Callable[[], Answer], writing: int) -> NoReturn:
    try:
        _set_signal_handlers()
        _become_first_to_be_killed()
        _discard_output()
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        _send(_run(function), writing)
    finally:
        os._exit(0)


def _set_signal_handlers() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A terminal or a scheduler sends these signals to all processes of a job. The copy ignores
    # them, because its parent handles them and still needs the copy's answer.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _become_first_to_be_killed() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_KILLED_FIRST)


def _discard_output() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _run(function: Callable[[], Answer]) -> bytes:
    """Call the function, and return its answer or the reason for its failure as a message."""
    try:
        return json.dumps({"answer": function()}).encode()
    except Exception as error:  # noqa: BLE001 - no error in the copy may stop the training run
        lines = str(error).strip().splitlines() or [""]
        failure = f"{type(error).__name__}: {lines[0]}"[:_MAX_FAILURE_CHARACTERS]
        return json.dumps({"failure": failure}).encode()


def _send(message: bytes, writing: int) -> None:
    rest = _LENGTH.pack(len(message)) + message
    while rest:
        written = os.write(writing, rest)
        rest = rest[written:]
