"""Exit with code 74 if the newest state of a run has not been saved in a checkpoint.

If the last save fails, no error is raised, because the code after the loop may still write the
weights to another disk. But if the process would exit with code 0, it exits with `EXIT_CODE`
instead and prints the reason on stderr.

If a loop is left early, for example with ``break``, no checkpoint is saved. If the loop's last
steps are still unsaved when the process exits, a line on stderr reports them, and the exit code
does not change.

The module ``saves`` saves the checkpoints and records events about them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import traceback
import weakref
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

from holdfast.core.standard_streams import write_to_stderr

# EX_IOERR from sysexits.h: "an error occurred while doing I/O on some file".
EXIT_CODE = 74

# Why the newest state of a run is in no checkpoint, keyed by run directory.
_unsaved: dict[Path, str] = {}

# The first and last unsaved steps of loops that were left early, keyed by run directory.
_left_steps: dict[Path, tuple[int, int]] = {}

# Whether the script has called `sys.exit` with a nonzero status.
_script_failed = False


class Run(Protocol):
    """A run that may still be open when the process exits, because its loop was left early."""

    def end_at_exit(self) -> None:
        """Save if a stop was requested. Otherwise, record the unsaved steps."""


_runs: weakref.WeakSet[Run] = weakref.WeakSet()

# Functions that are called when the process exits, after all runs have ended.
_after_runs: list[Callable[[], None]] = []


def watch(run: Run) -> None:
    """Call the run's `end_at_exit` when the process exits, if the run still exists by then."""
    if not _is_in_a_test():
        _runs.add(run)


def call_after_runs(function: Callable[[], None]) -> None:
    """Call a function when the process exits, after all runs have ended. Not in a forked child."""
    _after_runs.append(function)


def note_unsaved(run_dir: Path, why: str) -> None:
    """Record that a run has ended with unsaved steps.

    Args:
        run_dir: The run directory.
        why: The reason why the steps are unsaved. In the message, it follows a colon.
    """
    if _is_in_a_test():
        return
    if not _unsaved:
        _watch_sys_exit()
    _unsaved[run_dir] = why


def note_left_steps(run_dir: Path, from_step: int, to_step: int) -> None:
    """Record that a loop was left early, with steps unsaved although no save has failed."""
    if not _is_in_a_test():
        _left_steps[run_dir] = from_step, to_step


def forget_left_steps(run_dir: Path) -> None:
    """Forget the unsaved steps of a loop, after they were saved or a new guard reported them."""
    _left_steps.pop(run_dir, None)


def note_saved(run_dir: Path) -> None:
    """Forget the failed saves and unsaved steps of a run, after it has saved a checkpoint."""
    _unsaved.pop(run_dir, None)
    forget_left_steps(run_dir)


def _is_in_a_test() -> bool:
    """Return whether this process is running a pytest test. If so, pytest sets the exit code."""
    return "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ


def _watch_sys_exit() -> None:
    """Replace `sys.exit` to detect whether the script sets an exit code, which must be kept."""
    original = sys.exit
    if getattr(original, "watched_by_guard", False):
        return

    @wraps(original)
    def exit(status: Any = None, /) -> Any:  # noqa: A001 - replaces `sys.exit` under its own name
        global _script_failed
        _script_failed = status is not None and status != 0
        original(status)

    exit.watched_by_guard = True  # type: ignore[attr-defined]
    sys.exit = exit


def uncaught_exception() -> BaseException | None:
    """Return the uncaught exception that has ended the script, so that the exit code is 1."""
    error = getattr(sys, "last_exc", None)
    return getattr(sys, "last_value", None) if error is None else error


def _ends_with_an_exception() -> bool:
    return uncaught_exception() is not None


def _report_left_steps() -> None:
    """Report unsaved steps on stderr, unless the script ended with an uncaught exception."""
    if _ends_with_an_exception():
        return
    for run_dir, (from_step, to_step) in _left_steps.items():
        if run_dir in _unsaved:
            continue
        unsaved_steps = f"steps {from_step} to {to_step} of {run_dir} are"
        if from_step == to_step:
            unsaved_steps = f"step {to_step} of {run_dir} is"
        text = (
            f"holdfast: {unsaved_steps} in no checkpoint; call guard.close() after the loop, or"
            " leave it with guard.request_stop()\n"
        )
        write_to_stderr(text)


def _end_runs() -> None:
    """End the runs that are still open, report unsaved steps, and set the exit code."""
    for run in list(_runs):
        try:
            run.end_at_exit()
        except Exception:  # noqa: BLE001 - no caller could handle it, and the other runs must still be ended
            traceback.print_exc()
    _report_left_steps()
    _set_exit_code()
    for function in _after_runs:
        function()


def _set_exit_code() -> None:
    """Make the process exit with `EXIT_CODE` if the newest state of a run is unsaved."""
    if not _unsaved or _script_failed or _ends_with_an_exception():
        return
    for run_dir, why in _unsaved.items():
        text = (
            f"holdfast: the newest state of {run_dir} is in no checkpoint: {why}. Exit code"
            f" {EXIT_CODE}.\n"
        )
        write_to_stderr(text)
    # At this point, Python offers no way to change the exit code. It runs the remaining atexit
    # functions, flushes its streams, frees its modules, and calls the C library's exit(0). That
    # function calls the handler registered here, which calls exit again with our code. The second
    # call completes the work of the first; see exit(3) in the Linux manual.
    library = ctypes.CDLL(None)
    library.__cxa_atexit(
        ctypes.cast(library.exit, ctypes.c_void_p), ctypes.c_void_p(EXIT_CODE), None
    )


# `_end_runs` is registered on import because atexit functions run in reverse order. A function that
# the script registers later, such as `guard.close`, runs first and may still save.
atexit.register(_end_runs)
os.register_at_fork(after_in_child=_unsaved.clear)
os.register_at_fork(after_in_child=_left_steps.clear)
os.register_at_fork(after_in_child=_runs.clear)
os.register_at_fork(after_in_child=_after_runs.clear)
