"""The runs of this process whose newest state is in no checkpoint, and the exit code that says so.

A script goes on after its loop, and may still write the weights to another disk. So nothing is raised when the last
save has failed. But a process that would end with exit code 0 ends with `EXIT_CODE`, and says why on stderr.

Does not: save anything, record events (see ``saves``).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import weakref
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

EXIT_CODE = 74
"""EX_IOERR of sysexits.h: "an error occurred while doing I/O on some file"."""

_unsaved: dict[Path, str] = {}
"""Why the newest state of a run is in no checkpoint, by the run directory."""

_script_failed = False


class Run(Protocol):
    """A run that may still be open when the process ends: its loop was left, or it has none and nobody closed it."""

    def report_loss_at_exit(self) -> None:
        """Note if saves have failed and nothing of the run, or not its newest state, was saved."""


_runs: weakref.WeakSet[Run] = weakref.WeakSet()


def watch(run: Run) -> None:
    """Ask a run at the end of the process, if it is still there, whether it is saved."""
    if not _is_in_a_test():
        _runs.add(run)


def note_unsaved(run_dir: Path, why: str) -> None:
    """Note that a run has ended with steps that no checkpoint holds; `why` is the rest of a sentence about it."""
    if _is_in_a_test():
        return
    if not _unsaved:
        _watch_sys_exit()
    _unsaved[run_dir] = why


def note_saved(run_dir: Path) -> None:
    """Note that a checkpoint of a run was written: whatever was not saved before, its work goes on from there."""
    _unsaved.pop(run_dir, None)


def _is_in_a_test() -> bool:
    """Return whether pytest runs a test in this process: its exit code belongs to pytest."""
    return "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ


def _watch_sys_exit() -> None:
    """Keep whether the script ends with an exit code of its own, which is then left alone."""
    original = sys.exit
    if getattr(original, "watched_by_guard", False):
        return

    @wraps(original)
    def exit(status: Any = None, /) -> Any:  # noqa: A001 - its name
        global _script_failed
        _script_failed = status is not None and status != 0
        original(status)

    exit.watched_by_guard = True  # type: ignore[attr-defined]
    sys.exit = exit


def _ends_with_an_exception() -> bool:
    """Return whether the interpreter has printed an exception that nobody caught; its exit code is 1 then."""
    return getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None


def _set_exit_code() -> None:
    """Have this process end with `EXIT_CODE` if a run is not saved and nothing else makes it fail."""
    for run in list(_runs):
        run.report_loss_at_exit()
    if not _unsaved or _script_failed or _ends_with_an_exception():
        return
    for run_dir, why in _unsaved.items():
        text = f"holdfast: the newest state of {run_dir} is in no checkpoint: {why}. Exit code {EXIT_CODE}.\n"
        with suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))
    # Python calls exit(0) once it has run every other function that is registered at exit, flushed its streams and
    # freed its modules, and offers no way to change that number. The C library calls after that what is registered
    # here, and a second call of exit goes on with what the first has left to do: see exit(3) of Linux.
    library = ctypes.CDLL(None)
    library.__cxa_atexit(ctypes.cast(library.exit, ctypes.c_void_p), ctypes.c_void_p(EXIT_CODE), None)


# When this module is imported, and not later: functions are called in the reverse order, and one that the script
# registers may still save, such as `guard.close`.
atexit.register(_set_exit_code)
os.register_at_fork(after_in_child=_unsaved.clear)
os.register_at_fork(after_in_child=_runs.clear)
