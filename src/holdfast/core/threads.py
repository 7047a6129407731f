"""Threads where memory is short."""

from __future__ import annotations

import threading

_START_SECONDS = 30.0


class _Started(threading.Event):
    """What `threading.Thread.start` waits for, but not without end."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def wait(self, timeout: float | None = None) -> bool:
        """Wait; as long as was said where no time is given."""
        return super().wait(self._seconds if timeout is None else timeout)


def start_thread(thread: threading.Thread, seconds: float = _START_SECONDS) -> None:
    """Start a thread; `threading.Thread.start` waits for ever for one that dies before it can say
    that it runs.

    So it does where memory is refused to the thread's first lines. MemoryError if no sign of life
    came in so many seconds, RuntimeError if no stack could be had for it.
    """
    thread._started = started = _Started(seconds)  # type: ignore[attr-defined] # CPython has it from 3.2 on
    thread.start()
    if not started.is_set():
        raise MemoryError(f"thread {thread.name!r} did not begin")
