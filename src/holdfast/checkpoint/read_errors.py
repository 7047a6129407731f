"""Errors for checkpoints that cannot be read: damaged bytes, foreign content or a lost disk.

The kind of error determines what happens next. A damaged checkpoint is moved aside, and an older
checkpoint is used. In all other cases, nothing on disk is changed, so that no good checkpoint is
lost.
"""

from __future__ import annotations

import contextlib
import errno
import struct
from collections.abc import Iterator
from pathlib import Path

from holdfast.core.errors import CheckpointError, HoldfastError, RunDirectoryError

# Prefix added to the name of a damaged checkpoint, so that no run resumes from it.
DAMAGED = "damaged-"
# Exceptions that parsing a malformed manifest or header can raise.
MALFORMED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
    struct.error,
)
# Errors after which the bytes on disk may still be intact: exhausted resources, missing permissions
# or an unreachable network disk. EIO is excluded, because disks report it for lost bytes.
_TEMPORARY = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.EINTR,
        errno.EACCES,
        errno.EPERM,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
    }
)
_MAX_DETAIL_LENGTH = 200


def damaged(checkpoint: Path, why: str) -> CheckpointError:
    """Return an H311 error for a checkpoint whose bytes do not match its manifest."""
    return CheckpointError(
        f"checkpoint {checkpoint.name}: {why}",
        limit="a checkpoint is loaded only if every byte passes verification",
        fix=(
            "if an older checkpoint verifies (see `holdfast checkpoints RUN_DIR --verify`), do"
            " nothing: the run resumes from it. Otherwise restore this checkpoint from a copy."
        ),
        rule="H311",
    )


def not_ours(checkpoint: Path, error: BaseException, component: str = "") -> CheckpointError:
    """Return an H311 error for a checkpoint whose digests match but whose contents are invalid.

    Another program may have written the checkpoint along with its digests. The checkpoint is not
    moved aside, because the cause may also be a bug in holdfast, and a bug must not make a good
    checkpoint unavailable.

    Args:
        checkpoint: The checkpoint.
        error: The exception raised while reading the checkpoint.
        component: Name of the component that was being read, if any.
    """
    place = f"checkpoint {checkpoint.name}"
    if component:
        place = f"{component!r} in {place}"
    return CheckpointError(
        f"{place} cannot be read ({describe(error)})",
        limit=(
            "every digest matches, so the disk is intact: either another program changed the"
            " checkpoint, or holdfast has a bug. Nothing on disk was changed"
        ),
        fix=(
            "restore the checkpoint from a copy. To resume from the previous checkpoint instead,"
            f" run `mv {checkpoint} {_aside(checkpoint)}`."
        ),
        rule="H311",
    )


def unreadable(checkpoint: Path, error: OSError, file: str) -> CheckpointError | RunDirectoryError:
    """Return an H311 error if bytes are lost, or an H307 error if they may still be intact.

    Args:
        checkpoint: The checkpoint.
        error: The exception raised while reading the checkpoint.
        file: Name of the file that was being read.
    """
    if error.errno not in _TEMPORARY:
        return damaged(checkpoint, f"{file} cannot be read ({error})")
    return out_of_reach_now(checkpoint, error)


def out_of_reach_now(checkpoint: Path, error: OSError) -> RunDirectoryError:
    """Return an H307 error for a checkpoint that may be intact but cannot be read now."""
    return RunDirectoryError(
        f"checkpoint {checkpoint.name} cannot be read now ({error})",
        limit=(
            "the checkpoint may be intact, and resuming from an older one would lose work."
            " Nothing on disk was changed"
        ),
        fix=(
            "check permissions, the disk and the limit of open files, then restart the run. If"
            f" the checkpoint is lost for good, run `mv {checkpoint} {_aside(checkpoint)}` to"
            " resume from the previous one."
        ),
        rule="H307",
    )


@contextlib.contextmanager
def reading(checkpoint: Path, component: str = "") -> Iterator[None]:
    """Convert errors from parsing a verified checkpoint in the ``with`` block to H311 errors.

    Args:
        checkpoint: The checkpoint.
        component: Name of the component that is being read, if any.

    Raises:
        CheckpointError: H311, see `not_ours`.
    """
    try:
        yield
    except HoldfastError:
        raise
    except MALFORMED as error:
        raise not_ours(checkpoint, error, component) from error


def describe(error: BaseException) -> str:
    """Return the name of an exception's class and the beginning of its message."""
    return f"{type(error).__name__}: {str(error)[:_MAX_DETAIL_LENGTH]}"


def _aside(checkpoint: Path) -> Path:
    # This is the name that a damaged checkpoint gets when `newest` moves it aside.
    return checkpoint.with_name(DAMAGED + checkpoint.name)
