"""What the kernel says of a process.

What each of its threads waits for, its CPU time, its descriptors and signals.

Reads only what does not block on a process that is stuck itself: its memory map, which may, is read
    only where no
thread of it is in an uninterruptible wait. Whatever may not be read is left out. Does not: look
    into Python.
"""

from __future__ import annotations

import functools
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.explain.hangs.evidence import Waits, clean, waits_for

_MOST_THREADS = 128
_MOST_DESCRIPTORS = 4096
_MOST_BYTES = 1 << 22
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
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
_WORDS = {"x86_64": _X86, "aarch64": _ARM}.get(platform.machine(), "").split()
_NAMES = {int(number): name for name, number in zip(_WORDS[::2], _WORDS[1::2], strict=True)}
_GIVEN_A_DESCRIPTOR = frozenset(
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
class KernelView:
    """One process as the kernel sees it.

    `state` is the letter of ``/proc/<pid>/stat``, empty if the process is gone.

    `cpu_seconds` is of all its threads, `io_bytes` read and written by whatever system call (0 if
    unknown), `waits` what each thread waits for, and with which file, pipe or socket, by the
    thread's number.
    """

    state: str
    cpu_seconds: float
    io_bytes: int
    waits: dict[int, tuple[Waits, str]]


def read_kernel_view(pid: int) -> KernelView:
    """Return how the kernel sees a process; a process that is gone has no state and no threads."""
    state, cpu_seconds = _state(f"/proc/{pid}/stat")
    threads: list[int] = []
    with suppress(OSError):
        numbers = [int(name) for name in os.listdir(f"/proc/{pid}/task")]  # noqa: PTH208
        threads = sorted(numbers, key=lambda thread: (thread != pid, thread))
    threads = threads[:_MOST_THREADS]
    blocked = any(_state(f"/proc/{pid}/task/{thread}/stat")[0] == "D" for thread in threads)
    maps = functools.cache(lambda: [] if blocked else _libraries(pid))
    counts = (line.partition(": ") for line in _text(f"/proc/{pid}/io").splitlines())
    return KernelView(
        state=state,
        cpu_seconds=cpu_seconds,
        io_bytes=sum(int(number) for name, _, number in counts if name in ("rchar", "wchar")),
        waits={thread: _waits(pid, thread, maps) for thread in threads},
    )


def _state(path: str) -> tuple[str, float]:
    try:
        words = _text(path).rpartition(")")[2].split()
        return words[0], (int(words[11]) + int(words[12])) / _TICKS_A_SECOND
    except (IndexError, ValueError):
        return "", 0.0


def _waits(pid: int, thread: int, maps: functools._lru_cache_wrapper[_Ranges]) -> tuple[Waits, str]:
    """Return what a thread waits for, and with which descriptor."""
    folder = f"/proc/{pid}/task/{thread}"
    channel = _text(f"{folder}/wchan").strip()
    words = [*_text(f"{folder}/syscall").split(), ""]
    syscall, target, library = "running" if words[0] == "running" else "", "", ""
    with suppress(OSError, ValueError):
        syscall = syscall or _NAMES.get(int(words[0]), "")
        if syscall in _GIVEN_A_DESCRIPTOR:
            target = str(Path(f"/proc/{pid}/fd/{int(words[1], 16)}").readlink())
        if syscall == "futex":
            address = int(words[-2], 16)
            library = next((name for first, last, name in maps() if first <= address < last), "")
    waits = waits_for(
        syscall=syscall, channel="" if channel == "0" else channel, target=target, library=library
    )
    return waits, clean(target)


_Ranges = list[tuple[int, int, str]]


def _libraries(pid: int) -> _Ranges:
    """Return which file's code lies between which addresses of a process."""
    found = []
    for line in _text(f"/proc/{pid}/maps").splitlines():
        words = line.split(maxsplit=5)
        if len(words) == 6 and "x" in words[1]:
            first, _, last = words[0].partition("-")
            found.append((int(first, 16), int(last, 16), words[5]))
    return found


def uses_gpu(pid: int) -> bool:
    """Return whether a process has a device of a GPU open."""
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as found:
        for _, each in zip(range(_MOST_DESCRIPTORS), found, strict=False):
            with suppress(OSError):
                if str(Path(each.path).readlink()).startswith(_GPU_DEVICES):
                    return True
    return False


def is_python(pid: int) -> bool:
    """Return whether a process's program is a Python interpreter, as far as its file's name
    shows.
    """
    with suppress(OSError):
        return Path(f"/proc/{pid}/exe").readlink().name.startswith(("python", "pypy"))
    return False


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - of many threads
            return file.read(_MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
