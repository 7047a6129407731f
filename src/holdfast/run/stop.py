"""A request to stop: by signal or by call, honoured where the state is whole.

The handler does nothing but note the request, and interrupts two places that may last long and change nothing: the
wait for data and an evaluation. No saving and no agreement between ranks happens in a signal handler.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupted(BaseException):
    """Raised by the signal handler inside `StopRequest.interruptible`, and never seen by users."""


def _let_workers_die() -> None:
    """Do not let torch raise wherever the program happens to be, because loader workers got the same signal.

    A scheduler that stops a job sends it to the whole process group. What the workers had loaded is not needed: the
    loop ends at the next boundary.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and getattr(handler, "__module__", "").startswith("torch.utils.data"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


class StopRequest:
    """Whether the run shall end, and why."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.by_signal = False
        self.honoured = False  # a loop has ended because of it
        self._previous: Any = None
        self._installed = False
        self._interruptible = False
        self._process = os.getpid()

    def install(self) -> None:
        """Handle SIGTERM from now on. Without effect outside the main thread, where Python allows none."""
        if not self._installed and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True

    def uninstall(self) -> None:
        """Give SIGTERM back to whoever handled it before."""
        if self._installed:
            if signal.getsignal(signal.SIGTERM) == self._on_signal:
                signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
            self._installed = False

    def request(self, reason: str) -> None:
        """Ask the run to end; the first reason is kept."""
        self.reason = self.reason or reason

    def begin_anew(self) -> None:
        """Forget a request by call that has ended a loop: whoever starts another one wants it to run."""
        if self.honoured and not self.by_signal:
            self.reason = None
        self.honoured = False

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal raise `Interrupted` while the context lasts, also one that came before."""
        if self.by_signal:
            raise Interrupted
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child, such as a worker of the user's own: not our request
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.by_signal:  # the second one: the sender means it
            signal.signal(number, self._previous or signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.by_signal = True
        self.request(signal.Signals(number).name)
        _let_workers_die()
        if callable(self._previous):
            self._previous(number, frame)
        if self._interruptible:
            self._interruptible = False
            raise Interrupted
