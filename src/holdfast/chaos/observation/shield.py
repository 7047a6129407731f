"""Keep the observer's code from disturbing the observed script."""

from __future__ import annotations

import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

# The signals for which training scripts and torch install handlers that may raise an exception.
HANDLED_SIGNALS: tuple[int, ...] = (
    signal.SIGCHLD,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
)


class ScriptShield:
    """Runs the observer's code in the script's process without disturbing the script.

    Errors in the observer are written to a file, and signals for the script are handled only after
    the observer's code has finished.

    Args:
        folder: The trace folder of the attempt.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._torch: Any = None

    def torch_imported(self, torch: Any) -> None:
        """Store the torch module, so that `run` does nothing while torch compiles."""
        self._torch = torch

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call one of the observer's functions and return its result, or None if it fails.

        While torch compiles, the function is not called, and the result is None.
        """
        if self._torch is not None and self._torch.compiler.is_dynamo_compiling():
            return None
        with signal_handlers_postponed():
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the observer must never stop the script
                self.note_error(error)
                return None

    def note_error(self, error: BaseException) -> None:
        """Write an error in the observer to a file, which the campaign reads and reports."""
        with suppress(OSError), (self._folder / "failed.txt").open("a") as file:
            file.writelines(traceback.format_exception(error))


@contextmanager
def signal_handlers_postponed() -> Iterator[None]:
    """Postpone the script's signal handlers until the ``with`` block ends.

    A handler may raise an exception, as torch's handler does when a loader worker has died. That
    exception is meant for the script. If it were raised in the observer's code, a step would be
    missing from the trace.
    """
    received: list[tuple[int, FrameType | None]] = []
    handlers: dict[int, Any] = {}

    def postpone(number: int, frame: FrameType | None) -> None:
        received.append((number, frame))

    # Python installs and runs signal handlers only in the main thread.
    if threading.current_thread() is threading.main_thread():
        for number in HANDLED_SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                handlers[number] = handler
    try:
        for number in handlers:
            signal.signal(number, postpone)
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number, frame in received:
        handlers[number](number, frame)
