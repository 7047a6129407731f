"""The manifest of a checkpoint: what must lie in each file, to the last byte. No torch.

Two lines: one JSON object, and the SHA-256 of that line. It is written last, so a directory without a manifest
that verifies is no checkpoint. Tensor files are in the safetensors format: 8 bytes of length, a JSON header, the
tensors without gaps; the digests of the header and of each tensor together cover every byte.
"""

from __future__ import annotations

import errno
import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holdfast.core.errors import CheckpointError, RunDirectoryError

FILE_NAME = "manifest.json"
FORMAT = 1
_CHUNK_BYTES = 4 * 2**20
# What says nothing about the bytes: too little of the machine, missing rights, a network disk that is away. Not so an
# input/output error, which a disk reports for what it has lost.
_PASSING = {
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EACCES, errno.EPERM,
    errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A range of bytes of a file, with what it must hold.

    Args:
        begin: First byte.
        end: One after the last byte.
        sha256: Hexadecimal digest of the bytes.
        dtype: For a tensor, its type as safetensors spells it.
        shape: For a tensor, its shape.
    """

    begin: int
    end: int
    sha256: str
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that a checkpoint must hold.

    Args:
        save_id: Number of the save in this run directory; larger is newer.
        global_step: Optimizer steps committed.
        unix_seconds: When it was written.
        files: By file name, its extents by name; they cover the file without gaps.
        written_by: Version of holdfast.
        format: Version of this layout.
    """

    save_id: int
    global_step: int
    unix_seconds: float
    files: dict[str, dict[str, Extent]] = field(default_factory=dict)
    written_by: str = ""
    format: int = FORMAT

    def size_bytes(self) -> int:
        """Return the bytes in all files but the manifest."""
        return sum(extent.end - extent.begin for extents in self.files.values() for extent in extents.values())

    def to_bytes(self) -> bytes:
        """Return the file: one line of JSON and the line of its digest."""
        body = json.dumps(asdict(self), separators=(",", ":")).encode()
        return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def read_manifest(directory: Path) -> Manifest:
    """Read and verify the manifest of a checkpoint directory.

    Raises:
        CheckpointError: H311, if it is missing or damaged.
        RunDirectoryError: H303, if a newer holdfast wrote it, H307, if the system does not let it be read.
    """
    try:
        data = (directory / FILE_NAME).read_bytes()
    except FileNotFoundError as error:
        raise damaged(directory, f"{FILE_NAME} is missing, so the save was not finished") from error
    except OSError as error:
        raise _why_not_read(directory, FILE_NAME, error) from error
    body, _, rest = data.partition(b"\n")
    if rest != hashlib.sha256(body).hexdigest().encode() + b"\n":
        raise damaged(directory, f"{FILE_NAME} does not match its own digest")
    tree: dict[str, Any] = json.loads(body)
    if tree["format"] > FORMAT:
        raise RunDirectoryError(
            f"{directory} was written by holdfast {tree.get('written_by')} in format {tree['format']}",
            limit=f"this holdfast reads formats up to {FORMAT}",
            fix="upgrade holdfast, or start in a new run directory.",
            rule="H303",
        )
    files = {
        name: {key: Extent(**{**extent, "shape": tuple(extent["shape"])}) for key, extent in extents.items()}
        for name, extents in tree["files"].items()
    }
    return Manifest(**{**tree, "files": files})


def verify_files(directory: Path, manifest: Manifest) -> None:
    """Check every byte of every file against the manifest.

    Raises:
        CheckpointError: H311, naming the file, the tensor and both digests.
        RunDirectoryError: H307, if the system does not let a file be read.
    """
    for name, extents in manifest.files.items():
        verify_extents(directory / name, extents)


def verify_extents(path: Path, extents: dict[str, Extent]) -> None:
    """Check every byte of one file.

    Raises:
        CheckpointError: H311, also if there is no such file.
        RunDirectoryError: H307, if the system does not let it be read, which says nothing about its bytes.
    """
    try:
        size = path.stat().st_size
        expected = max((extent.end for extent in extents.values()), default=0)
        if size != expected:
            raise damaged(path.parent, f"{path.name} has {size} bytes and the manifest says {expected}")
        with path.open("rb") as file:
            for name, extent in sorted(extents.items(), key=lambda item: item[1].begin):
                found = _digest(file, extent)
                if found != extent.sha256:
                    raise damaged(
                        path.parent,
                        f"{path.name}: {name} has sha256 {found[:12]}... on disk "
                        f"and {extent.sha256[:12]}... in the manifest",
                    )
    except OSError as error:
        raise _why_not_read(path.parent, path.name, error) from error


def _digest(file: Any, extent: Extent) -> str:
    file.seek(extent.begin)
    digest = hashlib.sha256()
    left = extent.end - extent.begin
    while left:
        chunk = file.read(min(left, _CHUNK_BYTES))
        if not chunk:
            break
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest()


def damaged(directory: Path, why: str) -> CheckpointError:
    """Return the error that says what is wrong with a checkpoint directory."""
    return CheckpointError(
        f"checkpoint {directory.name}: {why}",
        limit="a checkpoint is loaded only if every byte verifies",
        fix="nothing to do if an older checkpoint verifies (`holdfast checkpoints RUN_DIR --verify` tells); "
        "else copy it again from where it came.",
        rule="H311",
    )


def _why_not_read(directory: Path, name: str, error: OSError) -> CheckpointError | RunDirectoryError:
    if error.errno in _PASSING:
        return unreadable(directory, error)
    return damaged(directory, f"{name} cannot be read ({error})")


def unreadable(directory: Path, error: OSError) -> RunDirectoryError:
    """Return the error for a checkpoint that may well be whole, but cannot be read now."""
    aside = directory.with_name(f"damaged-{directory.name}")
    return RunDirectoryError(
        f"checkpoint {directory.name} cannot be read now ({error})",
        limit="that says nothing about its bytes, and going on from an older one would lose work: nothing was "
        "changed on the disk",
        fix="start again when it can be read (open files, rights, the disk). If it never can be again, "
        f"`mv {directory} {aside}` lets the run go on from the one before.",
        rule="H307",
    )
