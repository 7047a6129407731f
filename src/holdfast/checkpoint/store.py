"""Checkpoints as directories in one folder: commit, list, verify, set aside, prune. No torch.

    000012-step00000600/           complete: it was renamed to this name after all was verified and flushed
    .tmp-000013-step00000650/      a save under way, or one that was killed; removed at the next start
    damaged-000011-step00000550/   did not verify; kept for a look until newer good ones have replaced it

The rename is the commit: there is no separate pointer that could disagree. The number in front orders them, also
after a rollback to a smaller step.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.manifest import FILE_NAME, Manifest, read_manifest, verify_files
from holdfast.core.durable import rename_directory, write_file
from holdfast.core.errors import CheckpointError

_NAME = re.compile(r"(\d{6,})-step(\d{8,})")
_TEMPORARY = ".tmp-"
_DAMAGED = "damaged-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A complete checkpoint, as its name tells; nothing is read yet.

    Args:
        path: Its directory.
        save_id: Larger is newer.
        global_step: Optimizer steps committed.
    """

    path: Path
    save_id: int
    global_step: int

    def verify(self) -> Manifest:
        """Check every byte and return the manifest.

        Raises:
            CheckpointError: H311.
            RunDirectoryError: H303, for a newer format, H307, if the system does not let it be read.

        Cost: reads the whole checkpoint; SHA-256 at about 1.5 GB/s.
        """
        manifest = read_manifest(self.path)
        verify_files(self.path, manifest)
        return manifest


class Store:
    """The checkpoints of one run directory.

    Args:
        directory: The folder; made at the first save.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def entries(self) -> list[Entry]:
        """Return the complete checkpoints, newest first."""
        return self._found("")

    def damaged(self) -> list[Entry]:
        """Return what was set aside, newest first."""
        return self._found(_DAMAGED)

    def _found(self, prefix: str) -> list[Entry]:
        found = []
        for path in paths_in(self.directory):
            match = _NAME.fullmatch(path.name.removeprefix(prefix))
            if match and path.name.startswith(prefix):
                found.append(Entry(path=path, save_id=int(match[1]), global_step=int(match[2])))
        return sorted(found, key=lambda entry: entry.save_id, reverse=True)

    def next_save_id(self) -> int:
        """Return a number above all that were used."""
        return max((entry.save_id for entry in self.entries() + self.damaged()), default=0) + 1

    def begin(self, global_step: int) -> tuple[Path, int]:
        """Make an empty directory for a save, and return it with its number."""
        save_id = self.next_save_id()
        draft = self.directory / f"{_TEMPORARY}{save_id:06d}-step{global_step:08d}"
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        return draft, save_id

    def commit(self, draft: Path, manifest: Manifest) -> Entry:
        """Write the manifest and rename the draft to its final name.

        The files that the manifest names must be flushed already.

        Raises:
            OSError: if the disk refuses; the draft is then still a draft.
        """
        write_file(draft / FILE_NAME, manifest.to_bytes())
        final = draft.with_name(draft.name.removeprefix(_TEMPORARY))
        rename_directory(draft, final)
        return Entry(path=final, save_id=manifest.save_id, global_step=manifest.global_step)

    def set_aside(self, entry: Entry) -> Path:
        """Rename a checkpoint that does not verify, so that it is not tried again, and return its new path."""
        target = entry.path.with_name(_DAMAGED + entry.path.name)
        if target.exists():
            shutil.rmtree(target)
        entry.path.rename(target)
        return target

    def clean_up(self) -> None:
        """Remove what killed saves left behind. Only for the holder of the run directory's lock."""
        for path in paths_in(self.directory):
            if path.name.startswith(_TEMPORARY):
                shutil.rmtree(path, ignore_errors=True)

    def prune(self, keep: int, *, known_good: Entry | None = None) -> list[Path]:
        """Delete all but the newest checkpoints, never the last good one.

        Args:
            keep: Checkpoints to keep, at least 1.
            known_good: One that was verified just now; else the kept ones are verified until one is good, and
                more are kept if none is.

        Returns:
            What was deleted.

        Raises:
            RunDirectoryError: H307, if one must be verified and cannot be read; nothing is deleted then.
        """
        entries = self.entries()
        # What was changed without a step is saved again; that must not take the place of older steps.
        replaced = [each for each in entries if known_good in entries and _is_replaced_by(known_good, each)]
        entries = [each for each in entries if each not in replaced]
        keep = max(keep, 1)
        if known_good not in entries[:keep]:
            while keep < len(entries) and not any(_verifies(entry) for entry in entries[:keep]):
                keep += 1
        kept, surplus = entries[:keep], entries[keep:] + replaced
        if len(kept) == keep:
            surplus += [entry for entry in self.damaged() if entry.save_id < kept[-1].save_id]
        for entry in surplus:
            doomed = entry.path.with_name(f"{_TEMPORARY}doomed-{entry.path.name}")
            entry.path.rename(doomed)  # first the name: a half-deleted directory must not look complete
            shutil.rmtree(doomed, ignore_errors=True)
        return [entry.path for entry in surplus]


def paths_in(directory: Path) -> list[Path]:
    """Return what lies in a folder of checkpoints; one that was never made is empty.

    Raises:
        CheckpointError: H312, for a folder that is there and cannot be read: a link to a disk that is not mounted, a
            file in its place, missing rights, a network disk that is away.
    """
    try:
        return list(directory.iterdir())
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not directory.is_symlink():
            return []
        raise CheckpointError(
            f"checkpoints in {directory} cannot be reached ({error.strerror or error})",
            limit="a new start without a word would hide their loss, and nothing could be saved",
            fix="mount the disk, or make it a folder that can be read; to begin anew on purpose, name another one.",
            rule="H312",
        ) from error


def _is_replaced_by(newer: Entry | None, entry: Entry) -> bool:
    return newer is not None and entry.save_id < newer.save_id and entry.global_step == newer.global_step


def _verifies(entry: Entry) -> bool:
    try:
        entry.verify()
    except CheckpointError:
        return False
    return True
