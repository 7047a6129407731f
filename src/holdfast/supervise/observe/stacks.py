"""Stacks of all threads, written in C by ``faulthandler``.

Upon `STACKS_SIGNAL`, and at a signal that kills.

A handler of the script's own for that signal, set at any time, takes the place of ours; then the
observer shows that nobody may send the signal any more.
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


class Stacks:
    """Write stacks into a file of this process."""

    def __init__(self, taken: Callable[[], None]) -> None:
        self._taken = taken
        self._enable, self._register = faulthandler.enable, faulthandler.register
        self._at_death = not faulthandler.is_enabled()  # else the user wants them elsewhere
        free = signal.getsignal(STACKS_SIGNAL) == signal.SIG_DFL
        self.signal = STACKS_SIGNAL if free else None
        """The signal that is answered, None if there is none."""

    def open(self, folder: Path) -> None:
        """Write into a folder from now on: of this process, or of one that was forked.

        OSError if that cannot be.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = open_file(folder / FAULTHANDLER_FILE, flags)  # stays open: the handlers write to it
        if self._at_death:
            self._enable(file=file, all_threads=True)
        if self.signal is not None:
            self._register(self.signal, file=file, all_threads=True)

    def watch(self) -> None:
        """Learn when the script handles the signal itself, or wants stacks elsewhere.

        Forked processes follow it.
        """

        def after(original: Callable[..., Any], act: Callable[[Any], None]) -> Callable[..., Any]:
            @wraps(original)
            def wrapped(*args: Any, **options: Any) -> Any:
                result = original(*args, **options)
                act(args[0] if args else options.get("signum"))
                return result

            return wrapped

        signal.signal = after(signal.signal, self._is_taken)
        faulthandler.register = after(faulthandler.register, self._is_taken)
        faulthandler.enable = after(
            faulthandler.enable, lambda _: setattr(self, "_at_death", False)
        )

    def _is_taken(self, number: Any) -> None:
        if number == STACKS_SIGNAL and self.signal is not None:
            self.signal = None
            with suppress(OSError):
                self._taken()
