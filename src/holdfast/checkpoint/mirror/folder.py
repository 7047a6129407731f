"""`MirrorFolder`: the owners of a mirror and its copies of checkpoints.

    owners/000004-1f2e3d4c.json
    checkpoints/000004-1f2e3d4c-000012-step00000600-9f3a2b1c4d5e/model.safetensors
                                                                 manifest.json

An owner is a process that copies to the mirror. The name of its file is its number, which is larger
than those of all earlier owners, and a random token. The name of a copy consists of its owner, the
number of the save, the step, and the identity of the checkpoint (see ``lineage``).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.manifest import FILE_NAME, Extents, read_manifest
from holdfast.checkpoint.mirror.lineage import identity_of
from holdfast.checkpoint.mirror.location import Location
from holdfast.checkpoint.store import Entry, Store
from holdfast.checkpoint.verify import digest, verify
from holdfast.core.durable import fsync_path, write_file
from holdfast.core.files import read_file, remove

_FORMAT = 1
_OWNERS = "owners"
_COPIES = "checkpoints"
_OWNER_FILE = re.compile(r"(\d{6,})-([0-9a-f]{8})\.json")
_COPY_FOLDER = re.compile(r"(\d{6,})-([0-9a-f]{8})-(\d{6,})-step(\d{8,})-([0-9a-f]{12})")
_TOKEN_BYTES = 4
# Disk space that a checkpoint needs in addition to its files.
_SPARE_BYTES = 2**20


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """An owner of a mirror. The owner with the largest number is the current one.

    If two processes take over at the same moment, they get the same number, and the token decides.
    """

    number: int
    token: str

    def __str__(self) -> str:
        return f"{self.number:06d}-{self.token}"


@dataclass(frozen=True, slots=True, order=True)
class Copy:
    """A copy of a checkpoint. Copies are ordered by age, so the largest one is the newest."""

    owner: Owner
    save_id: int
    global_step: int
    # Identity of the checkpoint; see `lineage.identity_of`.
    identity: str

    @property
    def checkpoint(self) -> str:
        """Return the name of the checkpoint in a run directory."""
        return f"{self.save_id:06d}-step{self.global_step:08d}"

    @property
    def folder(self) -> str:
        """Return the folder of the copy in the mirror."""
        return f"{_COPIES}/{self.owner}-{self.checkpoint}-{self.identity}"


class WrongBytesError(Exception):
    """A file in the mirror has other bytes than the manifest of its checkpoint expects."""


class MirrorFolder:
    """The owners and the copies in a mirror.

    Every method may raise any exception of the store's library.

    Args:
        location: The folder of the mirror.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        # The number of parts of files that were copied so far. It shows that copying progresses.
        self.parts_copied = 0

    # --- owners

    def owners(self) -> list[Owner]:
        """Return the owners whose files exist. The largest one is the current owner."""
        matches = map(_OWNER_FILE.fullmatch, self.location.list_names(_OWNERS))
        return [Owner(int(match[1]), match[2]) for match in matches if match]

    def add_owner(self, run_id: str) -> Owner:
        """Make this process the owner of the mirror, and return it.

        This also shows that the process may delete files, which it has to do later.

        Args:
            run_id: The id of the run that the mirror belongs to from now on.
        """
        earlier = self.owners()
        # Copies may outlive the files of their owners.
        known = [*earlier, *(copy.owner for copy in self._begun_copies())]
        number = max((owner.number for owner in known), default=0) + 1
        owner = Owner(number, secrets.token_hex(_TOKEN_BYTES))
        probe = f"{_OWNERS}/probe-{owner.token}"
        self.location.write(probe, b"may this process write and delete?")
        self.location.remove_file(probe)
        self.renew(owner, run_id)
        # The file of the new owner exists by now, so the mirror always has an owner.
        for former in earlier:
            self.location.remove_file(_file_of(former))
        return owner

    def renew(self, owner: Owner, run_id: str) -> None:
        """Write the file of an owner, which may have been deleted with the whole mirror."""
        facts = {
            "format": _FORMAT,
            "run": run_id,
            "process": f"process {os.getpid()} on {socket.gethostname()}",
        }
        self.location.write(_file_of(owner), json.dumps(facts).encode())

    def run_id(self) -> str | None:
        """Return the id of the run that the mirror belongs to, or None if it is unknown.

        A process that was killed while it took the mirror over may have left an incomplete file. In
        this case, the file of the previous owner still exists.
        """
        for owner in sorted(self.owners(), reverse=True):
            run_id = self._fact(owner, "run")
            if run_id is not None:
                return run_id
        return None

    def process_of(self, owner: Owner) -> str:
        """Return the process that became the owner, such as ``"process 4711 on node3"``."""
        return self._fact(owner, "process") or "another process"

    def _fact(self, owner: Owner, name: str) -> str | None:
        """Return a fact in the file of an owner, or None if the file is missing or damaged."""
        try:
            facts = json.loads(self.location.read(_file_of(owner)))
        except (FileNotFoundError, ValueError):
            return None
        fact = facts.get(name) if isinstance(facts, dict) else None
        return fact if isinstance(fact, str) else None

    # --- copies

    def copies(self) -> list[Copy]:
        """Return the complete copies, newest first."""
        return [copy for copy in self._begun_copies() if self._is_complete(copy)]

    def _begun_copies(self) -> list[Copy]:
        """Return all copies, newest first, whether or not they are complete."""
        matches = map(_COPY_FOLDER.fullmatch, self.location.list_names(_COPIES))
        copies = [
            Copy(Owner(int(match[1]), match[2]), int(match[3]), int(match[4]), match[5])
            for match in matches
            if match
        ]
        return sorted(copies, reverse=True)

    def _is_complete(self, copy: Copy) -> bool:
        return FILE_NAME in self.location.list_names(copy.folder)

    def upload(self, entry: Entry, copy: Copy, before_commit: Callable[[], None]) -> int:
        """Copy a checkpoint to the mirror, and read back what was written.

        Args:
            entry: The checkpoint.
            copy: The copy to make.
            before_commit: Called when all files are copied. The manifest, which makes the copy
                complete, is written only if this function raises no error.

        Returns:
            The size of the files in bytes.

        Raises:
            WrongBytesError: The bytes in the mirror differ from those that the manifest expects.
        """
        manifest = read_manifest(entry.path)
        for name, extents in manifest.files.items():
            target = f"{copy.folder}/{name}"
            self.location.upload(entry.path / name, target, self._note_progress)
            self._check(target, extents)
        before_commit()
        contents = read_file(entry.path / FILE_NAME)
        self.location.write(f"{copy.folder}/{FILE_NAME}", contents)
        if self.location.read(f"{copy.folder}/{FILE_NAME}") != contents:
            raise WrongBytesError(f"{FILE_NAME} in the mirror has unexpected contents")
        return manifest.size_bytes()

    def _check(self, name: str, extents: Extents) -> None:
        expected_bytes = max((extent.end for extent in extents.values()), default=0)
        if self.location.size_bytes(name) != expected_bytes:
            raise WrongBytesError(
                f"{name} does not have the {expected_bytes:,} bytes that were written"
            )
        with self.location.open_to_read(name) as file:
            # Extents are read in the order in which they are stored.
            for key, extent in sorted(extents.items(), key=lambda item: item[1].begin):
                if digest(file, extent.begin, extent.end) != extent.sha256:
                    raise WrongBytesError(f"{key} in {name} differs from what was written")
                self._note_progress()

    def _note_progress(self) -> None:
        self.parts_copied += 1

    def download(self, copy: Copy, store: Store) -> tuple[Entry, int]:
        """Fetch a copy into a run directory, and return the checkpoint and its size in bytes.

        Raises:
            WrongBytesError: The manifest is not that of the copy.
            CheckpointError: H311 if the bytes do not match the manifest.
            OSError: The disk is full or fails, among other reasons.
        """
        contents = self.location.read(f"{copy.folder}/{FILE_NAME}")
        if identity_of(contents) != copy.identity:
            raise WrongBytesError(f"{FILE_NAME} in the mirror has unexpected contents")
        draft, _ = store.begin(copy.global_step, save_id=copy.save_id)
        try:
            write_file(draft / FILE_NAME, contents)
            manifest = read_manifest(draft)
            _check_space(draft, manifest.size_bytes())
            for name in manifest.files:
                target = draft / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self.location.download(f"{copy.folder}/{name}", target)
                fsync_path(target.parent)
            verify(draft)
            path = store.publish(draft)
        except BaseException:
            remove(draft)
            raise
        entry = Entry(path=path, save_id=copy.save_id, global_step=copy.global_step)
        return entry, manifest.size_bytes()

    def prune(self, keep: int, owner: Owner) -> list[str]:
        """Delete all but the newest copies, and what unfinished uploads have left behind.

        Args:
            keep: The number of copies to keep.
            owner: This process. Files of newer owners are not touched.

        Returns:
            The names of the deleted checkpoints.
        """
        begun = [copy for copy in self._begun_copies() if copy.owner <= owner]
        complete = [copy for copy in begun if self._is_complete(copy)]
        surplus = complete[keep:]
        for copy in begun:
            if copy in complete[:keep]:
                continue
            # Without its manifest, a copy that is only partly deleted does not count as complete.
            self.location.remove_file(f"{copy.folder}/{FILE_NAME}")
            self.location.remove_folder(copy.folder)
        return [copy.checkpoint for copy in surplus]


def _file_of(owner: Owner) -> str:
    return f"{_OWNERS}/{owner}.json"


def _check_space(draft: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(draft).free
    if free < needed_bytes + _SPARE_BYTES:
        raise OSError(
            f"No space left on device: the checkpoint needs {needed_bytes:,} bytes, but only"
            f" {free:,} are free"
        )
