"""End worker processes: kill them, release what they leave behind, and describe how they ended.

A worker may have died while it held a lock, so nothing here waits for one for long.
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

# How long to wait for a killed process.
_GRACE_SECONDS = 1.0

# How long to wait for the exit code of a process that has ended: 50 checks of 2 x 0.01 s. It is
# available at once unless another thread, usually torch's own, has reaped the process and not
# stored the code yet.
_EXIT_CODE_CHECKS = 50
_EXIT_CODE_CHECK_SECONDS = 0.01

# The process that keeps the files of torch's shared tensors. The kernel may show a shortened name.
_TORCH_FILE_KEEPER = "torch_shm_manager"

# Iterators for which no thread could be started. They are never cleaned up.
_left_iterators: list[list[Any]] = []


def kill(processes: Sequence[Any]) -> None:
    """Kill processes, even stopped ones, and all processes that they have started; reap them."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        kill_with_descendants(process)
    for process in started:
        with suppress(AssertionError, ValueError):
            process.join(_GRACE_SECONDS)


def kill_with_descendants(process: Any) -> None:
    """Kill a process and all its descendants, such as a program that reads a sample."""
    descendants: list[int] = []
    with suppress(ProcessLookupError, ValueError):
        # If the process has ended, its PID may belong to another process by now.
        if process.exitcode is None:
            descendants = _descendants_of(process.pid)
        process.kill()
    for pid in descendants:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _descendants_of(pid: int) -> list[int]:
    """Return the PIDs of all processes that a process, or one of its descendants, has started.

    torch's keeper of shared files is left out: the main process needs it, and it ends on its own
    when it is no longer needed.
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
    """Drop the last references to a torch iterator, without waiting long for its clean-up.

    The clean-up may wait for a lock that a killed worker held, so it happens in a daemon thread.

    Args:
        references: The iterator and the objects that belong to it. The list is emptied.
    """
    if sys.is_finalizing():
        # No thread can be started any more, and torch's clean-up does nothing now.
        references.clear()
        return
    try:
        thread = threading.Thread(
            target=references.clear, daemon=True, name="holdfast-loader-cleanup"
        )
        start_thread(thread, _GRACE_SECONDS / 4)
        # It usually takes milliseconds, and frees descriptors that the next workers need.
        thread.join(_GRACE_SECONDS / 4)
    except (MemoryError, RuntimeError):
        _left_iterators.append(references)


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since the machine started.

    Returns 0 if unknown.
    """
    return read_fields(Path("/proc/vmstat")).get("oom_kill", 0)


def exit_code(process: Any) -> int | None:
    """Return the exit code of a process that has just ended, or None if unavailable."""
    for _ in range(_EXIT_CODE_CHECKS):
        process.join(_EXIT_CODE_CHECK_SECONDS)
        if process.exitcode is not None:
            break
        time.sleep(_EXIT_CODE_CHECK_SECONDS)
    code: int | None = process.exitcode
    return code


def how_it_ended(process: Any, oom_kills_before: int) -> str:
    """Describe how a worker process ended.

    Args:
        process: The worker.
        oom_kills_before: The result of `oom_kills` while the worker was alive.
    """
    code = None if process.pid is None else exit_code(process)
    if code is None:
        return "is gone"
    if code >= 0:
        return f"exited with code {code}"
    if code == -signal.SIGKILL and oom_kills() > oom_kills_before:
        return "was killed by the kernel, which ran out of memory"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"
