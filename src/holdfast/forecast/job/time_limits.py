"""How long the process that traces may take: by what it computes, not by the clock on the wall.

A machine that is busy with other work makes every process slow, and none of them wrong. Linux only (``/proc``).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

# Twenty times what the slowest model of the prototypes took: a recurrent decoder of 100 time steps, 29 s.
MOST_CPU_SECONDS = 600.0
# A download or a slow disk needs a little CPU time all along; a deadlock needs none.
MOST_IDLE_SECONDS = 600.0

# A process that uses less than this share of a CPU is idle: 1 s in ten minutes. A thread that only wakes up to look
# at a flag stays far below.
_ACTIVE_SHARE = 1 / 600
_LOOK_SECONDS = 1.0
_LONGEST_BREAK_SECONDS = 5.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class TimeLimits:
    """Watches one child process; ask `exceeded` every now and then while it runs.

    Args:
        pid: Process id of a child that nobody has waited for yet.
        cpu_seconds: CPU time that it may use. It may always run for as long by the wall clock, so threads that
            compute side by side do not shorten its time.
        idle_seconds: Wall-clock time for which it may do nothing, with all processes that it has started.
    """

    def __init__(self, pid: int, *, cpu_seconds: float, idle_seconds: float) -> None:
        self._pid = pid
        self._cpu_seconds = cpu_seconds
        self._idle_seconds = idle_seconds
        now = time.monotonic()
        self._started = now
        self._looked = now
        self._idle = 0.0
        self._activity = 0.0

    def exceeded(self) -> str | None:
        """Return what the child did that it may not, as the rest of a sentence, or None."""
        now = time.monotonic()
        if now - self._looked < min(_LOOK_SECONDS, self._idle_seconds):
            return None
        # After a longer break it was this process that did not run: it was stopped (Ctrl-Z), or the machine slept.
        self._idle += min(now - self._looked, _LONGEST_BREAK_SECONDS)
        self._looked = now

        cpu_seconds = _own_cpu_seconds(self._pid)
        if min(cpu_seconds, now - self._started) > self._cpu_seconds:
            return f"took more than {self._cpu_seconds:g} s of CPU time"

        activity = _descendants_cpu_seconds(self._pid) + cpu_seconds + _seconds_ready_to_run(self._pid)
        # A thread or a process that has ended takes its time with it: the sum may also fall.
        if abs(activity - self._activity) >= _ACTIVE_SHARE * self._idle_seconds:
            self._activity = activity
            self._idle = 0.0
        if self._idle > self._idle_seconds:
            return f"did nothing for {self._idle_seconds:g} s"
        return None


def _own_cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process, in seconds; 0 if it has ended."""
    fields = _stat(pid)
    return 0.0 if fields is None else _cpu_seconds(fields)


def _descendants_cpu_seconds(pid: int) -> float:
    """Return the CPU time of the processes that a process has started, directly or not, in seconds."""
    processes = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - of all processes
        if name.isdigit() and (fields := _stat(int(name))) is not None:
            processes[int(name)] = fields

    children: dict[int, list[int]] = {}
    for process, fields in processes.items():
        children.setdefault(int(fields[1]), []).append(process)

    seconds = 0.0
    waiting = list(children.get(pid, ()))
    while waiting:
        descendant = waiting.pop()
        seconds += _cpu_seconds(processes[descendant])
        waiting += children.get(descendant, ())
    return seconds


def _stat(pid: int) -> list[str] | None:
    """Return the fields of ``/proc/PID/stat`` from the third (the state) on, or None if the process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _cpu_seconds(fields: list[str]) -> float:
    """Return user and system time, in seconds: fields 14 and 15 of proc(5)."""
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def _seconds_ready_to_run(pid: int) -> float:
    """Return how long the threads of a process have waited for a CPU, in seconds; 0 where the kernel does not say."""
    nanoseconds = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            nanoseconds += int((thread / "schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return nanoseconds / 1e9
