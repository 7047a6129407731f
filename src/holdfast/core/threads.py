"""Start threads even when memory is short."""

from __future__ import annotations

import threading

# A thread that has not begun to run within this time never will.
_START_SECONDS = 30.0


class _StartedEvent(threading.Event):
    """A replacement, with a timeout, for the event that `threading.Thread.start` waits for."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `timeout` seconds or, if it is None, for the constructor's `seconds`."""
        if timeout is None:
            timeout = self._seconds
        return super().wait(timeout)


def start_thread(thread: threading.Thread, seconds: float = _START_SECONDS) -> None:
    """Start a thread.

    `threading.Thread.start` waits forever if the new thread dies before it can report that it is
    running, which happens if it runs out of memory in its first lines.

    Args:
        thread: A thread that has not been started yet.
        seconds: How long to wait for the thread to begin.

    Raises:
        MemoryError: If the thread did not begin in time.
        RuntimeError: If the system has no memory for the thread's stack.
    """
    started = _StartedEvent(seconds)
    thread._started = started  # type: ignore[attr-defined] # private, but in CPython since 3.2
    thread.start()
    if not started.is_set():
        raise MemoryError(f"thread {thread.name!r} did not begin")
