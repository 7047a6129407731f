"""What was seen of a process that stands still.

Its stacks, twice, and what the kernel says that it waits for.

Pure: gathered by ``supervise``, judged by ``hangs``. Names in it come from a stranger's process:
    control characters
are taken out here, and whoever shows them escapes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from holdfast.core.text import sanitise
from holdfast.explain.evidence import Frame

Waits = str
"""What a thread waits for, by the names of ``kernel.yaml``; ``"running"``, ``"openmp"``, or empty.
"""

_LONGEST_NAME = 300

_KERNEL = yaml.load(  # by libyaml where it is there, ten times as fast
    resources.files(__package__).joinpath("kernel.yaml").read_text(encoding="utf-8"),
    getattr(yaml, "CSafeLoader", yaml.SafeLoader),  # noqa: S506 - both are safe loaders
)
_WAITS: dict[str, Waits] = {
    name: waits for waits, names in _KERNEL["system calls"].items() for name in names.split()
}
_CHANNELS: dict[Waits, str] = _KERNEL["kernel functions"]
KIND_OF: dict[str, Any] = _KERNEL["kinds"]
"""Kind of hang, confidence and words, by what a thread waits for."""
_OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b")


def clean(text: str) -> str:
    """Return a name without control characters, and not longer than anybody reads."""
    return sanitise(text, most=_LONGEST_NAME)


def waits_for(*, syscall: str, channel: str = "", target: str = "", library: str = "") -> Waits:
    """Say what a thread waits for, by its system call: ``"running"`` if in none, empty if unknown.

    `channel` is the kernel function that it sleeps in, `target` what the descriptor is that the
    call was given, as ``/proc/<pid>/fd`` names it, and `library` the file that the call was made
    from.
    """
    if syscall == "running":
        return "running"
    if syscall == "futex" and _OPENMP.search(library):
        return "openmp"
    if syscall in ("read", "readv", "write", "writev"):
        if target.startswith("pipe:"):
            return "pipe read" if syscall.startswith("read") else "pipe write"
        if target.startswith(("socket:", "anon_inode:")):
            return "socket"
    if found := _WAITS.get(syscall):
        return found
    for waits, pattern in _CHANNELS.items():
        if channel and re.search(pattern, channel):
            return waits
    return (
        "file" if syscall in ("read", "readv", "write", "writev") and target.startswith("/") else ""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadLook:
    """One thread at one moment."""

    tid: int = 0  # its number for the system; 0 if unknown
    name: str = ""  # as Python calls it
    main: bool = False  # whether it is the main thread
    frames: tuple[Frame, ...] = ()  # python frames, innermost last
    holds_gil: bool | None = None  # whether it holds the interpreter's lock; None if unknown
    waits: Waits = ""  # what it waits for
    target: str = ""  # file, pipe or socket of that, if it is one


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLook:
    """One process at one moment."""

    seconds: float  # when, on the monotonic clock
    # Where the stacks are from: ``"py-spy"``, ``"faulthandler"`` or ``"/proc"`` (no stacks)
    source: str = "/proc"
    state: str = "S"  # letter of ``/proc/<pid>/stat``
    cpu_seconds: float = 0.0  # used so far
    io_bytes: int = 0  # read and written so far, as far as known
    threads: tuple[ThreadLook, ...] = ()  # its threads, the main one first

    @property
    def main(self) -> ThreadLook:
        """Return the main thread, or an empty one."""
        return next((thread for thread in self.threads if thread.main), ThreadLook(main=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One process that was looked at, mostly twice, about a second apart."""

    pid: int  # its number
    ppid: int = 0  # its parent's
    role: str = "other"  # as ``ProcessInfo.role``; ``"unobserved"`` for one without an observer
    rank: int | None = None
    phase: str = ""  # in words, such as ``"data wait"``; empty if it has no board
    step: int = 0  # steps that it has made
    seconds: float = 0.0  # how long it has stood still; 0 if it has no board
    judged: bool = False  # whether its progress is watched
    looks: tuple[ProcessLook, ...] = ()  # in order
    # names of the native functions that the main thread is in below Python's, innermost first, or
    # None if nobody asked
    native: tuple[str, ...] | None = None
    uses_gpu: bool = False  # whether it has a device of a GPU open

    @property
    def last(self) -> ProcessLook:
        """Return the newest look."""
        return self.looks[-1] if self.looks else ProcessLook(seconds=0.0)

    @property
    def cpu_share(self) -> float:
        """Return how much of one processor it used between the first look and the last."""
        return self._rate(lambda look: look.cpu_seconds)

    @property
    def io_rate(self) -> float:
        """Return how many bytes a second it read and wrote meanwhile."""
        return self._rate(lambda look: float(look.io_bytes))

    def _rate(self, of: Callable[[ProcessLook], float]) -> float:
        if len(self.looks) < 2:
            return 0.0
        seconds = self.looks[-1].seconds - self.looks[0].seconds
        return (of(self.looks[-1]) - of(self.looks[0])) / seconds if seconds > 0 else 0.0
