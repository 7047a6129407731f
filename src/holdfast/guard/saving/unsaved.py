"""Exit with code 74 if the newest state of a run is in no checkpoint.

If the last save fails, no error is raised, because the code after the loop may still write the
weights to another disk. But if the process would exit with code 0, it exits with `EXIT_CODE`
instead and prints the reason on stderr.

A loop that is left early, for example by `break`, does not save. If its last steps are still
unsaved when the process exits, a line on stderr names them, and the exit code is unchanged.

Saving itself, and recording its events, is in ``saves``.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import traceback
import weakref
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

from holdfast.core.standard_streams import write_to_stderr

# EX_IOERR of sysexits.h: "an error occurred while doing I/O on some file".
EXIT_CODE = 74

# The reason why the newest state of a run is in no checkpoint, by run directory.
_unsaved: dict[Path, str] = {}

# The first and the last unsaved step of a loop that was left early, by run directory.
_left_steps: dict[Path, tuple[int, int]] = {}

# Whether the script called `sys.exit` with a status that is not 0.
_script_failed = False


class Run(Protocol):
    """A run that may still be open when the process exits, after its loop was left early."""

    def end_at_exit(self) -> None:
        """Save if a stop was requested; otherwise note the steps that are in no checkpoint."""


_runs: weakref.WeakSet[Run] = weakref.WeakSet()


def watch(run: Run) -> None:
    """Call `end_at_exit` of a run when the process exits, if the run still exists."""
    if not _is_in_a_test():
        _runs.add(run)


def note_unsaved(run_dir: Path, why: str) -> None:
    """Note that a run has ended with steps that no checkpoint holds.

    Args:
        run_dir: The run directory.
        why: The reason, as it follows a colon in the message.
    """
    if _is_in_a_test():
        return
    if not _unsaved:
        _watch_sys_exit()
    _unsaved[run_dir] = why


def note_left_steps(run_dir: Path, from_step: int, to_step: int) -> None:
    """Note that a loop was left early with these steps unsaved, although no save has failed."""
    if not _is_in_a_test():
        _left_steps[run_dir] = from_step, to_step


def forget_left_steps(run_dir: Path) -> None:
    """Forget the unsaved steps of a loop, once they are saved or a new guard has reported them."""
    _left_steps.pop(run_dir, None)


def note_saved(run_dir: Path) -> None:
    """Note that a checkpoint of a run was written, so that earlier failed saves do not matter."""
    _unsaved.pop(run_dir, None)
    forget_left_steps(run_dir)


def _is_in_a_test() -> bool:
    """Return whether pytest is running a test in this process, so that it sets the exit code."""
    return "pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ


def _watch_sys_exit() -> None:
    """Replace `sys.exit` to learn whether the script chose its own exit code, which is kept."""
    original = sys.exit
    if getattr(original, "watched_by_guard", False):
        return

    @wraps(original)
    def exit(status: Any = None, /) -> Any:  # noqa: A001 - the name of the original
        global _script_failed
        _script_failed = status is not None and status != 0
        original(status)

    exit.watched_by_guard = True  # type: ignore[attr-defined]
    sys.exit = exit


def _ends_with_an_exception() -> bool:
    """Return whether an uncaught exception ended the script, so that the exit code is 1."""
    return (
        getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None
    )


def _report_left_steps() -> None:
    """Name the unsaved steps on stderr, unless the script ended with an uncaught exception."""
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
        except Exception:  # noqa: BLE001 - nothing catches it here, and the other runs are still to be ended
            traceback.print_exc()
    _report_left_steps()
    _set_exit_code()


def _set_exit_code() -> None:
    """Make the process exit with `EXIT_CODE` if a run is unsaved and the code would be 0."""
    if not _unsaved or _script_failed or _ends_with_an_exception():
        return
    for run_dir, why in _unsaved.items():
        text = (
            f"holdfast: the newest state of {run_dir} is in no checkpoint: {why}. Exit code"
            f" {EXIT_CODE}.\n"
        )
        write_to_stderr(text)
    # Python offers no way to change the exit code at this point: it runs the other atexit
    # functions, flushes its streams, frees its modules and then calls exit(0) of the C library.
    # That calls the function registered here, which calls exit again with our code. The second call
    # continues the work of the first; see the man page exit(3) on Linux.
    library = ctypes.CDLL(None)
    library.__cxa_atexit(
        ctypes.cast(library.exit, ctypes.c_void_p), ctypes.c_void_p(EXIT_CODE), None
    )


# Registered on import, because atexit functions run in reverse order: a function that the script
# registers later, such as `guard.close`, runs before this one and may still save.
atexit.register(_end_runs)
os.register_at_fork(after_in_child=_unsaved.clear)
os.register_at_fork(after_in_child=_left_steps.clear)
os.register_at_fork(after_in_child=_runs.clear)
