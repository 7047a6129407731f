"""Errors about checkpoints that cannot be read: damaged bytes, foreign content, or a disk away.

The difference decides what happens. Damaged bytes are moved aside and an older checkpoint is used;
in any other case nothing on the disk is changed, so that no good checkpoint is given up.
"""

from __future__ import annotations

import contextlib
import errno
import struct
from collections.abc import Iterator
from pathlib import Path

from holdfast.core.errors import CheckpointError, HoldfastError, RunDirectoryError

# The prefix of a checkpoint that was moved aside, so that nobody resumes from it.
DAMAGED = "damaged-"
# What reading JSON can raise if it is not of the expected form.
MALFORMED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
    struct.error,
)
# System errors that say nothing about the bytes: too few resources, missing permissions, a network
# disk that is away. EIO is not among them: a disk reports it for bytes that it has lost.
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
_LONGEST_DETAIL = 200


def damaged(checkpoint: Path, why: str) -> CheckpointError:
    """Return H311 for a checkpoint whose bytes are not what they should be."""
    return CheckpointError(
        f"checkpoint {checkpoint.name}: {why}",
        limit="a checkpoint is loaded only if every byte verifies",
        fix=(
            "nothing to do if an older checkpoint verifies (`holdfast checkpoints RUN_DIR --verify`"
            " says so); otherwise copy it again from where it came."
        ),
        rule="H311",
    )


def not_ours(checkpoint: Path, error: BaseException, component: str = "") -> CheckpointError:
    """Return H311 for a checkpoint whose digests match but whose content no holdfast has written.

    Digests do not say who made them. The checkpoint stays where it is: a bug of ours must not cost
    a good one.

    Args:
        checkpoint: The checkpoint.
        error: What reading it raised.
        component: The component that was read, if it was one.
    """
    place = f"checkpoint {checkpoint.name}"
    if component:
        place = f"{component!r} in {place}"
    return CheckpointError(
        f"{place} cannot be read ({describe(error)})",
        limit=(
            "every digest matches, so the disk has kept what was written: another program has"
            " changed it, or holdfast has a bug. Nothing was changed on the disk"
        ),
        fix=(
            "copy it again from where it came. To resume from the checkpoint before it, `mv"
            f" {checkpoint} {_aside(checkpoint)}`."
        ),
        rule="H311",
    )


def unreadable(checkpoint: Path, error: OSError, file: str) -> CheckpointError | RunDirectoryError:
    """Return what a system error means: H311 for lost bytes, else H307 (see `out_of_reach_now`).

    Args:
        checkpoint: The checkpoint.
        error: What reading raised.
        file: The file that was read.
    """
    if error.errno not in _TEMPORARY:
        return damaged(checkpoint, f"{file} cannot be read ({error})")
    return out_of_reach_now(checkpoint, error)


def out_of_reach_now(checkpoint: Path, error: OSError) -> RunDirectoryError:
    """Return H307 for a checkpoint that may be complete, but cannot be read now."""
    return RunDirectoryError(
        f"checkpoint {checkpoint.name} cannot be read now ({error})",
        limit=(
            "that says nothing about its bytes, and resuming from an older one would lose work:"
            " nothing was changed on the disk"
        ),
        fix=(
            "start again when it can be read (check open files, permissions and the disk). If it"
            f" is lost for good, `mv {checkpoint} {_aside(checkpoint)}` lets the run resume from"
            " the one before."
        ),
        rule="H307",
    )


@contextlib.contextmanager
def reading(checkpoint: Path, component: str = "") -> Iterator[None]:
    """Turn errors of reading a verified checkpoint into `not_ours` (H311)."""
    try:
        yield
    except HoldfastError:
        raise
    except MALFORMED as error:
        raise not_ours(checkpoint, error, component) from error


def describe(error: BaseException) -> str:
    """Return an error's type and its text, shortened."""
    return f"{type(error).__name__}: {str(error)[:_LONGEST_DETAIL]}"


def _aside(checkpoint: Path) -> Path:
    return checkpoint.with_name(DAMAGED + checkpoint.name)
