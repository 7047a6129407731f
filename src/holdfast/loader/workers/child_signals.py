"""Handle SIGCHLD, so that the end of a worker interrupts the wait for a batch and nothing else.

When a worker ends, torch's own handler raises an exception in the main thread *wherever that is*,
even in the middle of an optimizer step. Here it is raised only while the loop waits for a batch.
"""

from __future__ import annotations

import atexit
import re
import signal
import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch.utils.data._utils import signal_handling


class WaitInterruptedError(BaseException):
    """A worker ended, or was ended, while the loop waited for a batch.

    It is not derived from `Exception`, because torch's loader reacts to any `Exception` by opening
    ten temporary files, to check whether file descriptors are left.
    """


# The `WorkerWatch` of each pool that is alive.
_watches: weakref.WeakSet[Any] = weakref.WeakSet()
# The lists in which each pool keeps its processes.
_own_processes: weakref.WeakSet[Any] = weakref.WeakSet()
# The handler of SIGCHLD that was installed before ours, which is torch's.
_previous_handler: Any = None
# How many `undisturbed` blocks the main thread is in.
_undisturbed_blocks = 0


# This runs before the exit function of multiprocessing, which would wait forever for a stopped
# worker.
@atexit.register
def _kill_all_workers() -> None:
    for watch in list(_watches):
        watch.end(kills=True)


def handle_child_signals(processes: Sequence[Any]) -> None:
    """Keep torch from raising errors about these processes, and install our SIGCHLD handler.

    Our handler calls torch's, which would raise even inside a queue and leave it locked. Nothing is
    installed outside the main thread, where Python allows no handlers.

    Args:
        processes: A weakly referable list of worker processes, to which others may be added later.
    """
    global _previous_handler
    _own_processes.add(processes)
    if threading.current_thread() is not threading.main_thread():
        return
    if _previous_handler is not None:
        # Only once: a handler that was installed after ours may call ours. If ours called it in
        # turn, they would call each other forever.
        return
    # Otherwise torch would install its handler around ours when it starts the first workers.
    signal_handling._set_SIGCHLD_handler()
    _previous_handler = signal.signal(signal.SIGCHLD, _on_child) or signal.SIG_DFL


def wake_on_loss(watch: Any) -> None:
    """Let a lost worker interrupt the wait for a batch inside a `WorkerWatch`.

    As in torch, this has no effect outside the main thread.
    """
    _watches.add(watch)


def wake_main_thread() -> None:
    """Interrupt a system call of the main thread, so that it runs the handler."""
    with suppress(ProcessLookupError, RuntimeError):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGCHLD)


def silence_torch() -> None:
    """Keep torch from raising errors about any worker, because the process was asked to end."""
    global _previous_handler
    if callable(_previous_handler):
        _previous_handler = signal.SIG_DFL


@contextmanager
def undisturbed() -> Generator[None]:
    """Postpone the interruption by a loss until the end of the block.

    An unreferenced loader may be garbage-collected, and so closed, at any point, possibly while the
    main thread waits for a batch of another loader.
    """
    global _undisturbed_blocks
    # No other thread is ever interrupted.
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread:
        _undisturbed_blocks += 1
    try:
        yield
    finally:
        if is_main_thread:
            _undisturbed_blocks -= 1


def _on_child(number: int, frame: Any) -> None:
    """Interrupt the wait for a batch if a worker was lost; leave other workers to torch."""
    for watch in list(_watches):
        # Handlers run in the main thread. If another thread waits, it must not be interrupted here.
        waits_here = watch.waiting_thread == threading.get_ident()
        if watch.lost and waits_here and not watch.interrupted and not _undisturbed_blocks:
            watch.interrupted = True
            raise WaitInterruptedError
    while callable(_previous_handler):
        try:
            _previous_handler(number, frame)
        except RuntimeError as error:
            # torch forgets a loader once it has raised an error about it, so this loop ends.
            if not _names_own_process(str(error)):
                raise
        else:
            return


def _names_own_process(message: str) -> bool:
    """Return whether an error message of torch names the PID of one of our workers."""
    numbers = set(re.findall(r"\d+", message))
    for processes in list(_own_processes):
        for process in processes:
            if str(process.pid) in numbers:
                return True
    return False
