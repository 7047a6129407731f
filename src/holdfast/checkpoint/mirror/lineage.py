"""How the checkpoints of a run directory and those of a mirror are related.

Each checkpoint is identified by a digest of its manifest, which covers every byte of it. Saves in
the run directory and copies in the mirror come and go, so neither shows the whole history of the
run. A run directory therefore remembers the newest copies that it has written to a mirror or read
from one (`History`). This is what a remote-tracking branch is to git.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from holdfast.checkpoint.manifest import FILE_NAME
from holdfast.checkpoint.store import Entry
from holdfast.core.durable import replace_file
from holdfast.core.files import read_file, remove

_FORMAT = 1
_HISTORY_FILE = "mirror.json"
# The number of remembered copies. Only the newest one or two are ever needed with one mirror.
_MOST_REMEMBERED = 32
# Number of hexadecimal digits of a digest that identifies a checkpoint of one run.
_DIGITS = 12


def identify(entry: Entry) -> str:
    """Return the identity of a checkpoint in a run directory.

    Raises:
        OSError: The manifest cannot be read.
    """
    return identity_of(read_file(entry.path / FILE_NAME))


def identity_of(manifest: bytes) -> str:
    """Return the identity of the checkpoint that has this manifest."""
    return hashlib.sha256(manifest).hexdigest()[:_DIGITS]


class Relation(Enum):
    """How the run directory is related to the mirror."""

    # The mirror is empty, or its newest checkpoint is one that this directory had.
    NOT_BEHIND = "not behind"
    # The mirror has continued from the newest checkpoint of this directory, which may be empty.
    BEHIND = "behind"
    # Both have continued after their last common checkpoint.
    FORKED = "forked"
    # The mirror belongs to another run.
    OTHER_RUN = "other run"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSide:
    """What a run directory knows about its run."""

    run_id: str
    # Whether the run has never saved a checkpoint, so that its id means nothing yet.
    is_new: bool
    # Identities of the checkpoints in the directory, newest first.
    checkpoints: Sequence[str]
    # Identities of copies that this directory has completed in a mirror, or read from one.
    completed: Sequence[str]
    # Identity of the copy that this directory has begun last. It may be complete, too, if the
    # process was killed before it could remember that.
    begun: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorSide:
    """What a mirror knows about its run."""

    # None if the mirror has no owner, or the files of its owners cannot be read.
    run_id: str | None
    # Identities of the complete copies, newest first.
    copies: Sequence[str]


def compare(local: LocalSide, mirror: MirrorSide) -> Relation:
    """Return how a run directory is related to a mirror."""
    if not local.is_new and mirror.run_id not in (None, local.run_id):
        return Relation.OTHER_RUN
    if not mirror.copies:
        return Relation.NOT_BEHIND
    if not local.checkpoints:
        return Relation.BEHIND
    newest_copy = mirror.copies[0]
    if newest_copy in (*local.checkpoints, *local.completed, local.begun):
        return Relation.NOT_BEHIND
    newest_here = local.checkpoints[0]
    if newest_here in (*mirror.copies, *local.completed):
        return Relation.BEHIND
    return Relation.FORKED


class History:
    """The copies that a run directory has written to a mirror or read from one.

    Args:
        run_dir: The run directory, which contains the history in a file.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / _HISTORY_FILE
        # Without a readable file, a comparison can only use the checkpoints that exist.
        self._completed: list[str] = []
        self._begun: str | None = None
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            contents = json.loads(read_file(self._path))
            self._completed = [str(identity) for identity in contents["completed"]]
            self._begun = contents["begun"]

    @property
    def completed(self) -> Sequence[str]:
        """Return the identities of the completed copies, newest first."""
        return self._completed

    @property
    def begun(self) -> str | None:
        """Return the identity of the copy that was begun last, or None."""
        return self._begun

    def forget(self) -> None:
        """Forget all copies, as in a new run directory."""
        self._completed = []
        self._begun = None
        remove(self._path)

    def note_begun(self, identity: str) -> None:
        """Remember that a copy begins.

        Raises:
            OSError: The file cannot be written.
        """
        self._begun = identity
        self._write()

    def note_completed(self, identity: str) -> None:
        """Remember that a copy is complete.

        Raises:
            OSError: The file cannot be written.
        """
        earlier = [completed for completed in self._completed if completed != identity]
        self._completed = [identity, *earlier][:_MOST_REMEMBERED]
        self._write()

    def _write(self) -> None:
        contents = {"format": _FORMAT, "completed": self._completed, "begun": self._begun}
        replace_file(self._path, json.dumps(contents).encode())
