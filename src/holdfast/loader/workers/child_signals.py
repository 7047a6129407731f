"""Handle SIGCHLD, so that the end of a worker interrupts nothing but the wait for a batch.

When a worker ends, torch's own handler raises an exception in the main thread, *no matter what the
main thread is doing*, even in the middle of an optimizer step. The handler in this module only
raises an exception while the training loop waits for a batch.
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
    """Raised when a worker exits or is killed while the training loop waits for a batch.

    The class is not derived from `Exception`, because torch's loader reacts to any `Exception` by
    opening ten temporary files to check whether file descriptors are available.
    """


# The `WorkerWatch` of each existing pool.
_watches: weakref.WeakSet[Any] = weakref.WeakSet()
# For each pool, the list of its processes.
_own_processes: weakref.WeakSet[Any] = weakref.WeakSet()
# The SIGCHLD handler that this module's handler has replaced, which is torch's.
_previous_handler: Any = None
# Number of nested `undisturbed` blocks that the main thread is in.
_undisturbed_blocks = 0


# This function runs at exit, before multiprocessing's own exit function, which would wait forever
# for a stopped worker.
@atexit.register
def _kill_all_workers() -> None:
    for watch in list(_watches):
        watch.end(kills=True)


def handle_child_signals(processes: Sequence[Any]) -> None:
    """Install a SIGCHLD handler that keeps torch from raising errors about the given processes.

    The handler calls torch's handler and suppresses any error about `processes` that it raises.
    Such an error could be raised inside a queue and leave the queue locked. Outside the main
    thread, no handler is installed, because Python does not allow it.

    Args:
        processes: A list of worker processes that supports weak references. More processes may be
            added later.
    """
    global _previous_handler
    _own_processes.add(processes)
    if threading.current_thread() is not threading.main_thread():
        return
    if _previous_handler is not None:
        # The handler is installed only once. Another handler that was installed later may call this
        # one. If this one also called the other one, they would call each other forever.
        return
    # torch's handler is installed first. Otherwise, torch would install it over this one when it
    # starts the first workers.
    signal_handling._set_SIGCHLD_handler()
    _previous_handler = signal.signal(signal.SIGCHLD, _on_child) or signal.SIG_DFL


def wake_on_loss(watch: Any) -> None:
    """Let the loss of a worker interrupt the main thread while it waits for a batch.

    As in torch, the wait is not interrupted in other threads.

    Args:
        watch: The `WorkerWatch` that detects the loss.
    """
    _watches.add(watch)


def wake_main_thread() -> None:
    """Interrupt the main thread's current system call, so that it runs the SIGCHLD handler."""
    with suppress(ProcessLookupError, RuntimeError):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGCHLD)


def silence_torch() -> None:
    """Keep torch from raising errors about any worker, because this process is about to exit."""
    global _previous_handler
    if callable(_previous_handler):
        _previous_handler = signal.SIG_DFL


@contextmanager
def undisturbed() -> Generator[None]:
    """Postpone interruptions by lost workers until the end of the ``with`` block.

    This is used to close loaders, which must not be interrupted. An unreferenced loader may be
    garbage-collected, and thereby closed, at any time, even while the main thread waits for a batch
    from another loader.
    """
    global _undisturbed_blocks
    # Signal handlers only interrupt the main thread.
    is_main_thread = threading.current_thread() is threading.main_thread()
    if is_main_thread:
        _undisturbed_blocks += 1
    try:
        yield
    finally:
        if is_main_thread:
            _undisturbed_blocks -= 1


def _on_child(number: int, frame: Any) -> None:
    """Interrupt the wait for a batch if a worker was lost, and let torch handle other workers."""
    for watch in list(_watches):
        # Handlers run in the main thread. If another thread is waiting, the main thread must not be
        # interrupted.
        waits_here = watch.waiting_thread == threading.get_ident()
        if watch.lost and waits_here and not watch.interrupted and not _undisturbed_blocks:
            watch.interrupted = True
            raise WaitInterruptedError
    while callable(_previous_handler):
        try:
            _previous_handler(number, frame)
        except RuntimeError as error:
            # After an error, torch's handler is called again for its other loaders. It raises only
            # one error per loader, so this loop ends.
            if not _names_own_process(str(error)):
                raise
        else:
            return


def _names_own_process(message: str) -> bool:
    """Return whether a torch error message contains the PID of a worker that holdfast started."""
    numbers = set(re.findall(r"\d+", message))
    for processes in list(_own_processes):
        for process in processes:
            if str(process.pid) in numbers:
                return True
    return False
