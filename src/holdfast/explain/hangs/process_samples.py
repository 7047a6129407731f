"""Samples of a process that makes no progress: its stacks and what the kernel reports about it.

A process is usually sampled twice, about a second apart, to see whether anything changes.
``supervise`` takes the samples, and ``classification`` and ``blame`` interpret them.

The names in these records come from an untrusted process. `clean_name` removes control characters
from a name, but code that displays the name must also escape it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from holdfast.core.text import sanitise
from holdfast.explain.evidence import Frame

# What a thread waits for, or "" if unknown.
WaitKind = Literal[
    "",
    "running",
    "openmp",
    "futex",
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

_LONGEST_NAME = 300
_READS = ("read", "readv")
_WRITES = ("write", "writev")
_OPENMP = re.compile(r"lib(gomp|iomp5|omp)\b")
# For each thing that a thread can wait for, the system calls in which the thread waits for it.
_SYSTEM_CALLS: dict[WaitKind, str] = {
    "futex": "futex futex_waitv",
    "sleep": "nanosleep clock_nanosleep",
    "child": "wait4 waitid",
    "socket": "connect accept accept4 sendto recvfrom sendmsg recvmsg",
    "poll": "poll ppoll select pselect6 epoll_wait epoll_pwait",
    "file": (
        "open openat close fsync fdatasync pread64 pwrite64 statx newfstatat getdents64 sendfile"
        " rename"
    ),
    "file lock": "flock fcntl",
    "device": "ioctl",
    "signal": "pause rt_sigsuspend rt_sigtimedwait",
}
_WAITS_OF_SYSTEM_CALL: dict[str, WaitKind] = {
    system_call: waits
    for waits, system_calls in _SYSTEM_CALLS.items()
    for system_call in system_calls.split()
}
# For each thing that a thread can wait for, a pattern for the kernel functions in which the thread
# waits for it, as named by ``/proc/<pid>/wchan`` on Linux 5.10 to 6.18. The first pattern that
# matches wins.
_KERNEL_FUNCTIONS: dict[WaitKind, str] = {
    "futex": "futex",
    "sleep": "nanosleep|hrtimer",
    "child": "do_wait$|wait_consider|kernel_wait4|do_wait_pid",
    "pipe read": "pipe_read",
    "pipe write": "pipe_write",
    "socket": "unix_stream|sk_|inet_|tcp_|sock_|skb_|wait_woken",
    "file lock": "lock_inode|flock",
    "poll": "poll|select|ep_",
    "file": (
        "wait_for_partner|fifo_open|io_schedule|folio_|nfs|rpc_|request_wait_answer|jbd2|ext4|xfs"
        "|fuse"
    ),
    "device": "nvidia|nv_|amdgpu|kfd_",
    "signal": "sigsuspend|sigtimedwait|do_pause",
}


def clean_name(text: str) -> str:
    """Return a name without control characters, truncated to a readable length."""
    return sanitise(text, most=_LONGEST_NAME)


def classify_wait(
    *, syscall: str, channel: str = "", target: str = "", library: str = ""
) -> WaitKind:
    """Return what a thread waits for, or "" if unknown.

    Args:
        syscall: The name of the system call that the thread is in, ``"running"`` if the thread is
            not in a system call, or empty if unknown.
        channel: The kernel function in which the thread sleeps, as named by
            ``/proc/<pid>/wchan``.
        target: The file, pipe or socket that was passed to the system call, as named by
            ``/proc/<pid>/fd``.
        library: The executable or shared library that made the system call.
    """
    if syscall == "running":
        return "running"
    if syscall == "futex" and _OPENMP.search(library):
        return "openmp"
    # The target of a read or write call is more informative than the kernel function, unless the
    # target is a path, which may be that of a named pipe.
    transferred = _transferred(syscall, target)
    if transferred not in ("", "file"):
        return transferred
    return _WAITS_OF_SYSTEM_CALL.get(syscall) or _waits_of_kernel_function(channel) or transferred


def _transferred(syscall: str, target: str) -> WaitKind:
    """Return what a read or write call waits for, inferred from the call's target.

    Return "" for any other system call, or if the target is unknown.
    """
    if syscall not in (*_READS, *_WRITES):
        return ""
    if target.startswith("pipe:"):
        return "pipe read" if syscall in _READS else "pipe write"
    if target.startswith(("socket:", "anon_inode:")):
        return "socket"
    return "file" if target.startswith("/") else ""


def _waits_of_kernel_function(name: str) -> WaitKind:
    """Return what a thread that sleeps in a kernel function waits for, or "" if unknown."""
    if name:
        for waits, pattern in _KERNEL_FUNCTIONS.items():
            if re.search(pattern, name):
                return waits
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadSample:
    """The state of one thread when its process was sampled."""

    # The kernel's thread id, or 0 if unknown.
    tid: int = 0
    # The name of the Python thread.
    name: str = ""
    # Whether this is the main thread.
    is_main: bool = False
    # The Python frames, with the innermost frame last.
    frames: tuple[Frame, ...] = ()
    # Whether the thread holds the GIL; None if unknown.
    holds_gil: bool | None = None
    waits: WaitKind = ""
    # The file, pipe or socket that the thread waits for; empty if it waits for something else.
    target: str = ""
    # How long the thread has so far been ready to run but waited for a free CPU; 0 if unknown.
    cpu_wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSample:
    """The state of one process when it was sampled."""

    # The time of the sample, in seconds on the monotonic clock.
    seconds: float
    # The source of the stacks: "py-spy", "faulthandler", or "/proc", which provides no stacks.
    source: str = "/proc"
    # The state letter in ``/proc/<pid>/stat``.
    state: str = "S"
    # The CPU time that the process has used so far.
    cpu_seconds: float = 0.0
    # The number of bytes that the process has read and written so far; 0 if unknown.
    io_bytes: int = 0
    # The threads of the process that run Python, with the main thread first.
    threads: tuple[ThreadSample, ...] = ()
    # All other threads of the process, such as those of OpenMP.
    native_threads: tuple[ThreadSample, ...] = ()

    @property
    def main_thread(self) -> ThreadSample:
        """Return the main thread, or an empty `ThreadSample` if it is unknown."""
        for thread in self.threads:
            if thread.is_main:
                return thread
        return ThreadSample(is_main=True)

    def cpu_wait_seconds_of(self, tid: int) -> float:
        """Return how long a thread has waited for a free CPU so far; 0 if unknown."""
        for thread in (*self.threads, *self.native_threads):
            if thread.tid == tid:
                return thread.cpu_wait_seconds
        return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedProcess:
    """A process with what is known about it, and usually two samples, about a second apart."""

    pid: int
    ppid: int = 0
    # A `ProcessInfo.role`, or "unobserved" for a process without an observer.
    role: str = "other"
    rank: int | None = None
    # The name of the current phase, such as "data wait"; empty if the process publishes no phase.
    phase: str = ""
    # How many steps the process has completed.
    step: int = 0
    # Seconds without progress; 0 if the process does not publish its progress.
    seconds: float = 0.0
    # Whether the watchdog watches the progress of this process.
    judged: bool = False
    # The samples of the process, oldest first.
    samples: tuple[ProcessSample, ...] = ()
    # The native functions called by the innermost Python frame of the main thread, with the
    # innermost function first. None if no native stack was taken.
    native: tuple[str, ...] | None = None
    # The source text of the main thread's innermost line; empty if it could not be read. It is read
    # only if the line does not change and no native stack was taken.
    source_line: str = ""
    # Whether the process has the device file of a GPU open.
    uses_gpu: bool = False

    @property
    def newest(self) -> ProcessSample:
        """Return the newest sample, or an empty `ProcessSample` if there is none."""
        return self.samples[-1] if self.samples else ProcessSample(seconds=0.0)

    @property
    def cpu_share(self) -> float:
        """Return the fraction of one CPU that was used between the first and the last sample."""
        return self._rate(lambda sample: sample.cpu_seconds)

    @property
    def io_rate(self) -> float:
        """Return the bytes read and written per second between the first and last sample."""
        return self._rate(lambda sample: float(sample.io_bytes))

    @property
    def observed_seconds(self) -> float:
        """Return the time between the first and last sample."""
        return self.newest.seconds - self.samples[0].seconds if self.samples else 0.0

    def cpu_wait_share_of(self, tid: int) -> float:
        """Return the fraction of time in which a thread was ready to run but had no CPU.

        Args:
            tid: The kernel's thread id.
        """
        return self._rate(lambda sample: sample.cpu_wait_seconds_of(tid))

    def _rate(self, amount: Callable[[ProcessSample], float]) -> float:
        """Return the increase in an amount per second between the first and last sample."""
        if len(self.samples) < 2:
            return 0.0
        first, last = self.samples[0], self.samples[-1]
        seconds = last.seconds - first.seconds
        return (amount(last) - amount(first)) / seconds if seconds > 0 else 0.0
