"""Read the kernel's view of a process: CPU time, transferred bytes, and what each thread waits for.

The evidence comes from files in ``/proc``. Reading most of them never blocks, even if the process
is stuck. Reading the memory map may block, so it is read only if no thread is in an uninterruptible
wait. Information that cannot be read is omitted.

``py_spy`` and ``faulthandler_dumps`` read the Python frames.
"""

from __future__ import annotations

import functools
import itertools
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.control_groups import read_fields
from holdfast.explain.hangs.process_samples import WaitKind, classify_wait, clean_name
from holdfast.supervise.process_tree import read_process, read_stat

_MAX_THREADS = 128
_MAX_DESCRIPTORS = 4096
_MAX_BYTES = 4 << 20
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# System calls in which a process may be stuck, with their numbers from the kernel's table for each
# architecture.
_X86 = """
    read 0  write 1  open 2  close 3  poll 7  ioctl 16  pread64 17  pwrite64 18  readv 19
    writev 20  select 23  pause 34  nanosleep 35  sendfile 40  connect 42  accept 43
    sendto 44  recvfrom 45  sendmsg 46  recvmsg 47  wait4 61  fcntl 72  flock 73  fsync 74
    fdatasync 75  rename 82  rt_sigtimedwait 128  rt_sigsuspend 130  futex 202  getdents64 217
    clock_nanosleep 230  epoll_wait 232  waitid 247  openat 257  newfstatat 262  pselect6 270
    ppoll 271  epoll_pwait 281  accept4 288  statx 332  futex_waitv 449
"""
_ARM = """
    epoll_pwait 22  fcntl 25  ioctl 29  flock 32  openat 56  close 57  getdents64 61  read 63
    write 64  readv 65  writev 66  pread64 67  pwrite64 68  sendfile 71  pselect6 72  ppoll 73
    newfstatat 79  fsync 82  fdatasync 83  waitid 95  futex 98  nanosleep 101
    clock_nanosleep 115  rt_sigsuspend 133  rt_sigtimedwait 137  accept 202  connect 203
    sendto 206  recvfrom 207  sendmsg 211  recvmsg 212  accept4 242  wait4 260  statx 291
    futex_waitv 449
"""


def _parse_system_calls(table: str) -> dict[int, str]:
    """Parse alternating names and numbers, and return the names of system calls by number."""
    words = table.split()
    return {int(number): name for name, number in zip(words[::2], words[1::2], strict=True)}


_SYSTEM_CALLS = _parse_system_calls({"x86_64": _X86, "aarch64": _ARM}.get(platform.machine(), ""))
# System calls whose first argument is a file descriptor.
_CALLS_ON_DESCRIPTORS = frozenset(
    {
        "read",
        "write",
        "readv",
        "writev",
        "pread64",
        "pwrite64",
        "recvfrom",
        "recvmsg",
        "sendto",
        "sendmsg",
        "connect",
        "accept",
        "accept4",
        "flock",
        "fcntl",
        "fsync",
        "fdatasync",
        "ioctl",
    }
)
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/render")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadWait:
    """What a thread waits for, and how long it has waited for a CPU so far.

    Args:
        waits: The system call or kernel function in which the thread waits; empty if unknown.
        target: The file, pipe or socket that the thread waits for; empty if there is none.
        cpu_wait_seconds: How long the thread was ready to run but had no CPU; 0 if unknown.
    """

    waits: WaitKind = ""
    target: str = ""
    cpu_wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelView:
    """The state of one process, as the kernel reports it.

    Args:
        state: The state letter in ``/proc/<pid>/stat``; empty if the process is gone.
        cpu_seconds: CPU time used by all threads.
        io_bytes: Bytes read and written through any system call; 0 if unknown.
        waits: What each thread waits for, keyed by thread ID.
    """

    state: str
    cpu_seconds: float
    io_bytes: int
    waits: dict[int, ThreadWait]


@dataclass(frozen=True, slots=True)
class _CodeRange:
    """An address range into which a file's code is mapped; `end` is exclusive."""

    start: int
    end: int
    file: str


def read_kernel_view(pid: int) -> KernelView:
    """Return the kernel's view of a process; `state` is empty if the process is gone."""
    process = read_process(pid)
    if process is None:
        return KernelView(state="", cpu_seconds=0.0, io_bytes=0, waits={})
    threads = _list_threads(pid)
    states = {thread: _read_thread_state(pid, thread) for thread in threads}
    is_blocked = "D" in states.values()

    @functools.cache
    def code_ranges() -> list[_CodeRange]:
        return [] if is_blocked else _read_code_ranges(pid)

    return KernelView(
        state=process.state,
        cpu_seconds=process.cpu_ticks / _TICKS_PER_SECOND,
        io_bytes=read_io_bytes(Path(f"/proc/{pid}")),
        waits={
            thread: _read_wait(pid, thread, state, code_ranges) for thread, state in states.items()
        },
    )


def _read_thread_state(pid: int, thread: int) -> str:
    """Return the state letter of a thread; empty if the thread is gone."""
    stat = read_stat(f"/proc/{pid}/task/{thread}/stat")
    return "" if stat is None else stat.state


def _list_threads(pid: int) -> list[int]:
    """Return the thread IDs of a process, beginning with the main thread."""
    threads: list[int] = []
    with suppress(OSError):
        threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
    threads.sort(key=lambda thread: (thread != pid, thread))
    return threads[:_MAX_THREADS]


def read_io_bytes(folder: Path) -> int:
    """Return the number of bytes that a process or thread has read and written; 0 if unknown.

    Args:
        folder: The directory of the process or thread in ``/proc``.
    """
    counters = read_fields(folder / "io")
    return counters.get("rchar", 0) + counters.get("wchar", 0)


def read_cpu_wait_seconds(folder: Path) -> float:
    """Return how long a thread was ready to run but had no CPU; 0 if unknown.

    Args:
        folder: The directory of the thread in ``/proc/<pid>/task``. The file in the directory of
            the process describes only its main thread.
    """
    words = _read_text(f"{folder}/schedstat").split()
    # The time on a CPU, the time on the run queue, both in nanoseconds, and the number of turns.
    if len(words) < 2 or not words[1].isdigit():
        return 0.0
    return int(words[1]) / 1e9


def _read_wait(
    pid: int, thread: int, state: str, code_ranges: Callable[[], list[_CodeRange]]
) -> ThreadWait:
    """Return what a thread waits for, including the file, pipe or socket."""
    folder = f"/proc/{pid}/task/{thread}"
    channel = _read_text(f"{folder}/wchan").strip()
    # The file contains the number of the system call, its six arguments, the stack pointer and the
    # program counter, or only the word "running".
    call = _read_text(f"{folder}/syscall").split()
    name = ""
    target = ""
    library = ""
    if (call and call[0] == "running") or (not call and state == "R"):
        name = "running"
    elif call:
        with suppress(OSError, ValueError, IndexError):
            name = _SYSTEM_CALLS.get(int(call[0]), "")
            if name in _CALLS_ON_DESCRIPTORS:
                target = str(Path(f"/proc/{pid}/fd/{int(call[1], 16)}").readlink())
            if name == "futex":
                library = _file_at(int(call[-1], 16), code_ranges())
    waits = classify_wait(
        syscall=name,
        channel="" if channel == "0" else channel,
        target=target,
        library=library,
    )
    return ThreadWait(
        waits=waits,
        target=clean_name(target),
        cpu_wait_seconds=read_cpu_wait_seconds(Path(folder)),
    )


def _file_at(address: int, code_ranges: list[_CodeRange]) -> str:
    for code_range in code_ranges:
        if code_range.start <= address < code_range.end:
            return code_range.file
    return ""


def _read_code_ranges(pid: int) -> list[_CodeRange]:
    """Return the address ranges of a process into which code is mapped."""
    code_ranges = []
    for line in _read_text(f"/proc/{pid}/maps").splitlines():
        words = line.split(maxsplit=5)
        # Fields of a line: addresses, permissions, offset, device, inode and file.
        if len(words) == 6 and "x" in words[1]:
            start, _, end = words[0].partition("-")
            code_ranges.append(_CodeRange(int(start, 16), int(end, 16), words[5]))
    return code_ranges


def uses_gpu(pid: int) -> bool:
    """Return whether a process has a GPU device file open."""
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in itertools.islice(entries, _MAX_DESCRIPTORS):
            with suppress(OSError):
                if str(Path(entry.path).readlink()).startswith(_GPU_DEVICES):
                    return True
    return False


def is_python(pid: int) -> bool:
    """Return whether a process is a Python interpreter, according to its executable's name."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/exe").readlink().name.startswith(("python", "pypy"))
    return False


def read_proc_file(pid: int, name: str) -> bytes:
    """Read a file in ``/proc/<pid>``; return empty bytes if it cannot be read."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def _read_text(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - called for many threads, and this is faster
            return file.read(_MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
