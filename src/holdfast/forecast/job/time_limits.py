"""Limit the CPU time and the idle time of the process that traces a model.

Wall-clock time is not limited, since every process is slow on a busy machine. Linux only
(``/proc``).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

# Twenty times the 29 s of CPU time that our slowest prototype took, a recurrent decoder with 100
# time steps.
MOST_CPU_SECONDS = 600.0
# As many as the limit on CPU time, by choice. A download or a slow disk always uses some CPU time,
# a deadlock none.
MOST_IDLE_SECONDS = 600.0

# A process that uses less than this share of a CPU is idle: 1 s in ten minutes. It is a choice; a
# thread that only polls a flag uses far less.
_ACTIVE_SHARE = 1 / 600
# Time between two measurements.
_INTERVAL_SECONDS = 1.0
# A longer time between two measurements counts as this much idle time, because this process itself
# must have been stopped.
_LONGEST_INTERVAL_SECONDS = 5.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class TimeLimits:
    """The time limits of a child process. Call `exceeded` repeatedly while it runs.

    Args:
        pid: The process ID of a child that has not been reaped yet.
        cpu_seconds: The CPU time that it may use. It is exceeded only after the same amount of
            wall-clock time, so that parallel threads do not shorten it.
        idle_seconds: The wall-clock time for which the child and all processes that it has started
            may be idle.
    """

    def __init__(self, pid: int, *, cpu_seconds: float, idle_seconds: float) -> None:
        self._pid = pid
        self._cpu_seconds = cpu_seconds
        self._idle_seconds = idle_seconds
        now = time.monotonic()
        self._started = now
        self._last_measurement = now
        self._idle = 0.0
        self._activity = 0.0

    def exceeded(self) -> str | None:
        """Return which limit was exceeded, as in "took more than 1 s of CPU time", or None."""
        now = time.monotonic()
        interval = now - self._last_measurement
        if interval < min(_INTERVAL_SECONDS, self._idle_seconds):
            return None
        # A long interval does not prove an idle child: this process was stopped (Ctrl-Z), or the
        # machine slept.
        self._idle += min(interval, _LONGEST_INTERVAL_SECONDS)
        self._last_measurement = now

        cpu_seconds = _own_cpu_seconds(self._pid)
        if min(cpu_seconds, now - self._started) > self._cpu_seconds:
            return f"took more than {self._cpu_seconds:g} s of CPU time"

        activity = (
            _descendants_cpu_seconds(self._pid) + cpu_seconds + _seconds_ready_to_run(self._pid)
        )
        # The times of ended threads and processes are missing, so the sum may also decrease.
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
    """Return the CPU time of all descendants of a process, in seconds."""
    processes = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - only the names are needed
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
    """Return the fields of ``/proc/PID/stat`` from the third (the state) on.

    None if the process has ended.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _cpu_seconds(fields: list[str]) -> float:
    """Return user and system time, in seconds: fields 14 and 15 of proc(5)."""
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND


def _seconds_ready_to_run(pid: int) -> float:
    """Return how many seconds the threads of a process have waited for a CPU.

    It is 0 if the kernel does not record it.
    """
    nanoseconds = 0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            nanoseconds += int((thread / "schedstat").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return nanoseconds / 1e9
