"""Errors of unreadable checkpoints: damaged bytes, foreign content, or an unreachable disk.

The difference decides what happens. A damaged checkpoint is moved aside and an older one is used;
in all other cases nothing on the disk is changed, so that no good checkpoint is given up.
"""

from __future__ import annotations

import contextlib
import errno
import struct
from collections.abc import Iterator
from pathlib import Path

from holdfast.core.errors import CheckpointError, HoldfastError, RunDirectoryError

# The prefix of a checkpoint that was moved aside, so that no run resumes from it.
DAMAGED = "damaged-"
# Errors that reading malformed JSON can raise.
MALFORMED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
    struct.error,
)
# System errors that do not mean that bytes are lost: too few resources, missing permissions, an
# unreachable network disk. EIO is not among them: a disk reports it for lost bytes.
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
    """Return H311 for a checkpoint whose bytes do not match its manifest."""
    return CheckpointError(
        f"checkpoint {checkpoint.name}: {why}",
        limit="a checkpoint is loaded only if every byte verifies",
        fix=(
            "nothing to do if an older checkpoint verifies (`holdfast checkpoints RUN_DIR --verify`"
            " says so); otherwise copy it again from its source."
        ),
        rule="H311",
    )


def not_ours(checkpoint: Path, error: BaseException, component: str = "") -> CheckpointError:
    """Return H311 for a checkpoint whose digests match but whose content is not holdfast's.

    Digests do not prove who made them. The checkpoint stays in place: a bug in holdfast must not
    cost a good checkpoint.

    Args:
        checkpoint: The checkpoint.
        error: The error raised while reading it.
        component: The component that was read, if any.
    """
    place = f"checkpoint {checkpoint.name}"
    if component:
        place = f"{component!r} in {place}"
    return CheckpointError(
        f"{place} cannot be read ({describe(error)})",
        limit=(
            "every digest matches, so the disk is intact: another program has changed the"
            " checkpoint, or holdfast has a bug. Nothing was changed on the disk"
        ),
        fix=(
            "copy it again from its source. To resume from the previous checkpoint, `mv"
            f" {checkpoint} {_aside(checkpoint)}`."
        ),
        rule="H311",
    )


def unreadable(checkpoint: Path, error: OSError, file: str) -> CheckpointError | RunDirectoryError:
    """Translate a system error: H311 for lost bytes, otherwise H307 (see `out_of_reach_now`).

    Args:
        checkpoint: The checkpoint.
        error: The error raised while reading it.
        file: The file that was read.
    """
    if error.errno not in _TEMPORARY:
        return damaged(checkpoint, f"{file} cannot be read ({error})")
    return out_of_reach_now(checkpoint, error)


def out_of_reach_now(checkpoint: Path, error: OSError) -> RunDirectoryError:
    """Return H307 for a checkpoint that may be complete but cannot be read now."""
    return RunDirectoryError(
        f"checkpoint {checkpoint.name} cannot be read now ({error})",
        limit=(
            "its bytes may be intact, and resuming from an older checkpoint would lose work:"
            " nothing was changed on the disk"
        ),
        fix=(
            "restart when it can be read (check open files, permissions and the disk). If it is"
            f" lost for good, `mv {checkpoint} {_aside(checkpoint)}` lets the run resume from"
            " the previous one."
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
