"""Faults that befall a loader.

Each kind strikes once, at a sample that a seed chooses, where it is fetched.

Real ones: signals, endless loops, a lock that is held at the fork, memory that the kernel refuses.
Used by the tests and by the benchmark; how a loader comes through is for ``loader_runs``.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

LENGTH = 64
BATCH_SIZE = 4
_MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")
_OOM_LIMIT_BYTES = 32 * 2**20
_SHM_BYTES = 2 * 2**20
_DESCRIPTORS = 48
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_REC, _MS_PRIVATE = 0x4000, 1 << 18
_FOREVER = 1e6

fork_lock = threading.Lock()
"""Held by a thread of the training process while workers are forked; each sample takes it."""


class UnpicklableError(Exception):
    """An error that holds something that cannot be sent to another process."""

    def __init__(self) -> None:
        super().__init__("holds a function")
        self.held = lambda: None


class UnbuildableError(Exception):
    """An error that its own arguments do not build again, as that of many a library."""

    def __init__(self, file: str, place: int) -> None:
        super().__init__(f"{file} is damaged at {place}")


class Samples:
    """Samples that are their index, noise from all three generators, and a payload.

    One of them has a fault, once.
    """

    def __init__(self, kind: Kind | None, at: int, marker: Path) -> None:
        self.kind = kind
        self.at = at
        self.marker = marker

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if self.kind is not None and index == self.at and self.kind.strike is not None:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
                self.kind.strike(self)
        payload = 1 if self.kind is None else self.kind.payload
        if self.kind is not None and self.kind.locks:
            with fork_lock:
                pass
        noise = torch.tensor(
            [random.random(), float(np.random.rand()), float(torch.rand(()))], dtype=torch.float64
        )
        numbers = np.full(payload, float(index))
        return (
            index,
            noise,
            numbers if self.kind is not None and self.kind.as_numpy else torch.from_numpy(numbers),
        )


# --- what strikes


def _signal(number: signal.Signals) -> Callable[[Samples], None]:
    return lambda _: os.kill(os.getpid(), number)


def _segfault(_: Samples) -> None:
    ctypes.string_at(0)


def _bus_error(_: Samples) -> None:
    """Read a mapped file behind its end, as a tensor in a full /dev/shm is read."""
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        mapped[0]


def _loop(_: Samples) -> None:
    while True:
        pass


def _hold_the_gil(_: Samples) -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def _raise(make: Callable[[], BaseException]) -> Callable[[Samples], None]:
    def strike(_: Samples) -> None:
        raise make()

    return strike


def _killed_while_sending(samples: Samples) -> None:
    """Get killed a moment later, when the batch of this sample or another one is on its way
    through the pipe.
    """
    delay = random.Random(samples.at).random() * 0.02
    threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _allocate_too_much(samples: Samples) -> None:
    """Allocate beyond the limit of a cgroup that only this process is in."""
    (_cgroup(samples.marker) / "cgroup.procs").write_text(str(os.getpid()))
    held = [bytes(os.urandom(2**20)) for _ in range(8 * _OOM_LIMIT_BYTES // 2**20)]
    raise AssertionError(f"the kernel let {len(held)} MiB pass")


# --- the surroundings


def _cgroup(marker: Path) -> Path:
    return _MEMORY_CGROUP / f"holdfast_{marker.parent.name}"


@contextlib.contextmanager
def _small_cgroup(marker: Path, _: threading.Event) -> Iterator[None]:
    _cgroup(marker).mkdir()
    try:
        (_cgroup(marker) / "memory.limit_in_bytes").write_text(str(_OOM_LIMIT_BYTES))
        yield
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                _cgroup(marker).rmdir()
                break
            time.sleep(0.01)  # a killed process leaves it a moment later


@contextlib.contextmanager
def _small_shm(_marker: Path, _told: threading.Event) -> Iterator[None]:
    """Mount a /dev/shm of 2 MiB for this process and its children; it stays."""
    failed = _mount_small_shm()
    if failed:
        raise OSError(failed)
    yield


def _mount_small_shm() -> str | None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) and libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNS):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    size = f"size={_SHM_BYTES}".encode()
    if libc.mount(None, b"/", None, _MS_REC | _MS_PRIVATE, None) or libc.mount(
        b"tmpfs", b"/dev/shm", b"tmpfs", 0, size
    ):
        return f"mount: {os.strerror(ctypes.get_errno())}"
    return None


@contextlib.contextmanager
def _few_descriptors(_marker: Path, _told: threading.Event) -> Iterator[None]:
    resource.setrlimit(resource.RLIMIT_NOFILE, (_DESCRIPTORS, _DESCRIPTORS))
    yield


@contextlib.contextmanager
def _lock_held(_: Path, told: threading.Event) -> Iterator[None]:
    """Let a thread hold the lock until a loss is told, or three seconds have passed."""
    held = threading.Event()

    def hold() -> None:
        with fork_lock:
            held.set()
            told.wait(3.0)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    yield
    told.set()
    holder.join()


def children(parent: int) -> list[int]:
    """Return the processes that a process has started and that are alive."""
    return [pid for pid, ppid, _ in _processes() if ppid == parent]


def sessions_processes(session: int) -> list[int]:
    """Return the processes of a session that are alive."""
    return [pid for pid, _, of in _processes() if of == session]


def _processes() -> Iterator[tuple[int, int, int]]:
    """Yield process, parent and session of all processes that are alive; a zombie is not."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, parent, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            if state not in "ZX":
                yield int(entry.name), int(parent), int(session)


@contextlib.contextmanager
def _killed_from_outside(marker: Path, _: threading.Event) -> Iterator[None]:
    """Kill one of the children at a random moment after the first have been started."""
    chance, over = random.Random(marker.parent.name), threading.Event()
    here = set(children(os.getpid()))

    def kill_one() -> None:
        while not (found := sorted(set(children(os.getpid())) - here)) and not over.is_set():
            time.sleep(0.001)
        over.wait(chance.random() * 0.05)
        if found and not over.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(found), signal.SIGKILL)
                marker.touch()

    killer = threading.Thread(target=kill_one)
    killer.start()
    yield
    over.set()
    killer.join()


# --- the kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of fault: what strikes where a sample is fetched, and the surroundings of the whole
    epoch.

    `cause` is what the cause of the heal has to match, None if no worker is lost. Where nothing
    ends by itself it `hangs`; `alone` it applies without workers; the loop may keep all batches,
    and takes its pace with each.
    """

    strike: Callable[[Samples], None] | None = None
    around: Callable[[Path, threading.Event], contextlib.AbstractContextManager[None]] | None = None
    cause: str | None = None
    hangs: bool = False
    alone: bool = False
    payload: int = 1
    as_numpy: bool = False
    locks: bool = False
    keeps: bool = False
    pace_seconds: float = 0.0


KINDS: dict[str, Kind] = {
    "SIGKILL": Kind(strike=_signal(signal.SIGKILL), cause="killed by SIGKILL"),
    "SIGSEGV": Kind(strike=_segfault, cause="killed by SIGSEGV"),
    "SIGBUS": Kind(strike=_bus_error, cause="killed by SIGBUS"),
    "SIGTERM": Kind(strike=_signal(signal.SIGTERM), cause="killed by SIGTERM"),
    "SIGSTOP": Kind(strike=_signal(signal.SIGSTOP), cause="was stopped", hangs=True),
    "endless loop": Kind(strike=_loop, cause="kept the loop waiting", hangs=True),
    "endless sleep": Kind(
        strike=lambda _: time.sleep(_FOREVER), cause="kept the loop waiting", hangs=True
    ),
    "regex holding the GIL": Kind(strike=_hold_the_gil, cause="kept the loop waiting", hangs=True),
    "lock held at the fork": Kind(
        around=_lock_held, cause="kept the loop waiting", hangs=True, locks=True
    ),
    "os._exit(3)": Kind(strike=lambda _: os._exit(3), cause="exited with code 3"),
    "os._exit(0)": Kind(strike=lambda _: os._exit(0), cause="exited with code 0"),
    "sys.exit": Kind(strike=lambda _: sys.exit(3), alone=True),
    "unpicklable exception": Kind(strike=_raise(UnpicklableError), alone=True),
    "unbuildable exception": Kind(strike=_raise(lambda: UnbuildableError("a.wav", 7)), alone=True),
    "StopIteration": Kind(strike=_raise(StopIteration), alone=True),
    "KeyboardInterrupt": Kind(strike=_raise(KeyboardInterrupt), cause="exited with code"),
    "out of memory": Kind(strike=_allocate_too_much, around=_small_cgroup, cause="out of memory"),
    "/dev/shm is full": Kind(around=_small_shm, cause="shared memory", payload=2**15),
    "file descriptors": Kind(
        around=_few_descriptors, cause="Too many open files|file descriptors", keeps=True
    ),
    "killed while sending": Kind(
        strike=_killed_while_sending,
        cause="killed by SIGKILL",
        payload=2**17,
        as_numpy=True,
        pace_seconds=0.003,
    ),
    "killed from outside": Kind(
        around=_killed_from_outside, cause="killed by SIGKILL", pace_seconds=0.003
    ),
}


def why_not_here(name: str) -> str | None:
    """Return why a kind cannot be made on this machine, or None."""
    if name == "out of memory":
        probe = _MEMORY_CGROUP / f"holdfast_probe_{os.getpid()}"
        try:
            probe.mkdir()
            try:
                (probe / "memory.limit_in_bytes").write_text(str(_OOM_LIMIT_BYTES))
            finally:
                probe.rmdir()
        except OSError as error:
            return f"no memory cgroup can be made: {error.strerror}"
    if name == "/dev/shm is full":
        pid = os.fork()
        if pid == 0:
            os._exit(0 if _mount_small_shm() is None else 1)
        if os.waitpid(pid, 0)[1]:
            return "no tmpfs can be mounted"
    return None
