"""Kill worker processes, release the resources that they leave behind, and report how they ended.

A worker may have died while holding a lock, so no function in this module waits long for a lock.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.core.control_groups import read_fields
from holdfast.core.threads import start_thread

# How long to wait for a killed process to end.
_GRACE_SECONDS = 1.0

# How long to wait for the exit code of a process that has ended: 50 checks, each of which takes
# 2 x 0.01 s. The code is usually available immediately. A delay occurs if another thread, such as
# one of torch's, has reaped the process but has not stored the code yet.
_EXIT_CODE_CHECKS = 50
_EXIT_CODE_CHECK_SECONDS = 0.01

# The process that owns the files of torch's shared tensors. The kernel may show a shortened name.
_TORCH_FILE_KEEPER = "torch_shm_manager"

# Iterators that are never cleaned up, because no thread could be started for their cleanup.
_left_iterators: list[list[Any]] = []


def kill(processes: Sequence[Any]) -> None:
    """Kill processes and all their descendants, even if they are stopped, and reap them."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        kill_with_descendants(process)
    for process in started:
        with suppress(AssertionError, ValueError):
            process.join(_GRACE_SECONDS)


def kill_with_descendants(process: Any) -> None:
    """Kill a process and all its descendants, such as programs that it started to read samples."""
    descendants: list[int] = []
    with suppress(ProcessLookupError, ValueError):
        # If the process has already ended, its PID may belong to another process.
        if process.exitcode is None:
            descendants = _descendants_of(process.pid)
        process.kill()
    for pid in descendants:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _descendants_of(pid: int) -> list[int]:
    """Return the PIDs of a process's children and of their descendants.

    The process that owns the files of torch's shared tensors is not included, because the main
    process needs it. It exits on its own when it is no longer needed.
    """
    descendants = []
    for child in _children_of(pid):
        if not _is_file_keeper(child):
            descendants.append(child)
            descendants += _descendants_of(child)
    return descendants


def _children_of(pid: int) -> list[int]:
    children: list[int] = []
    # The process or any of its threads may end in the meantime.
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                children += [int(child) for child in (thread / "children").read_text().split()]
    return children


def _is_file_keeper(pid: int) -> bool:
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return False
    return name != "" and _TORCH_FILE_KEEPER.startswith(name)


def drop(references: list[Any]) -> None:
    """Drop the last references to a torch iterator, without waiting long for the resulting cleanup.

    The cleanup may wait for a lock that a killed worker held, so it runs in a daemon thread.

    Args:
        references: A list of the iterator and the objects that belong to it. The list is emptied.
    """
    if sys.is_finalizing():
        # At interpreter exit, threads can no longer be started, and torch's cleanup does nothing.
        references.clear()
        return
    try:
        thread = threading.Thread(
            target=references.clear, daemon=True, name="holdfast-loader-cleanup"
        )
        start_thread(thread, _GRACE_SECONDS / 4)
        # The cleanup usually takes milliseconds, and frees file descriptors that the next workers
        # need.
        thread.join(_GRACE_SECONDS / 4)
    except (MemoryError, RuntimeError):
        _left_iterators.append(references)


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since boot.

    Returns 0 if the number is unknown.
    """
    return read_fields(Path("/proc/vmstat")).get("oom_kill", 0)


def exit_code(process: Any) -> int | None:
    """Return the exit code of a process that has just ended, or None if it is unavailable."""
    for _ in range(_EXIT_CODE_CHECKS):
        process.join(_EXIT_CODE_CHECK_SECONDS)
        if process.exitcode is not None:
            break
        time.sleep(_EXIT_CODE_CHECK_SECONDS)
    code: int | None = process.exitcode
    return code


def how_it_ended(process: Any, oom_kills_before: int) -> str:
    """Return a phrase that describes how a worker process ended, such as "was killed by SIGSEGV".

    Args:
        process: The worker.
        oom_kills_before: The result of `oom_kills` at a time when the worker was alive.
    """
    code = None if process.pid is None else exit_code(process)
    if code is None:
        return "has disappeared"
    if code >= 0:
        return f"exited with code {code}"
    if code == -signal.SIGKILL and oom_kills() > oom_kills_before:
        return "was killed by the kernel, which ran out of memory"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
