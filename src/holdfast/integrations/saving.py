"""Save a framework's checkpoints only if the state is finite, and verify them before a resume.

Each framework's own package defines where its checkpoint files are and how they are named.
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

# Longer error messages are truncated to this many characters, which is enough for disk-full errors.
_MOST_CHARACTERS_OF_ERROR = 500
# Words that identify an operating-system error that torch or safetensors has wrapped.
_WRAPPED_SYSTEM_ERRORS = ("pytorchstreamwriter", "os error")

# A function that records an event, such as `Guard.emit`.
Emit = Callable[[EventData], None]


def emit_or_log(emit: Emit | None, event: EventData) -> None:
    """Record an event, or log it as a warning if no guard is open to record it."""
    if emit is None:
        _log.warning("%s", event)
    else:
        emit(event)


def on_all_ranks(work: Callable[[], _T]) -> _T:
    """Run this rank's part of a task, wait for all ranks, and return this rank's result.

    All ranks must call this function.

    Args:
        work: Function that runs this rank's part.

    Raises:
        OSError: If the task failed on another rank. If it failed on this rank, the original error
            is raised instead, after the other ranks have been notified.
    """
    rank, world_size = ranks_now((0, 1))

    def exchange(outcome: list[Any]) -> list[Any]:
        """Exchange error texts with the other ranks, but keep each result on its own rank."""
        outcomes = [outcome] * world_size
        if world_size > 1:
            _, error_text = outcome
            distributed.all_gather_object(outcomes, [None, error_text])
        outcomes[rank] = outcome
        return outcomes

    return saver.on_all(work, exchange)[rank]


# --- Writing --------------------------------------------------------------------------------------


def should_save(guard: HostedGuard | None) -> bool:
    """Return whether the training state is finite. If it is not, roll back to the last good state.

    Args:
        guard: The run's guard. If None, nothing is checked, and True is returned.

    Raises:
        RunDirectoryError: H301 if another run has taken over the run directory, so that both runs
            would save into the same folder.
        NonFiniteError: H501 if the state is not finite and cannot be rolled back, because there is
            no good state or the limit on rollbacks is reached.
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
    """Try to write a checkpoint, and return whether it was written.

    A disk error is only reported, so that training continues. Any other error is raised, since the
    next save would probably fail too.

    Args:
        write: Function that writes and seals the checkpoint.
        name: The checkpoint's name, for the event.
        emit: Function that records events. If None, a failed save is logged instead.
        undo: Function that removes the files of a failed save.
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
    """Return the newest checkpoint that passes verification, or None if no save ever completed.

    Newer checkpoints that fail verification are moved aside, and an event reports each of them.

    Args:
        candidates: The framework's checkpoints, newest first.
        emit: Function that records events. If None, events are logged.
        run_dir: The run directory, whose recording shows whether a checkpoint was ever saved. If
            None, the recording is not checked.

    Raises:
        CheckpointError: H312 if a checkpoint was completed, according to its files or to the
            recording, but none can be found and verified.
        RunDirectoryError: H307 if a checkpoint cannot be read at the moment.
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
    """Return all subfolders and broken links with matching names, in no particular order."""
    return [
        path
        for path in paths_in(folder)
        if name_pattern.fullmatch(path.name) and not path.is_file()
    ]
