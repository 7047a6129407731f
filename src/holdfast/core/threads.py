"""Start threads without waiting forever if memory runs out."""

from __future__ import annotations

import threading

# If a thread has not begun to run within this time, it is assumed to have died.
_START_SECONDS = 30.0


class _StartedEvent(threading.Event):
    """Replaces the event that `threading.Thread.start` waits for, and adds a timeout."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `timeout` seconds or, if that is None, for the constructor's `seconds`."""
        if timeout is None:
            timeout = self._seconds
        return super().wait(timeout)


def start_thread(thread: threading.Thread, seconds: float = _START_SECONDS) -> None:
    """Start a thread, and wait until it runs, for at most `seconds`.

    `threading.Thread.start` would wait forever if the new thread died before it could report that
    it is running. This happens if the thread runs out of memory in its first instructions.

    Args:
        thread: A thread that has not been started yet.
        seconds: How long to wait for the thread to begin running.

    Raises:
        MemoryError: If the thread did not begin to run in time.
        RuntimeError: If the system has no memory for the thread's stack.
    """
    started = _StartedEvent(seconds)
    thread._started = started  # type: ignore[attr-defined] # private, but in CPython since 3.2
    thread.start()
    if not started.is_set():
        raise MemoryError(f"thread {thread.name!r} did not begin")
