"""`Mirror`: take over the mirror of a run, fetch the newest checkpoint, and copy one to it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.mirror.folder import Copy, MirrorFolder, Owner, WrongBytesError
from holdfast.checkpoint.mirror.lineage import (
    History,
    LocalSide,
    MirrorSide,
    Relation,
    compare,
    identify,
)
from holdfast.checkpoint.mirror.location import Location, describe
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.errors import CheckpointError, HoldfastError, RunDirectoryError
from holdfast.core.events import run_events
from holdfast.core.events.data import EventData
from holdfast.core.files import remove
from holdfast.core.text import counted


class MirrorLostError(Exception):
    """Another process owns the mirror now. The message says which one, for an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredRun:
    """The run that a mirror copies.

    Args:
        directory: The run directory. This process holds its lock.
        run_id: The id of the run.
        is_new: Whether the run has never saved a checkpoint, so that its id means nothing yet.
        keep: The number of copies to keep in the mirror.
    """

    directory: Path
    run_id: str
    is_new: bool
    keep: int


class Mirror:
    """The mirror of one run. Only one thread at a time may use it.

    Methods that contact the store may raise any exception of its library.

    Args:
        location: The folder of the mirror.
        store: The checkpoints in the run directory.
        run: The run.
        emit: Records an event.
    """

    def __init__(
        self,
        location: Location,
        store: Store,
        run: MirroredRun,
        emit: Callable[[EventData], None],
    ) -> None:
        self._location = location
        self._folder = MirrorFolder(location)
        self._store = store
        self._run = run
        self._emit = emit
        self._history = History(run.directory)
        # This process as the owner of the mirror. None before `take_over`.
        self._owner: Owner | None = None
        # The id under which the mirror is taken over. It is that of the mirror if the run
        # directory is empty.
        self._run_id = run.run_id
        # The checkpoint that was fetched into the run directory, or None.
        self._pulled: Entry | None = None

    @property
    def has_local_checkpoints(self) -> bool:
        """Return whether the run directory contains a checkpoint."""
        return bool(self._store.entries())

    @property
    def is_owned(self) -> bool:
        """Return whether this process has taken the mirror over."""
        return self._owner is not None

    @property
    def parts_copied(self) -> int:
        """Return a number that grows while a copy makes progress."""
        return self._folder.parts_copied

    # --- taking over

    def run_is_behind(self) -> bool:
        """Check that the mirror belongs to this run, and return whether the run is behind it.

        The run is behind if the mirror has newer checkpoints. A new run directory takes over the
        run ID of the mirror.

        Raises:
            RunDirectoryError: H322 if the mirror belongs to another run, H323 if both the run
                directory and the mirror have continued the run.
        """
        local = self._local_side()
        copies = self._folder.copies()
        mirror = MirrorSide(
            run_id=self._folder.run_id(),
            copies=[copy.identity for copy in copies],
        )
        relation = compare(local, mirror)
        if relation is Relation.OTHER_RUN:
            raise self._other_run()
        if relation is Relation.FORKED:
            raise self._forked()
        if self._run.is_new and mirror.copies and mirror.run_id is not None:
            self._run_id = mirror.run_id
        return relation is Relation.BEHIND or self._has_lost_newest(copies)

    def _has_lost_newest(self, copies: Sequence[Copy]) -> bool:
        """Return whether the run directory no longer has the newest copy, nor a newer checkpoint.

        Args:
            copies: The complete copies in the mirror, newest first, of the same run.
        """
        entries = self._store.entries()
        if not copies or not entries or self._has(copies[0]):
            return False
        return copies[0].save_id > entries[0].save_id

    def _local_side(self) -> LocalSide:
        checkpoints = []
        for entry in self._store.entries():
            # The manifest of a damaged checkpoint may be missing, and the thread that saves may be
            # removing an old one.
            with contextlib.suppress(OSError):
                checkpoints.append(identify(entry))
        return LocalSide(
            run_id=self._run.run_id,
            is_new=self._run.is_new,
            checkpoints=checkpoints,
            completed=self._history.completed,
            begun=self._history.begun,
        )

    def take_over(self, *, may_pull: bool) -> None:
        """Become the owner of the mirror, so that no other process copies to it any more.

        If the mirror has continued the run, fetch its newest checkpoint.

        Args:
            may_pull: Whether a checkpoint may be fetched. If not, it is too late for that.

        Raises:
            RunDirectoryError: H322 and H323 as `run_is_behind`; H323 also if a checkpoint would
                have to be fetched although it is too late.
            CheckpointError: H312 if no copy is intact.
        """
        if may_pull:
            self._move_damaged_aside()
        # This comes first, since taking over stops the process that owns the mirror now.
        was_behind = self.run_is_behind()
        if was_behind and not may_pull:
            raise self._forked()
        try:
            owner = self._folder.add_owner(self._run_id)
            # The previous owner may have completed another copy since the first check.
            is_behind = self.run_is_behind()
        except HoldfastError:
            raise
        # The library of any store may raise anything.
        except Exception as error:
            if was_behind:
                # Without the copy, the run would begin again from an older state.
                raise self._not_fetched(error) from error
            raise
        if is_behind and not may_pull:
            raise self._forked()
        if is_behind:
            self.pull_newest()
        self._owner = owner

    # --- fetching

    def pull_newest(self) -> None:
        """Fetch the newest intact copy into the run directory.

        Raises:
            CheckpointError: H312 if no copy is intact.
            RunDirectoryError: H321 if the copies cannot be fetched now.
        """
        try:
            self._pull()
        except HoldfastError:
            raise
        # The library of any store may raise anything.
        except Exception as error:
            raise self._not_fetched(error) from error

    def _pull(self) -> None:
        """Fetch the newest intact copy. Copies that are not intact are reported and passed over."""
        started = time.monotonic()
        self._move_damaged_aside()
        copies = self._folder.copies()
        for copy in copies:
            if self._has(copy):
                # All newer copies are damaged, so the run continues from its own checkpoint.
                break
            entry_and_size = self._download(copy)
            if entry_and_size is not None:
                entry, size_bytes = entry_and_size
                self._pulled = entry
                self._history.note_completed(copy.identity)
                self._emit(
                    run_events.MirrorPulled(
                        mirror=self._location.name,
                        checkpoint=entry.path.name,
                        size_bytes=size_bytes,
                        seconds=round(time.monotonic() - started, 3),
                    )
                )
                break
        else:
            raise self._nothing_intact(len(copies))
        # From here on, the run goes on past any damaged copies, so they are part of its history.
        self._history.note_completed(copies[0].identity)

    def undo_pull(self, error: HoldfastError) -> HoldfastError | None:
        """Remove a checkpoint that was fetched into a new run directory but does not fit the run.

        The directory can then be used with another URL. Return the error that says so, or None if
        no checkpoint was fetched into a new directory.

        Args:
            error: Why the run cannot resume from it.
        """
        if self._pulled is None or not self._run.is_new:
            return None
        remove(self._pulled.path)
        self._history.forget()
        return RunDirectoryError(
            f"the newest checkpoint in mirror {self._location.name} does not fit this script"
            f" ({error.what})",
            limit="each run needs its own mirror",
            fix="pass another URL as mirror, or the same models and optimizers as before.",
            rule="H322",
        )

    def _move_damaged_aside(self) -> None:
        """Move damaged checkpoints in the run directory aside, whose names copies may have."""

        def report(path: Path, why: str) -> None:
            self._emit(run_events.CheckpointDamaged(checkpoint=path.name, why=why))

        # If none is intact, nothing is moved, and fetching one of the same name is an error.
        with contextlib.suppress(CheckpointError):
            self._store.newest_good(report)

    def _has(self, copy: Copy) -> bool:
        """Return whether the run directory contains the checkpoint of a copy."""
        for entry in self._store.entries():
            with contextlib.suppress(OSError):
                if identify(entry) == copy.identity:
                    return True
        return False

    def _download(self, copy: Copy) -> tuple[Entry, int] | None:
        """Fetch a copy, or return None after reporting that it is damaged."""
        try:
            return self._folder.download(copy, self._store)
        except (WrongBytesError, FileNotFoundError) as error:
            why = str(error)
        except CheckpointError as error:
            why = error.what
        self._emit(
            run_events.CheckpointDamaged(checkpoint=copy.checkpoint, why=f"in the mirror: {why}")
        )
        return None

    # --- copying

    def push(self, entry: Entry) -> None:
        """Copy a checkpoint to the mirror, unless it is there already, and delete old copies.

        Raises:
            MirrorLostError: Another process owns the mirror now.
            WrongBytesError: The bytes in the mirror differ from those in the run directory.
        """
        assert self._owner is not None
        started = time.monotonic()
        self._check_owner()
        identity = identify(entry)
        copies = self._folder.copies()
        if any(copy.identity == identity for copy in copies):
            self._folder.prune(self._run.keep, self._owner)
            return
        copy = Copy(self._owner, entry.save_id, entry.global_step, identity)
        self._history.note_begun(identity)
        size_bytes = self._folder.upload(entry, copy, self._check_owner)
        self._history.note_completed(identity)
        removed = self._folder.prune(self._run.keep, self._owner)
        self._emit(
            run_events.CheckpointMirrored(
                checkpoint=entry.path.name,
                size_bytes=size_bytes,
                seconds=round(time.monotonic() - started, 3),
                removed=tuple(removed),
            )
        )

    def _check_owner(self) -> None:
        """Check that this process still owns the mirror.

        Raises:
            MirrorLostError: A newer owner exists.
        """
        assert self._owner is not None
        owners = self._folder.owners()
        newest = max(owners, default=None)
        if newest is None:
            # Someone has emptied the mirror.
            self._folder.renew(self._owner, self._run_id)
        elif newest > self._owner or self._owner not in owners:
            # After the mirror was emptied, the number of a newer owner may be smaller.
            raise MirrorLostError(
                f"{self._folder.process_of(newest)} has taken over mirror {self._location.name}"
            )

    # --- errors

    def _other_run(self) -> HoldfastError:
        return RunDirectoryError(
            f"mirror {self._location.name} belongs to a different run than {self._run.directory}",
            limit="each run needs its own mirror",
            fix="pass another URL as mirror, or start in an empty run directory to continue that"
            " run.",
            rule="H322",
        )

    def _forked(self) -> HoldfastError:
        return RunDirectoryError(
            f"both {self._run.directory} and mirror {self._location.name} have continued this run"
            " after their last common checkpoint",
            limit="only one of them can be continued, and holdfast does not choose",
            fix=(
                "to continue from the mirror, start in an empty run directory. To continue from"
                " this directory, pass another URL as mirror."
            ),
            rule="H323",
        )

    def _not_fetched(self, error: Exception) -> HoldfastError:
        return RunDirectoryError(
            f"the newest checkpoint of the run is in mirror {self._location.name}, and cannot be"
            f" fetched now ({describe(error)})",
            limit="starting without it would lose work and fork the run",
            fix="start again when the mirror can be reached and the disk has space.",
            rule="H321",
        )

    def _nothing_intact(self, count: int) -> HoldfastError:
        return CheckpointError(
            f"no checkpoint in mirror {self._location.name} can be verified"
            f" ({counted(count, 'checkpoint')} found)",
            limit="starting from scratch without an error would hide the loss",
            fix="restore the files in the mirror, or pass another URL as mirror.",
            rule="H312",
        )
