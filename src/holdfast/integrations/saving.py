"""Save a framework's checkpoints only if the state is finite, and verify them before a resume.

The locations and names of the files are defined in the package of each framework.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed

from holdfast.checkpoint import saver
from holdfast.checkpoint.newest import newest_good, paths_in
from holdfast.checkpoint.read_errors import DAMAGED
from holdfast.core.events import run_events
from holdfast.core.events.data import EventData
from holdfast.guard.directory import check_checkpoints_found
from holdfast.guard.hosted import HostedGuard
from holdfast.loader.order.ranks import ranks_now

_T = TypeVar("_T")
_log = logging.getLogger("holdfast")

# Characters of an error that are recorded. The errors of a full disk are shorter.
_MOST_CHARACTERS_OF_ERROR = 500
# Parts of the messages in which torch and safetensors wrap an error of the operating system.
_WRAPPED_SYSTEM_ERRORS = ("pytorchstreamwriter", "os error")

# Records an event, such as `Guard.emit`.
Emit = Callable[[EventData], None]


def emit_or_log(emit: Emit | None, event: EventData) -> None:
    """Record an event, or log it as long as there is no guard to record it."""
    if emit is None:
        _log.warning("%s", event)
    else:
        emit(event)


def on_all_ranks(work: Callable[[], _T]) -> _T:
    """Run this rank's part of a task that all ranks share, and return its result.

    Raises:
        OSError: The work of another rank has failed. This rank's own error is raised unchanged,
            once the other ranks know about it.
    """
    rank, world_size = ranks_now((0, 1))

    def exchange(outcome: list[Any]) -> list[Any]:
        """Send the text of this rank's error, but not its result, to the other ranks."""
        outcomes = [outcome] * world_size
        if world_size > 1:
            _, error_text = outcome
            distributed.all_gather_object(outcomes, [None, error_text])
        outcomes[rank] = outcome
        return outcomes

    return saver.on_all(work, exchange)[rank]


# --- Writing --------------------------------------------------------------------------------------


def should_save(guard: HostedGuard | None) -> bool:
    """Return whether the state is finite; otherwise roll back to the last good state.

    Raises:
        RunDirectoryError: H301 if another run has taken the run directory. Both would save into the
            same folder.
        NonFiniteError: H501 if the state is not finite, and there is no good state or no rollback
            left.
    """
    if guard is None:
        return True
    guard.check_lock()
    why = guard.nonfinite_state()
    if why is None:
        return True
    guard.emit(run_events.SaveRefused(why=why))
    guard.roll_back(why)
    return False


def attempt_save(
    write: Callable[[], None], name: str, emit: Emit | None, undo: Callable[[], None]
) -> bool:
    """Write a checkpoint, and return whether it was written and sealed.

    A disk error does not end training. Any other error of `write` is raised, since the next save
    would fail too.

    Args:
        write: Writes and seals the checkpoint.
        name: Its name, for the event.
        emit: Records events. None: a failure is logged.
        undo: Removes the files of a failed save.
    """
    try:
        write()
    except Exception as error:
        undo()
        if not _is_disk_error(error):
            raise
        text = f"{type(error).__name__}: {error}"[:_MOST_CHARACTERS_OF_ERROR]
        emit_or_log(emit, run_events.SaveFailed(checkpoint=name, error=text))
        return False
    if emit is not None:
        emit(run_events.Saved(checkpoint=name))
    return True


def _is_disk_error(error: Exception) -> bool:
    if isinstance(error, OSError):
        return True
    text = str(error).lower()
    return any(words in text for words in _WRAPPED_SYSTEM_ERRORS)


# --- Finding --------------------------------------------------------------------------------------


def newest_checkpoint(
    candidates: Iterable[Path], emit: Emit | None = None, run_dir: Path | None = None
) -> Path | None:
    """Return the newest checkpoint that verifies, or None if none was ever complete.

    Newer ones that do not verify are moved aside, each with an event.

    Args:
        candidates: Checkpoints of the framework, newest first.
        emit: Records events. None: they are logged.
        run_dir: The run directory, to look up whether anything was saved; None to skip this check.

    Raises:
        CheckpointError: H312 if one was complete, or was saved according to the recording, and none
            verifies or can be reached.
        RunDirectoryError: H307 if one cannot be read now.
    """

    def report_refused(path: Path, why: str) -> None:
        event = run_events.CheckpointDamaged(
            checkpoint=path.name, why=why, kept=DAMAGED + path.name
        )
        emit_or_log(emit, event)

    checkpoint = newest_good(candidates, report_refused, renames=True)
    if checkpoint is None and run_dir is not None:
        check_checkpoints_found(run_dir, new_start="ask for a new start, ")
    return checkpoint


def checkpoints_in(folder: Path, name_pattern: re.Pattern[str]) -> list[Path]:
    """Return the subfolders and broken links whose names match, in no particular order."""
    return [
        path
        for path in paths_in(folder)
        if name_pattern.fullmatch(path.name) and not path.is_file()
    ]
