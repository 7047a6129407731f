"""The search for the newest checkpoint that can be trusted, our own and those of frameworks.

No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast.checkpoint.seal import is_unfinished, unreadable, verify, was_whole
from holdfast.core.errors import CheckpointError
from holdfast.core.files import remove

DAMAGED = "damaged-"


def newest_good(
    candidates: Iterable[Path],
    on_refused: Callable[[Path, str], None],
    *,
    complete: bool = False,
    renames: bool = False,
) -> Path | None:
    """Return the first checkpoint that verifies.

    None if none was ever whole, so that a new start loses nothing.

    One without a manifest is an unfinished one if it is marked so, or if any other has a manifest.
    Where none was ever sealed, the newest without a mark was written before holdfast came, and is
    taken as it is.

    Args:
        candidates: Folders or files, newest first.
        on_refused: Called with the path of each one before it that is damaged or unfinished, and
            the reason.
        complete: Whether their names say that they were whole, so that one without a manifest is
            damaged.
        renames: Whether these are moved aside first. Nothing else in this package renames a
            checkpoint: only bytes that do not match their digests are a reason, never an error of
            the code that loads them.

    Raises:
        CheckpointError: H312, if one was whole and none verifies, or if one is a link that leads
            nowhere.
        RunDirectoryError: H307, if the system does not let one be read; H303, for a newer format.
    """
    found = list(candidates)
    for each in found:
        if each.is_symlink() and not each.exists():
            raise out_of_reach(each, "the link leads nowhere")
    sealed, good = bool(found) and (complete or any(map(was_whole, found))), None
    refused: list[tuple[Path, str]] = []
    for each in found:
        try:
            if sealed or is_unfinished(each):
                _verify_twice(each)
        except CheckpointError as error:
            refused.append((each, error.what))
            continue
        except OSError as error:
            failure = unreadable(each, error, each.name)
            if not isinstance(failure, CheckpointError):
                raise failure from error
            refused.append((each, failure.what))
            continue
        good = each
        break
    if good is None and sealed:
        raise nothing_verifies(found[0].parent, len(found), refused[0][1])
    for each, why in refused:
        if renames:
            move_aside(each)
        on_refused(each, why)
    return good


def _verify_twice(checkpoint: Path) -> None:
    """Verify, and again where the disk refused to read.

    That may have been for a moment, and nothing is damaged.
    """
    try:
        verify(checkpoint)
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        verify(checkpoint)


def paths_in(folder: Path) -> list[Path]:
    """Return what is in a folder of checkpoints, nothing if it was never made.

    H312 if it cannot be read.
    """
    try:
        return list(folder.iterdir())
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.is_symlink():
            return []
        raise out_of_reach(folder, error.strerror or str(error)) from error


def move_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that did not verify, so that nobody resumes from it, and return its
    new path.
    """
    target = checkpoint.with_name(DAMAGED + checkpoint.name)
    remove(target)
    return checkpoint.rename(target)


def nothing_verifies(folder: Path, count: int, why: str) -> CheckpointError:
    """Return the error for checkpoints that are all damaged."""
    return CheckpointError(
        f"none of the {count} checkpoint(s) in {folder} verifies ({why})",
        limit="starting from scratch without a word would hide the loss",
        fix="bring back a copy of this folder; to begin anew on purpose, choose another one.",
        rule="H312",
    )


def out_of_reach(path: Path, why: str) -> CheckpointError:
    """Return the error for checkpoints that are on a disk which is not there."""
    return CheckpointError(
        f"checkpoints in {path} cannot be reached ({why})",
        limit="a new start without a word would hide their loss, and nothing could be saved",
        fix=(
            "mount the disk, or make it a folder that can be read; to begin anew on purpose, name"
            " another one."
        ),
        rule="H312",
    )
