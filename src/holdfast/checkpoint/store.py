"""The checkpoints of a run as folders in one folder: commit, list, find the newest good one, prune.

No torch.

    000012-step00000600/          complete: it was renamed to this name after all was verified and
                                  flushed
    .tmp-000013-step00000650/     a save under way, or one that was killed; removed at the next
                                  start
    damaged-000011-step00000550/  did not verify; kept until newer good ones have replaced it

The rename is the commit: there is no separate pointer that could disagree. The number in front
orders them, also after a rollback to a smaller step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.newest import DAMAGED, newest_good, nothing_verifies, paths_in
from holdfast.checkpoint.seal import FILE_NAME, Manifest, verify
from holdfast.core.durable import free_bytes, rename_directory, write_file
from holdfast.core.errors import CheckpointError
from holdfast.core.files import remove

_NAME = re.compile(r"(\d{6,})-step(\d{8,})")
_TEMPORARY = ".tmp-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A complete checkpoint, by its name (a larger `save_id` is newer); nothing is read yet."""

    path: Path
    save_id: int
    global_step: int

    def verify(self) -> Manifest:
        """Check every byte and return the manifest; see `holdfast.checkpoint.seal.verify`."""
        return verify(self.path)


class Store:
    """The checkpoints of one run directory, in a folder that is made at the first save."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def entries(self) -> list[Entry]:
        """Return the complete checkpoints, newest first."""
        return self._found("")

    def damaged(self) -> list[Entry]:
        """Return those that were moved aside, newest first."""
        return self._found(DAMAGED)

    def _found(self, prefix: str) -> list[Entry]:
        found = []
        for path in paths_in(self.directory):
            match = _NAME.fullmatch(path.name.removeprefix(prefix))
            if match and path.name.startswith(prefix):
                found.append(Entry(path=path, save_id=int(match[1]), global_step=int(match[2])))
        return sorted(found, key=lambda entry: entry.save_id, reverse=True)

    def newest_good(
        self,
        on_damaged: Callable[[Path, str], None] | None = None,
        *,
        before_step: int | None = None,
    ) -> Entry | None:
        """Return the newest checkpoint that verifies, of at most `before_step` steps.

        Errors as `newest_good`.

        `on_damaged` is called with the path of each damaged one, as it was, and what is wrong;
        None: nothing is moved.
        """

        def refused(path: Path, why: str) -> None:
            if on_damaged is not None:
                on_damaged(path, why)

        entries = {each.path: each for each in self.entries()}
        if before_step is not None:
            entries = {
                path: each for path, each in entries.items() if each.global_step <= before_step
            }
        elif not entries and (lost := self.damaged()):
            raise nothing_verifies(self.directory, len(lost), "they were moved aside before")
        try:
            good = newest_good(entries, refused, complete=True, renames=on_damaged is not None)
        except CheckpointError:
            if before_step is None:
                raise
            return None
        return None if good is None else entries[good]

    def next_save_id(self) -> int:
        """Return a number above all that were used."""
        return max((entry.save_id for entry in self.entries() + self.damaged()), default=0) + 1

    def begin(self, global_step: int, *, needed_bytes: int = 0) -> tuple[Path, int]:
        """Make an empty folder for a save, and return it with its number.

        OSError without so many free bytes.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        if (free := free_bytes(self.directory)) < needed_bytes:
            raise OSError(
                f"No space left on device: the checkpoint needs {needed_bytes} bytes and {free} are"
                " free"
            )
        save_id = self.next_save_id()
        draft = self.directory / f"{_TEMPORARY}{save_id:06d}-step{global_step:08d}"
        remove(draft)
        draft.mkdir(parents=True)
        return draft, save_id

    def commit(self, draft: Path, manifest: Manifest) -> Entry:
        """Write the manifest and rename the draft, whose files are flushed, to its final name.

        OSError if the disk refuses; the draft is then still a draft.
        """
        write_file(draft / FILE_NAME, manifest.to_bytes())
        final = draft.with_name(draft.name.removeprefix(_TEMPORARY))
        rename_directory(draft, final)
        return Entry(path=final, save_id=manifest.save_id, global_step=manifest.global_step)

    def clean_up(self) -> None:
        """Remove what killed saves left behind. Only for the holder of the run directory's lock."""
        for path in paths_in(self.directory):
            if path.name.startswith(_TEMPORARY):
                remove(path)

    def prune(self, keep: int, *, known_good: Entry | None = None) -> list[Path]:
        """Delete all but the newest `keep` checkpoints, never the last good one, and return what
        was deleted.

        Without one that is `known_good`, verified just now, the kept ones are verified until one is
        good, and more are kept if none is; H307 if one cannot be read, and nothing is deleted then.
        """
        entries = self.entries()
        # What was changed without a step is saved again; that must not take the place of older
        # steps.
        replaced = [
            each for each in entries if known_good in entries and _is_replaced_by(known_good, each)
        ]
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
            # First the name: a half-deleted folder must not look complete
            entry.path.rename(doomed)
            remove(doomed)
        return [entry.path for entry in surplus]


def latest(run_dir: str | os.PathLike[str]) -> Entry | None:
    """Return the newest checkpoint of a run that verifies, which a `Guard` made now would go on
    from, or None.

    It has ``global_step`` and ``path``, for what a script must know before, such as groups of
    parameters that were added on the way. Every byte is read, nothing is changed. Raises what
    `Guard` would: H312, H307, H303.
    """
    return Store(Path(run_dir).expanduser() / "checkpoints").newest_good()


def _is_replaced_by(newer: Entry | None, entry: Entry) -> bool:
    return (
        newer is not None
        and entry.save_id < newer.save_id
        and entry.global_step == newer.global_step
    )


def _verifies(entry: Entry) -> bool:
    try:
        entry.verify()
    except CheckpointError:
        return False
    return True
