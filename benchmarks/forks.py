"""Run a function in a forked child: torch is imported already, and its death is an outcome like any other.

The parent must have one thread only (call `single_threaded` first), since other threads do not survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import pickle
import select
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_PR_SET_PDEATHSIG = 1
_NUMBER = struct.Struct("<q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """How a child ended.

    Args:
        value: What its function returned; None if it did not return.
        error: Type and first line of the exception that it raised.
        signal: Name of the signal that killed it.
        timed_out: It was killed because it took too long.
    """

    value: Any = None
    error: str | None = None
    signal: str | None = None
    timed_out: bool = False

    @property
    def how(self) -> str:
        """Return one word for the outcome."""
        if self.timed_out:
            return "timeout"
        if self.signal is not None:
            return self.signal
        return "returned" if self.error is None else "raised"


class Counter:
    """A whole number that parent and children share, in memory that outlives them."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _NUMBER.size)

    def set(self, number: int) -> None:
        """Write the number."""
        _NUMBER.pack_into(self._map, 0, number)

    def get(self) -> int:
        """Read the number."""
        return int(_NUMBER.unpack_from(self._map, 0)[0])


class Child:
    """A forked child that runs a function and then ends.

    Args:
        run: Returns what can be pickled.
    """

    def __init__(self, run: Callable[[], Any]) -> None:
        self._reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _live(run, writing)
        os.close(writing)
        self._death = os.pidfd_open(self.pid)

    @property
    def has_ended(self) -> bool:
        """Return whether the child is dead already."""
        return bool(select.select([self._death], [], [], 0)[0])

    def kill(self) -> None:
        """Send SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._death, signal.SIGKILL)

    def finish(self, timeout_seconds: float = 120.0) -> Fate:
        """Wait for the end and return how it came about."""
        deadline = time.monotonic() + timeout_seconds
        data, timed_out, watched = bytearray(), False, [self._reading, self._death]
        while True:
            ready = select.select(watched, [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                timed_out = True
                self.kill()
                deadline += 10.0
            elif self._reading in ready:
                chunk = os.read(self._reading, 2**20)
                data += chunk
                if not chunk:
                    watched.remove(self._reading)
            else:
                break
        status = os.waitpid(self.pid, 0)[1]
        os.close(self._reading)
        os.close(self._death)
        return _fate(bytes(data), status, timed_out=timed_out)


def _fate(data: bytes, status: int, *, timed_out: bool) -> Fate:
    if timed_out:
        return Fate(timed_out=True)
    if os.WIFSIGNALED(status):
        return Fate(signal=signal.Signals(os.WTERMSIG(status)).name)
    if not data:
        return Fate(error=f"exit code {os.WEXITSTATUS(status)}")
    value, error = pickle.loads(data)
    return Fate(value=value, error=error)


def _live(run: Callable[[], Any], writing: int) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        answer: tuple[Any, str | None]
        try:
            answer = (run(), None)
        except BaseException as error:  # noqa: BLE001 - the parent is told, whatever it is
            first = (str(error).strip().splitlines() or [""])[0]
            answer = (None, f"{type(error).__name__}: {first}"[:300])
        with open(writing, "wb") as pipe:
            pickle.dump(answer, pipe)
        code = 0
    finally:
        os._exit(code)


def in_a_fork(run: Callable[[], Any], timeout_seconds: float = 120.0) -> Fate:
    """Run a function in a child and return how that ended."""
    return Child(run).finish(timeout_seconds)


def single_threaded() -> None:
    """Keep this process at one thread, so that it can be forked, and load what children would each load anew.

    Raises:
        RuntimeError: if other threads run already.
    """
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # the first optimizer imports a second's worth of modules
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"{threads} threads run; forks need one")


def wait_until(reached: Callable[[], bool], child: Child, timeout_seconds: float = 60.0) -> bool:
    """Poll until something is so; False if the child ends before, or it takes too long."""
    deadline = time.monotonic() + timeout_seconds
    while not reached():
        if child.has_ended or time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True
