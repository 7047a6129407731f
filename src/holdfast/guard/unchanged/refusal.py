"""End a script that cannot be resumed exactly, before it overwrites anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from holdfast.core.errors import CheckpointError, HoldfastError
from holdfast.core.events.data import EventData
from holdfast.core.events.process_events import ExceptionRaised
from holdfast.core.raised import describe_exception
from holdfast.guard.unchanged.frames import frames_of_script

# The exit code for incorrect usage, as in `holdfast run`.
EXIT_CODE = 2


class UnchangedScriptError(CheckpointError):
    """An unchanged script cannot be saved so that a resume is exact, or a resume is not exact."""


def cannot_be_saved(problem: str, fix: str) -> UnchangedScriptError:
    """Return the error for a script that `holdfast run --resume` does not support.

    Args:
        problem: A clause that names what holdfast does not support.
        fix: What the user can do, as a sentence without its capital letter.
    """
    return UnchangedScriptError(
        f"--resume cannot save this script: {problem}",
        limit="a resume would not be exact, so nothing was saved or overwritten",
        fix=f"{fix} Without --resume, the script runs as it is.",
        rule="H738",
    )


def resume_differs(difference: str) -> UnchangedScriptError:
    """Return the error for a resumed script that does not repeat what its earlier attempt did.

    Args:
        difference: A clause that names the difference.
    """
    return UnchangedScriptError(
        f"the resumed script differs from its earlier attempt: {difference}",
        limit="the rest of the run would differ from an undisturbed one",
        fix=(
            "undo changes to the script and its data, and let it load no checkpoint or log of its"
            " own at the start. If it does neither, it depends on something that no checkpoint"
            " holds; use a Guard, or start again with another --run-dir."
        ),
        rule="H739",
    )


def end_process(error: HoldfastError, emit: Callable[[EventData], None]) -> NoReturn:
    """Record an error, print it and end the process with `EXIT_CODE`.

    The process ends without running the script's ``finally`` blocks and exit handlers, which might
    overwrite the weights of the earlier attempt.

    Args:
        error: The error.
        emit: Records an event.
    """
    facts = describe_exception(error, error.__traceback__)
    # The traceback has only frames of holdfast, because the script did not raise the error.
    frames = [
        [frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name]
        for frame in frames_of_script(sys._getframe())
    ]
    if frames:
        facts["frames"] = frames[::-1]
    emit(ExceptionRaised(**facts, thread="MainThread", fatal=True))
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    with suppress(OSError, ValueError):
        sys.stderr.write(f"holdfast: {error}\n")
        sys.stderr.flush()
    os._exit(EXIT_CODE)
