"""A request to stop: by signal or by call, honoured where the state is whole.

The handler notes the request and says so, and interrupts two places that may last long and change nothing: the wait
for data and an evaluation. No saving and no agreement between ranks happens in a signal handler. A second signal
ends the process at once, by the kernel: no boundary and no interpreter is waited for.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

# `timeout` of coreutils signals the process, then its group, some microseconds apart: one request, which comes twice.
# So do launchers that pass on what their group gets too. Without this wait the second would end the process.
_ONE_REQUEST_SECONDS = 0.1


class Interrupted(BaseException):
    """Raised by the signal handler in the context of a `StopRequest`, and never seen by users."""


def _let_workers_die() -> None:
    """Keep torch from raising in the main thread because loader workers got the same signal.

    A scheduler that stops a job sends it to the whole process group. The loop ends at the next boundary.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and getattr(handler, "__module__", "").startswith("torch.utils.data"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    workers = sys.modules.get("holdfast.loader.workers.processes")  # imports torch; without a loader it is not needed
    if workers is not None:
        workers.silence_torch()  # holdfast's handler is around torch's


class StopRequest:
    """Whether the run shall end, and why."""

    def __init__(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.reason: str | None = None
        self.by_signal = False
        self.honoured = False  # a loop has ended because of it
        self._number = number
        self._previous: Any = None
        self._installed = False
        self._interruptible = False
        self._settling = False  # the request has just come, and may come once more
        self._process = os.getpid()

    def install(self) -> None:
        """Handle the signal from now on. Without effect outside the main thread, where Python allows none.

        Also without effect once it has come, since the next one is to end the process; and for a SIGINT that is not
        Python's: a shell ignores it for what runs in the background, and a notebook has a handler of its own.
        """
        if self._installed or self.by_signal or threading.current_thread() is not threading.main_thread():
            return
        if self._number == signal.SIGINT and signal.getsignal(self._number) is not signal.default_int_handler:
            return
        self._previous = signal.signal(self._number, self._on_signal)
        self._installed = True

    def uninstall(self) -> None:
        """Give the signal back to whoever handled it before."""
        if self._installed:
            now = signal.getsignal(self._number)
            if now == self._on_signal or (self.by_signal and now == self._at_the_second()):
                signal.signal(self._number, self._previous or signal.SIG_DFL)
            self._installed = False

    def _at_the_second(self) -> Any:
        """Return what the second signal does: what one did before; instead of a KeyboardInterrupt, the default."""
        python_s = self._previous is signal.default_int_handler
        return signal.SIG_DFL if self._previous is None or python_s else self._previous

    def request(self, reason: str) -> None:
        """Ask the run to end; the first reason is kept."""
        self.reason = self.reason or reason

    def begin_anew(self) -> None:
        """Forget a request by call that has ended a loop: whoever starts another one wants it to run."""
        if self.honoured and not self.by_signal:
            self.reason = None
        self.honoured = False

    def __enter__(self) -> None:
        """Let a signal raise `Interrupted` while the context lasts, also one that came before."""
        if self.by_signal:
            raise Interrupted
        self._interruptible = True

    def __exit__(self, *_: object) -> None:
        self._interruptible = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child, such as a worker of the user's own: not our request
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self._settling:
            return
        following = self._at_the_second()
        if self.by_signal:  # the second one, from a handler that took our place and passes it on
            signal.signal(number, following)
            os.kill(os.getpid(), number)
            return
        self.by_signal = True
        self.request(signal.Signals(number).name)
        _let_workers_die()
        try:
            if not isinstance(getattr(following, "__self__", None), StopRequest):  # another guard's, which does this
                self._settle(signal.Signals(number).name, ends=following is signal.SIG_DFL)
        finally:  # other handlers run and raise meanwhile: workers got the same signal, and are lost
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, following)
            if callable(following):
                following(number, frame)
            if self._interruptible:
                self._interruptible = False
                raise Interrupted

    def _settle(self, name: str, *, ends: bool) -> None:
        """Take what comes within a moment for the same request, and say so on stderr."""
        raised: BaseException | None = None
        until = time.monotonic() + _ONE_REQUEST_SECONDS
        self._settling = True
        try:
            while (left := until - time.monotonic()) > 0:
                try:
                    time.sleep(left)
                except BaseException as error:  # noqa: BLE001 - of another handler, for whom it interrupts
                    raised = error
        finally:
            self._settling = False
            second = "ends the process at once" if ends else "goes to the handler before holdfast's"
            new_line = "\n" if os.isatty(2) else ""  # after ^C, or a bar
            text = f"{new_line}holdfast: {name}: stops at the next boundary; a second one {second}\n"
            with suppress(OSError):
                os.write(2, text.encode())  # past sys.stderr, which may be in the middle of a write
        if raised is not None:
            raise raised
