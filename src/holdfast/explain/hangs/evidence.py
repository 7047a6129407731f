"""What was seen of a process that stands still: its stacks, twice, and what the kernel says that it waits for.

Pure: gathered by ``supervise``, judged by ``hangs``. Names in it come from a stranger's process: control characters
are taken out here, and whoever shows them escapes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from holdfast.core.text import sanitise
from holdfast.explain.evidence import Frame

Waits = Literal[
    "",
    "running",
    "futex",
    "openmp",
    "sleep",
    "child",
    "pipe read",
    "pipe write",
    "socket",
    "poll",
    "file",
    "file lock",
    "device",
    "signal",
]
"""What a thread waits for, as far as the kernel says; empty if it does not."""

_LONGEST_NAME = 300

_SYSCALLS: dict[Waits, str] = {
    "futex": "futex futex_waitv",
    "sleep": "nanosleep clock_nanosleep",
    "child": "wait4 waitid",
    "socket": "connect accept accept4 sendto recvfrom sendmsg recvmsg",
    "poll": "poll ppoll select pselect6 epoll_wait epoll_pwait",
    "file": "open openat close fsync fdatasync pread64 pwrite64 statx newfstatat getdents64 sendfile rename",
    "file lock": "flock fcntl",
    "device": "ioctl",
    "signal": "pause rt_sigsuspend rt_sigtimedwait",
}
_WAITS: dict[str, Waits] = {name: waits for waits, names in _SYSCALLS.items() for name in names.split()}
_CHANNELS: tuple[tuple[str, Waits], ...] = (
    (r"futex", "futex"),
    (r"nanosleep|hrtimer", "sleep"),
    (r"do_wait$|wait_consider|kernel_wait4|do_wait_pid", "child"),
    (r"pipe_read", "pipe read"),
    (r"pipe_write", "pipe write"),
    (r"unix_stream|sk_|inet_|tcp_|sock_|skb_|wait_woken", "socket"),
    (r"lock_inode|flock", "file lock"),
    (r"poll|select|ep_", "poll"),
    (r"wait_for_partner|fifo_open|io_schedule|folio_|nfs|rpc_|request_wait_answer|jbd2|ext4|xfs|fuse", "file"),
    (r"nvidia|nv_|amdgpu|kfd_", "device"),
    (r"sigsuspend|sigtimedwait|do_pause", "signal"),
)
"""Names of kernel functions in /proc/<pid>/wchan, Linux 5.10 to 6.18."""
_OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b")


def clean(text: str) -> str:
    """Return a name without control characters, and not longer than anybody reads."""
    return sanitise(text, most=_LONGEST_NAME)


def waits_for(*, syscall: str, channel: str = "", target: str = "", library: str = "") -> Waits:
    """Say what a thread waits for.

    Args:
        syscall: Name of the system call that it is in; ``"running"`` if in none, empty if unknown.
        channel: Name of the kernel function that it sleeps in.
        target: What the descriptor is that the call was given, as ``/proc/<pid>/fd`` names it.
        library: File that the call was made from.
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
    for pattern, waits in _CHANNELS:
        if channel and re.search(pattern, channel):
            return waits
    return "file" if syscall in ("read", "readv", "write", "writev") and target.startswith("/") else ""


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
    source: str = "/proc"  # where the stacks are from: ``"py-spy"``, ``"faulthandler"`` or ``"/proc"`` (no stacks)
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
    # names of the native functions that the main thread is in below Python's, innermost first, or None if nobody
    # asked
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
