"""Run a function in a forked copy of this process, so that it leaves no trace in this one.

Only where nothing but the CPU is used: the context of an accelerator does not survive a fork, nor
    do the threads that
autograd has for each (see `backward_works_in_a_copy`).

Does not: know what is run there. It must say what it has found as JSON values.
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

from holdfast.core.warned import ignoring

_TIMEOUT_SECONDS = 60.0
_PR_SET_PDEATHSIG = 1
is_copying = False
"""Whether the fork under way is of such a copy: whoever records this process stays out of it."""
# Sent ahead, since the end of a pipe may be held open by other forks of the caller
_LENGTH = struct.Struct("=Q")


class NoAnswer(Exception):  # noqa: N818 - an outcome, not a mistake
    """The copy could not be made, has failed or has said nothing; the text says which.

    Attributes:
        died: Whether the copy ended without an answer.
        not_made: Whether the copy could not be made, because the system refused a process, a
            descriptor or memory.
    """

    def __init__(self, why: str, *, died: bool = False, not_made: bool = False) -> None:
        super().__init__(why)
        self.died = died
        self.not_made = not_made


def backward_works_in_a_copy() -> bool:
    """Say whether a copy of this process may make a backward pass.

    torch refuses it if autograd has threads, one for each accelerator of the machine. It starts
    them in the first backward pass of a process, even of a model on the CPU.

    Raises:
        NoAnswer: If the threads cannot be listed, for example because no descriptor is left.
    """
    try:
        threads = list(Path("/proc/self/task").iterdir())
    except OSError as error:
        raise NoAnswer(
            f"the threads of this process cannot be listed ({error})", not_made=True
        ) from error
    for thread in threads:
        try:
            name = (thread / "comm").read_text()
        except (FileNotFoundError, ProcessLookupError):
            # The thread has ended.
            continue
        except OSError as error:
            raise NoAnswer(
                f"the threads of this process cannot be read ({error})", not_made=True
            ) from error
        if name.startswith("pt_autograd"):
            return False
    return True


def in_a_copy_of_this_process(
    run: Callable[[], dict[str, Any]], *, timeout_seconds: float = _TIMEOUT_SECONDS
) -> dict[str, Any]:
    """Fork, run there, and return what the copy has found; NaN and Inf may be in it.

    `NoAnswer` has the reason else.

    The copy uses one thread (OpenMP's others do not survive a fork), says nothing, is the first to
    be killed when the machine's memory is short, and dies with its parent, or when it has not
    answered in time.
    """
    try:
        reading, writing = os.pipe()
    except OSError as error:
        raise NoAnswer(f"no pipe for a copy of this process ({error})", not_made=True) from error
    global is_copying
    with ignoring(DeprecationWarning):  # Python 3.12 on forking with threads
        try:
            is_copying = True
            child = os.fork()
        except (OSError, MemoryError) as error:
            os.close(reading)
            os.close(writing)
            raise NoAnswer(f"cannot fork ({error})", not_made=True) from error
        finally:
            is_copying = False
    if child == 0:
        # The copy needs a descriptor, and this one may be the last.
        os.close(reading)
        _be_the_copy(run, writing)
    os.close(writing)
    try:
        answer = _read_answer(reading, timeout_seconds)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if "failure" in answer:
        raise NoAnswer(answer["failure"])
    found: dict[str, Any] = answer["found"]
    return found


def _read_answer(reading: int, timeout_seconds: float) -> dict[str, Any]:
    received, wanted = b"", _LENGTH.size
    while len(received) < wanted:
        ready, _, _ = select.select([reading], [], [], timeout_seconds)
        piece = os.read(reading, 65536) if ready else b""
        if not piece:
            why = "died" if ready else f"gave no answer in {timeout_seconds:g} s"
            raise NoAnswer(f"the copy of the process {why}", died=bool(ready))
        received += piece
        if len(received) >= _LENGTH.size:
            wanted = _LENGTH.size + _LENGTH.unpack_from(received)[0]
    answer: dict[str, Any] = json.loads(received[_LENGTH.size :])
    return answer


def _be_the_copy(run: Callable[[], dict[str, Any]], writing: int) -> NoReturn:
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A terminal or a scheduler signals all processes. The caller handles the signal and still
        # needs the answer.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        libc = ctypes.CDLL(None)
        if hasattr(libc, "prctl"):
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("1000")
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        answer = _attempted(run)
        answer = _LENGTH.pack(len(answer)) + answer
        while answer:
            answer = answer[os.write(writing, answer) :]
    finally:
        os._exit(0)


def _attempted(run: Callable[[], dict[str, Any]]) -> bytes:
    try:
        return json.dumps({"found": run()}).encode()
    except Exception as error:  # noqa: BLE001 - whatever it was, the parent goes on training
        first = (str(error).strip().splitlines() or [""])[0]
        return json.dumps({"failure": f"{type(error).__name__}: {first}"[:300]}).encode()
