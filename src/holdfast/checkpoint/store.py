"""Commit, list and prune the checkpoints of a run, and find the newest good one.

This module does not import torch. The folder of a run's checkpoints has three kinds of entries:

    000012-step00000600/          a complete checkpoint, which got this name after all its files
                                  had been verified and flushed
    .tmp-000013-step00000650/     a draft: the save is still running or was killed; drafts are
                                  removed when the run starts again
    damaged-000011-step00000550/  a checkpoint that failed verification; kept until newer good
                                  checkpoints have replaced it

Renaming a draft commits the checkpoint, so there is no separate record that could contradict the
folder. The leading number orders the checkpoints, even after a rollback to an earlier step.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.manifest import FILE_NAME, Manifest
from holdfast.checkpoint.newest import newest_good, nothing_verifies, paths_in
from holdfast.checkpoint.read_errors import DAMAGED
from holdfast.checkpoint.verify import verify
from holdfast.core.durable import rename_directory, write_file
from holdfast.core.errors import CheckpointError
from holdfast.core.files import remove

_NAME = re.compile(r"(\d{6,})-step(\d{8,})")
_TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A checkpoint whose name shows that it is complete. Its files have not been read yet."""

    path: Path
    # Number of the save. A newer checkpoint has a larger number.
    save_id: int
    global_step: int

    def verify(self) -> Manifest:
        """Verify every byte and return the manifest (see `holdfast.checkpoint.verify.verify`)."""
        return verify(self.path)


class Store:
    """The checkpoints of a run. The first save creates the folder in which they are stored.

    Args:
        directory: The folder.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def entries(self) -> list[Entry]:
        """Return all complete checkpoints, newest first."""
        return self._entries_with(prefix="")

    def damaged(self) -> list[Entry]:
        """Return the checkpoints that failed verification and were moved aside, newest first."""
        return self._entries_with(prefix=DAMAGED)

    def _entries_with(self, prefix: str) -> list[Entry]:
        entries = []
        for path in paths_in(self.directory):
            if not path.name.startswith(prefix):
                continue
            match = _NAME.fullmatch(path.name.removeprefix(prefix))
            if match:
                save_id = int(match[1])
                global_step = int(match[2])
                entries.append(Entry(path=path, save_id=save_id, global_step=global_step))
        return sorted(entries, key=lambda entry: entry.save_id, reverse=True)

    def newest_good(
        self,
        on_damaged: Callable[[Path, str], None] | None = None,
        *,
        before_step: int | None = None,
    ) -> Entry | None:
        """Return the newest checkpoint that passes verification, or None if there is none.

        Args:
            on_damaged: Called for each damaged checkpoint with its original path and the reason,
                after the checkpoint has been moved aside. With None, nothing is moved.
            before_step: If given, only checkpoints up to and including this step are considered,
                and None is returned if none of them passes verification.

        Raises:
            HoldfastError: See `holdfast.checkpoint.newest.newest_good`.
        """
        entries = {entry.path: entry for entry in self.entries()}
        if before_step is not None:
            entries = {
                path: entry for path, entry in entries.items() if entry.global_step <= before_step
            }
        elif not entries:
            self._check_none_were_moved_aside()
        try:
            path = newest_good(entries, on_damaged, complete=True, renames=on_damaged is not None)
        except CheckpointError:
            if before_step is None:
                raise
            return None
        return None if path is None else entries[path]

    def _check_none_were_moved_aside(self) -> None:
        damaged = self.damaged()
        if damaged:
            raise nothing_verifies(self.directory, len(damaged), "all are already marked damaged")

    def next_save_id(self) -> int:
        """Return a save number that is larger than the numbers of all existing checkpoints."""
        used = [entry.save_id for entry in self.entries() + self.damaged()]
        return max(used, default=0) + 1

    def begin(
        self, global_step: int, *, needed_bytes: int = 0, save_id: int | None = None
    ) -> tuple[Path, int]:
        """Create an empty draft for a save, and return the draft's path and the save's number.

        Args:
            global_step: Number of optimizer steps in the state to save.
            needed_bytes: Disk space that the checkpoint needs.
            save_id: Number of the save. With None, it is larger than all existing numbers. A
                checkpoint that is fetched from a mirror keeps its number.

        Raises:
            OSError: The disk has less free space than needed, or the folder cannot be created.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.directory).free
        if free < needed_bytes:
            raise OSError(
                f"No space left on device: the checkpoint needs {needed_bytes:,} bytes, but only"
                f" {free:,} are free"
            )
        if save_id is None:
            save_id = self.next_save_id()
        draft = self.directory / f"{_TEMPORARY}{save_id:06d}-step{global_step:08d}"
        remove(draft)
        draft.mkdir(parents=True)
        return draft, save_id

    def commit(self, draft: Path, manifest: Manifest) -> Entry:
        """Write the manifest and rename the draft to its final name.

        The files of the draft must already have been flushed to disk.

        Raises:
            OSError: The disk is full or fails. In this case, the draft keeps its temporary name.
        """
        write_file(draft / FILE_NAME, manifest.to_bytes())
        return Entry(
            path=self.publish(draft),
            save_id=manifest.save_id,
            global_step=manifest.global_step,
        )

    def publish(self, draft: Path) -> Path:
        """Rename a draft that contains its manifest to its final name, and return the new path.

        Raises:
            OSError: The disk fails, or a checkpoint of this name exists.
        """
        final = draft.with_name(draft.name.removeprefix(_TEMPORARY))
        rename_directory(draft, final)
        return final

    def clean_up(self) -> None:
        """Remove the drafts left behind by killed saves.

        Only the process that holds the run directory's lock may call this method.
        """
        for path in paths_in(self.directory):
            if path.name.startswith(_TEMPORARY):
                remove(path)

    def prune(
        self, keep: int, *, known_good: Entry | None = None, in_use: Collection[Path] = ()
    ) -> list[Path]:
        """Delete all but the newest checkpoints, but never delete the last good checkpoint.

        Args:
            keep: Number of checkpoints to keep. More are kept if none of the newest ones passes
                verification.
            known_good: A checkpoint that has just been verified. With None, checkpoints are
                verified, newest first, until a good one is found.
            in_use: Checkpoints that another thread is reading. They are left for the next call.

        Returns:
            The paths of the deleted checkpoints.

        Raises:
            RunDirectoryError: H307 if a checkpoint is temporarily unreadable. In this case, nothing
                is deleted.
        """
        entries = self.entries()
        # If the same step was saved again, for example after a change between two steps, the later
        # checkpoint replaces the earlier one and does not count as an additional checkpoint.
        replaced = _replaced_by(known_good, entries)
        entries = [entry for entry in entries if entry not in replaced]
        keep = max(keep, 1)
        if known_good not in entries[:keep]:
            while keep < len(entries) and not any(_verifies(entry) for entry in entries[:keep]):
                keep += 1
        surplus = entries[keep:] + replaced
        # Damaged checkpoints are deleted once all checkpoints that are kept are newer.
        if len(entries) >= keep:
            oldest_kept = entries[keep - 1].save_id
            surplus += [entry for entry in self.damaged() if entry.save_id < oldest_kept]
        surplus = [entry for entry in surplus if entry.path not in in_use]
        for entry in surplus:
            _delete(entry)
        return [entry.path for entry in surplus]


def latest(run_dir: str | os.PathLike[str]) -> Entry | None:
    """Return the checkpoint from which a new `Guard` would resume, or None if there is none.

    Use the checkpoint's ``global_step`` and ``path`` for decisions that a script makes before it
    builds its model and optimizer. For example, parameter groups that were added during training
    must be added again before a resume. This function verifies every byte of the checkpoint and
    changes nothing on disk.

    Raises:
        HoldfastError: H312, H307 or H303, in the same cases as `Guard`.
    """
    return Store(Path(run_dir).expanduser() / "checkpoints").newest_good()


def _replaced_by(newer: Entry | None, entries: Sequence[Entry]) -> list[Entry]:
    """Return the checkpoints that are older than `newer` but were saved after the same step."""
    if newer is None or newer not in entries:
        return []
    return [
        entry
        for entry in entries
        if entry.save_id < newer.save_id and entry.global_step == newer.global_step
    ]


def _delete(entry: Entry) -> None:
    # The folder is renamed first, so that a partly deleted checkpoint never looks complete.
    doomed = entry.path.with_name(f"{_TEMPORARY}doomed-{entry.path.name}")
    entry.path.rename(doomed)
    remove(doomed)


def _verifies(entry: Entry) -> bool:
    try:
        entry.verify()
    except CheckpointError:
        return False
    return True
