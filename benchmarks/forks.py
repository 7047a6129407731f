"""Run a function in a forked child.

Torch is imported already, and its death is an outcome like any other.

The parent must have one thread only (call `single_threaded` first), since other threads do not
survive a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

_fork = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """How a child ended."""

    value: Any = None  # what its function returned; None if it did not return
    error: str | None = None  # type and first line of the exception that it raised
    signal: str | None = None  # name of the signal that killed it
    timed_out: bool = False  # it was killed because it took too long

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
        self._number = _fork.RawValue("q", 0)

    def set(self, number: int) -> None:
        """Write the number."""
        self._number.value = number

    def get(self) -> int:
        """Read the number."""
        return int(self._number.value)


class Child:
    """A forked child that runs a function, which returns what can be pickled, and then ends."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._reading, writing = _fork.Pipe(duplex=False)
        self._process = _fork.Process(target=_live, args=(run, writing))
        self._process.start()
        writing.close()
        self.pid = self._process.pid or 0
        # Not its sentinel: a pipe, of which workers that the child has started hold the other end.
        self._death = os.pidfd_open(self.pid)

    @property
    def has_ended(self) -> bool:
        """Return whether the child is dead already."""
        return not self._process.is_alive()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def finish(self, timeout_seconds: float = 120.0) -> Fate:
        """Wait for the end and return how it came about."""
        answer: tuple[Any, str | None] | None = None
        timed_out = not wait([self._reading, self._death], timeout_seconds)
        if timed_out:
            self.kill()
        elif self._reading.poll():
            with contextlib.suppress(EOFError):  # killed before it could say anything
                answer = self._reading.recv()
        self._process.join()
        self._reading.close()
        os.close(self._death)
        code = self._process.exitcode or 0
        if timed_out:
            return Fate(timed_out=True)
        if code < 0:
            return Fate(signal=signal.Signals(-code).name)
        return (
            Fate(error=f"exit code {code}")
            if answer is None
            else Fate(value=answer[0], error=answer[1])
        )


def _live(run: Callable[[], Any], writing: Connection) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    answer: tuple[Any, str | None]
    try:
        answer = (run(), None)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent is to know
        first = (str(error).strip().splitlines() or [""])[0]
        answer = (None, f"{type(error).__name__}: {first}"[:300])
    writing.send(answer)
    os._exit(0)


def in_a_fork(run: Callable[[], Any], timeout_seconds: float = 120.0) -> Fate:
    """Run a function in a child and return how that ended."""
    return Child(run).finish(timeout_seconds)


def value_in_a_fork(run: Callable[[], Any], name: str, timeout_seconds: float = 900.0) -> Any:
    """Return what a function returns in a child; an error with this name if it does not return."""
    fate = in_a_fork(run, timeout_seconds)
    if fate.value is None:
        raise RuntimeError(f"{name}: {fate.error or fate.how}")
    return fate.value


def single_threaded() -> None:
    """Keep this process at one thread, so that it can be forked, and load what children would each
    load anew.

    Raises:
        RuntimeError: if other threads run already.
    """
    torch.set_num_threads(1)
    # The first optimizer imports a second's worth of modules
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
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
