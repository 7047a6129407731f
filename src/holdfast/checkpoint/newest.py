"""Find the newest checkpoint that can be trusted, written by holdfast or by a framework.

Nothing here imports torch.
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
    """Return the first checkpoint that verifies.

    A checkpoint without a manifest is unfinished if it is marked so, or if any other checkpoint has
    a manifest. If none was ever sealed, the newest one without a mark was written before holdfast
    was used, and is returned unverified.

    Args:
        candidates: Folders or files, newest first.
        on_refused: Called with each damaged or unfinished checkpoint before the good one, and the
            reason; None to call nothing.
        complete: Whether the names guarantee that the checkpoints were complete, so that a missing
            manifest means damage.
        renames: Whether refused checkpoints are moved aside before `on_refused` is called. This is
            the only place in the package that renames a checkpoint, and it does so only if bytes do
            not match their digests, never because of an error in the code that loads them.

    Returns:
        None if no checkpoint was ever complete, so that starting over loses nothing.

    Raises:
        CheckpointError: H312 if a checkpoint was complete but none verifies, or if one is a broken
            link.
        RunDirectoryError: H307 if one cannot be read now, H303 for a newer format.
    """
    checkpoints = list(candidates)
    _check_links(checkpoints)
    must_verify = bool(checkpoints) and (complete or any(map(was_sealed, checkpoints)))
    good: Path | None = None
    # The reason why each newer checkpoint is refused.
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
    """Return what is wrong with a checkpoint, or None if it is good.

    Args:
        checkpoint: The checkpoint.
        must_verify: Whether it is verified although it is not marked as unfinished.

    Raises:
        RunDirectoryError: H307 if it cannot be read now, H303 for a newer format.
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
    """Verify, and verify again if the disk failed to read, because the failure may be temporary."""
    try:
        verify(checkpoint)
    except CheckpointError as error:
        if not isinstance(error.__cause__, OSError):
            raise
        verify(checkpoint)


def paths_in(folder: Path) -> list[Path]:
    """Return the paths in a folder of checkpoints, or none if it was never created.

    Raises:
        CheckpointError: H312 if it cannot be read.
    """
    try:
        return list(folder.iterdir())
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.is_symlink():
            return []
        raise out_of_reach(folder, error.strerror or str(error)) from error


def move_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that did not verify, so that no run resumes from it.

    Returns:
        Its new path.
    """
    target = checkpoint.with_name(DAMAGED + checkpoint.name)
    remove(target)
    return checkpoint.rename(target)


def nothing_verifies(folder: Path, count: int, why: str) -> CheckpointError:
    """Return H312 for checkpoints that are all damaged."""
    return CheckpointError(
        f"{counted(count, 'checkpoint')} in {folder}, and none can be verified ({why})",
        limit="starting from scratch silently would hide the loss",
        fix="restore a copy of this folder; to start over on purpose, choose another one.",
        rule="H312",
    )


def out_of_reach(path: Path, why: str) -> CheckpointError:
    """Return H312 for checkpoints that cannot be reached."""
    return CheckpointError(
        f"checkpoints in {path} cannot be reached ({why})",
        limit="starting over silently would hide their loss, and nothing could be saved",
        fix=(
            "mount the disk, or make the folder readable; to start over on purpose, choose"
            " another one."
        ),
        rule="H312",
    )
