"""`Mirroring`: the mirror of a run, for the guard.

The package ``checkpoint.mirror`` does the work.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.checkpoint.mirror.copier import Copier
from holdfast.checkpoint.mirror.folder import MirrorFolder
from holdfast.checkpoint.mirror.location import (
    Location,
    describe,
    is_refusal,
    open_location,
    refused,
)
from holdfast.checkpoint.mirror.mirror import Mirror, MirroredRun
from holdfast.checkpoint.store import Entry, Store
from holdfast.core.errors import HoldfastError, PolicyError, RunDirectoryError
from holdfast.core.events.data import EventData
from holdfast.core.policy.policy import Policy
from holdfast.core.secrets import SecretUrl
from holdfast.guard.directory import RunDirectory


class Mirroring:
    """Keeps the mirror of one run up to date. Without a mirror, its methods do nothing.

    Args:
        policy: The settings of the run.
        directory: The run directory.
        store: The checkpoints in it.
        emit: Records an event.
        is_enabled: Whether this process copies. With several ranks, only the first one does.
    """

    def __init__(
        self,
        policy: Policy,
        directory: RunDirectory,
        store: Store,
        emit: Callable[[EventData], None],
        *,
        is_enabled: bool,
    ) -> None:
        self._directory = directory
        self._store = store
        self._emit = emit
        self._keep = policy.keep_latest_k
        self._location: Location | None = None
        if is_enabled and policy.mirror is not None:
            self._location = open_mirror(policy.mirror, directory.path)
        self._mirror: Mirror | None = None
        self._copier: Copier | None = None

    def start(self, *, may_pull: bool = True) -> None:
        """Take the mirror over, and fetch its newest checkpoint if the run directory is behind.

        The run directory must be open, and nothing may have been loaded from it yet.

        Args:
            may_pull: Whether a checkpoint may be fetched.

        Raises:
            RunDirectoryError: H321 if the mirror cannot be used, or cannot be reached although the
                run directory has no checkpoint. H322 if it belongs to another run, H323 if both
                have continued the run.
            CheckpointError: H312 if no checkpoint in the mirror is intact.
        """
        if self._location is None:
            return
        mirror = self._new_mirror(self._location)
        self._mirror = mirror
        self._copier = Copier(mirror, self._emit)
        try:
            mirror.take_over(may_pull=may_pull)
        except HoldfastError:
            raise
        # The library of any store may raise anything.
        except Exception as error:  # noqa: BLE001
            self._check_may_continue_without(mirror, self._location, error)
            self._copier.note_failure(error)

    def pull_if_behind(self) -> None:
        """Fetch the newest checkpoint if the run directory is behind, without taking over.

        Raises:
            HoldfastError: As `start`.
        """
        if self._location is None:
            return
        mirror = self._new_mirror(self._location)
        try:
            if mirror.run_is_behind():
                mirror.pull_newest()
        except HoldfastError:
            raise
        # The library of any store may raise anything.
        except Exception as error:  # noqa: BLE001
            self._check_may_continue_without(mirror, self._location, error)

    def _new_mirror(self, location: Location) -> Mirror:
        run = MirroredRun(
            directory=self._directory.path,
            run_id=self._directory.run_id,
            is_new=self._directory.saved_in is None,
            keep=self._keep,
        )
        return Mirror(location, self._store, run, self._emit)

    def _check_may_continue_without(
        self, mirror: Mirror, location: Location, error: Exception
    ) -> None:
        """Raise H321 unless the run may start although its mirror cannot be used."""
        if is_refusal(error):
            raise refused(location, error) from error
        if not mirror.has_local_checkpoints:
            raise _nothing_to_resume(location, error) from error

    def undo_pull(self, error: HoldfastError) -> HoldfastError | None:
        """Remove a fetched checkpoint that does not fit the run; see `Mirror.undo_pull`."""
        return None if self._mirror is None else self._mirror.undo_pull(error)

    def offer_newest(self) -> None:
        """Copy the newest checkpoint in the run directory, if the mirror does not have it yet."""
        if self._copier is not None:
            for entry in self._store.entries()[:1]:
                self._copier.offer(entry)

    def offer(self, entry: Entry) -> None:
        """Copy a checkpoint that was just saved. Returns at once."""
        if self._copier is not None:
            self._copier.offer(entry)

    def in_use(self) -> tuple[Path, ...]:
        """Return the checkpoint that is being copied, which must not be deleted now."""
        return () if self._copier is None else self._copier.in_use()

    def finish(self) -> None:
        """Wait until the newest checkpoint is copied, or until that makes no more progress."""
        if self._copier is not None:
            self._copier.finish()


def pull_before_opening(run_dir: Path, policy: Policy, emit: Callable[[EventData], None]) -> None:
    """Fetch the newest checkpoint of a mirror into a run directory that no guard has opened yet.

    Args:
        run_dir: The run directory. It is created only if there is something to fetch.
        policy: The settings of the run.
        emit: Records an event.

    Raises:
        HoldfastError: As `Mirroring.start`.
    """
    if policy.mirror is None:
        return
    if not run_dir.exists() and _has_no_copies(policy.mirror):
        return
    directory = RunDirectory(run_dir)
    try:
        directory.acquire()
    except RunDirectoryError:
        # Another process of the command trains in this directory, and has fetched what it needs.
        return
    try:
        store = Store(directory.checkpoints)
        Mirroring(policy, directory, store, emit, is_enabled=True).pull_if_behind()
    finally:
        directory.release()


def _has_no_copies(url: SecretUrl) -> bool:
    location = open_location(url)
    try:
        return not MirrorFolder(location).copies()
    # The library of any store may raise anything.
    except Exception as error:
        if is_refusal(error):
            raise refused(location, error) from error
        raise _nothing_to_resume(location, error) from error


def open_mirror(url: SecretUrl, run_dir: Path) -> Location:
    """Return the location of a mirror, without a request to its store.

    Raises:
        PolicyError: H119 if the URL cannot be used.
    """
    location = open_location(url)
    if location.is_inside(run_dir):
        raise PolicyError(
            f"mirror={url!r}",
            limit=f"it is in the run directory {run_dir}, and would be lost with it",
            fix="pass the URL of another store, or the path of another disk.",
            rule="H119",
        )
    return location


def _nothing_to_resume(location: Location, error: Exception) -> RunDirectoryError:
    return RunDirectoryError(
        f"mirror {location.name} cannot be reached ({describe(error)}), and the run directory"
        " has no checkpoint",
        limit="starting from scratch could hide the checkpoints in the mirror",
        fix="start again when the mirror can be reached, or omit mirror to start from scratch.",
        rule="H321",
    )
