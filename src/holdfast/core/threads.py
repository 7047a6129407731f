"""Start threads even when memory is short."""

from __future__ import annotations

import threading

# A thread that has not begun by then never will.
_START_SECONDS = 30.0


class _StartedEvent(threading.Event):
    """Replaces the event that `threading.Thread.start` waits for, but with a timeout."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def wait(self, timeout: float | None = None) -> bool:
        """Wait; without a timeout, wait at most for the seconds given to the constructor."""
        if timeout is None:
            timeout = self._seconds
        return super().wait(timeout)


def start_thread(thread: threading.Thread, seconds: float = _START_SECONDS) -> None:
    """Start a thread.

    `threading.Thread.start` waits forever for a thread that dies before it can report that it runs,
    which happens if its first lines run out of memory.

    Args:
        thread: A thread that has not been started yet.
        seconds: How long to wait for it to begin.

    Raises:
        MemoryError: If it did not begin in time.
        RuntimeError: If the system has no memory for its stack.
    """
    started = _StartedEvent(seconds)
    thread._started = started  # type: ignore[attr-defined] # CPython has it since 3.2
    thread.start()
    if not started.is_set():
        raise MemoryError(f"thread {thread.name!r} did not begin")
