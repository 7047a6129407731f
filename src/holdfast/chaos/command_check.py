"""Reject a command that cannot be tested, and suggest a fix."""

from __future__ import annotations

import os

from holdfast.chaos.judgement import describe_status
from holdfast.chaos.trials import TrialAttempt
from holdfast.chaos.workplace import Workplace
from holdfast.core.errors import PolicyError

# The minimum number of steps: a trial needs some steps before the fault and some after it.
MIN_STEPS = 4
# The number of characters from the end of the output that an error message shows.
OUTPUT_CHARACTERS = 400
# The maximum number of paths that an error message shows.
MAX_PATHS = 3
# The operating system's folders, which many libraries write to.
SYSTEM_FOLDERS = ("/dev/", "/proc/", "/sys/")
# Parts of the paths of multiprocessing's temporary folders and of Python's caches.
PASSING_PATHS = ("/pymp-", "/__pycache__")


def check_command(attempt: TrialAttempt, workplace: Workplace, *, out_of_time: bool) -> None:
    """Raise an error if a command cannot be tested.

    Args:
        attempt: An attempt at running the command without a fault.
        workplace: The workplace in which the attempt ran.
        out_of_time: Whether the campaign's time budget is used up.

    Raises:
        PolicyError: H729 if the command cannot be tested. The message says why.
    """
    if attempt.hung and out_of_time:
        raise _untestable(
            "did not end within the time budget",
            fix="increase --budget, or make the command train for fewer steps.",
        )
    if attempt.hung:
        raise _untestable(
            "hangs", fix="run the command under `holdfast run`, which reports where it hangs."
        )
    if attempt.status != 0:
        status = describe_status(attempt.status)
        output = attempt.output.strip()[-OUTPUT_CHARACTERS:]
        raise _untestable(
            f"fails even without a fault, with {status}: {output}", fix="fix this error first."
        )
    if attempt.most_steps == 0:
        raise _untestable(
            "did not step any torch optimizer",
            fix="pass the command that trains. Steps cannot be observed under `python -I`, `-E` or"
            " `-S`, in CUDA graphs, or if the script updates weights without an optimizer. If the"
            " command resumes a finished run in the working directory, remove that run.",
        )
    if attempt.most_steps < MIN_STEPS:
        raise _untestable(
            f"took fewer than {MIN_STEPS} steps",
            fix="let the command train for more steps, and save checkpoints in between.",
        )
    # Writing outside of the workplace is not allowed, because files that are written there would
    # still exist in the next trial.
    paths_outside = [
        event.facts["path"]
        for event in attempt.events("outside")
        if not _is_ignored(event.facts["path"], workplace)
    ]
    if paths_outside:
        raise _untestable(
            f"writes outside of the working directory: {', '.join(paths_outside[:MAX_PATHS])}",
            fix="pass these paths as --writes, so that each trial starts without these files, or"
            " let the command write to the working directory.",
        )


def _untestable(reason: str, fix: str) -> PolicyError:
    """Return the error for a command; `reason` completes the sentence "the command ..."."""
    return PolicyError(
        f"the command {reason}",
        limit="it must train without user input, and in the same way each time",
        fix=fix,
        rule="H729",
    )


def _is_ignored(path: str, workplace: Workplace) -> bool:
    """Return whether any command may write to a path, such as a system folder or a cache."""
    if any(part in path for part in PASSING_PATHS):
        return True
    # Caches in the home directory have names that start with a dot. `pathlib.Path.home` is not used
    # because it raises an error if the user has no home directory.
    hidden_in_home = os.path.expanduser("~/.")  # noqa: PTH111
    return path.startswith((*SYSTEM_FOLDERS, str(workplace.scratch), hidden_in_home))
