"""Find the newest intact checkpoint, whether holdfast or a framework wrote it.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from holdfast.checkpoint.read_errors import DAMAGED, unreadable
from holdfast.checkpoint.seal import is_unfinished, was_sealed
from holdfast.checkpoint.verify import verify
from holdfast.core.errors import CheckpointError
from holdfast.core.files import remove
from holdfast.core.text import counted


def newest_good(
    candidates: Iterable[Path],
    on_refused: Callable[[Path, str], None] | None,
    *,
    complete: bool = False,
    renames: bool = False,
) -> Path | None:
    """Return the newest checkpoint that passes verification.

    A checkpoint without a manifest is unfinished if it contains the marker file of an unfinished
    save, or if any other checkpoint was sealed. If no checkpoint was ever sealed, the checkpoints
    were written before holdfast was used. In this case, the newest checkpoint without the marker is
    returned without verification.

    Args:
        candidates: Folders or files, newest first.
        on_refused: Called with the path of each damaged or unfinished checkpoint that is newer than
            the returned one, and with the reason. May be None.
        complete: Whether a checkpoint only gets its name once it is complete, so that a missing
            manifest means damage.
        renames: Whether to rename refused checkpoints (see `move_aside`) before calling
            `on_refused`. Refused checkpoints are renamed nowhere else in the package. In
            particular, an error raised while a checkpoint is loaded never leads to a rename.

    Returns:
        The checkpoint, or None if no checkpoint was ever complete. In this case, starting from
        scratch loses nothing.

    Raises:
        CheckpointError: H312 if there were complete checkpoints but none passes verification, or if
            a checkpoint is a broken link.
        RunDirectoryError: H307 if a checkpoint is temporarily unreadable, H303 if it has a newer
            format.
    """
    checkpoints = list(candidates)
    _check_links(checkpoints)
    must_verify = bool(checkpoints) and (complete or any(map(was_sealed, checkpoints)))
    good: Path | None = None
    # Why each checkpoint newer than the good one was refused.
    refused: dict[Path, str] = {}
    for checkpoint in checkpoints:
        why = _why_refused(checkpoint, must_verify=must_verify)
        if why is None:
            good = checkpoint
            break
        refused[checkpoint] = why
    if good is None and must_verify:
        newest = checkpoints[0]
        raise nothing_verifies(newest.parent, len(checkpoints), refused[newest])
    for checkpoint, why in refused.items():
        if renames:
            move_aside(checkpoint)
        if on_refused is not None:
            on_refused(checkpoint, why)
    return good


def _check_links(checkpoints: Sequence[Path]) -> None:
    for checkpoint in checkpoints:
        if checkpoint.is_symlink() and not checkpoint.exists():
            raise out_of_reach(checkpoint, "it is a broken link")


def _why_refused(checkpoint: Path, *, must_verify: bool) -> str | None:
    """Return what is wrong with a checkpoint, or None if it may be used.

    Args:
        checkpoint: The checkpoint.
        must_verify: Whether to verify the checkpoint even if it has no marker of an unfinished
            save.

    Raises:
        RunDirectoryError: H307 if the checkpoint is temporarily unreadable, H303 if it has a newer
            format.
    """
    try:
        if must_verify or is_unfinished(checkpoint):
            _verify_twice(checkpoint)
    except CheckpointError as error:
        return error.what
    except OSError as error:
        failure = unreadable(checkpoint, error, checkpoint.name)
        if not isinstance(failure, CheckpointError):
            raise failure from error
        return failure.what
    return None


def _verify_twice(checkpoint: Path) -> None:
    """Verify a checkpoint, and retry once if the disk reports an error that may be temporary."""
    try:
        verify(checkpoint)
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        verify(checkpoint)


def paths_in(folder: Path) -> list[Path]:
    """Return the paths in a folder of checkpoints, or an empty list if the folder does not exist.

    Raises:
        CheckpointError: H312 if the folder cannot be read.
    """
    try:
        return list(folder.iterdir())
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.is_symlink():
            return []
        raise out_of_reach(folder, error.strerror or str(error)) from error


def move_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that failed verification, so that no run resumes from it.

    Returns:
        The checkpoint's new path.
    """
    target = checkpoint.with_name(DAMAGED + checkpoint.name)
    remove(target)
    return checkpoint.rename(target)


def nothing_verifies(folder: Path, count: int, why: str) -> CheckpointError:
    """Return an H312 error for a folder in which no checkpoint passes verification.

    Args:
        folder: The folder.
        count: Number of checkpoints in the folder.
        why: The reason to show in the error message.
    """
    return CheckpointError(
        f"no checkpoint in {folder} can be verified ({counted(count, 'checkpoint')} found: {why})",
        limit="starting from scratch without an error would hide the loss",
        fix=(
            "restore a copy of this folder, or choose another folder to start from scratch on"
            " purpose."
        ),
        rule="H312",
    )


def out_of_reach(path: Path, why: str) -> CheckpointError:
    """Return an H312 error for a path at which checkpoints cannot be reached.

    Args:
        path: The folder of checkpoints, or a single checkpoint.
        why: The reason to show in the error message.
    """
    return CheckpointError(
        f"checkpoints in {path} cannot be reached ({why})",
        limit="starting from scratch would hide their loss, and no new checkpoint could be saved",
        fix=(
            "mount the disk or make the folder readable, or choose another folder to start from"
            " scratch on purpose."
        ),
        rule="H312",
    )
