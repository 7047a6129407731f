"""Let ``faulthandler`` write the stacks of all threads on a signal and on a fatal error.

If the script installs its own handler for `STACKS_SIGNAL`, that handler replaces holdfast's. The
observer then records that the signal must no longer be sent.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from holdfast.core.files import open_file
from holdfast.recorder.run_files import FAULTHANDLER_FILE, STACKS_SIGNAL


class StackWriter:
    """Sets up ``faulthandler`` to write stacks to a file of this process.

    Args:
        on_signal_taken: Called when the script installs its own handler for the signal. An OSError
            that it raises is ignored.
    """

    def __init__(self, on_signal_taken: Callable[[], None]) -> None:
        self._on_signal_taken = on_signal_taken
        # Keep the original functions, because `watch` replaces them for the script.
        self._enable = faulthandler.enable
        self._register = faulthandler.register
        # If the user has already enabled faulthandler, do not redirect the stacks of a fatal error
        # from the user's file to holdfast's.
        self._writes_at_death = not faulthandler.is_enabled()
        is_free = signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL
        # The signal that triggers writing the stacks; None if the script handles that signal.
        self.signal = STACKS_SIGNAL if is_free else None

    def open(self, folder: Path) -> None:
        """Start writing to a file in the directory of this process. Called again after a fork.

        Raises:
            OSError: If the file cannot be opened.
        """
        # The file stays open, because the signal handlers write to it.
        file = open_file(folder / FAULTHANDLER_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        if self._writes_at_death:
            self._enable(file=file, all_threads=True)
        if self.signal is not None:
            self._register(self.signal, file=file, all_threads=True)

    def watch(self) -> None:
        """Start watching for calls by which the script handles the signal or enables faulthandler.

        The functions that the script would call are wrapped.
        """
        signal.signal = self._wrap(signal.signal, self._on_handler)
        faulthandler.register = self._wrap(faulthandler.register, self._on_handler)
        faulthandler.enable = self._wrap(faulthandler.enable, self._on_enable)

    def _wrap(
        self, original: Callable[..., Any], notice: Callable[[Any], None]
    ) -> Callable[..., Any]:
        """Wrap a function so that `notice` is called after it, with the signal number, if any."""

        @wraps(original)
        def wrapped(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            notice(args[0] if args else options.get("signum"))
            return result

        return wrapped

    def _on_handler(self, number: Any) -> None:
        if number == STACKS_SIGNAL and self.signal is not None:
            self.signal = None
            with suppress(OSError):
                self._on_signal_taken()

    def _on_enable(self, _: Any) -> None:
        self._writes_at_death = False
