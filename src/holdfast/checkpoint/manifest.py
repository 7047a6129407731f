"""The manifest of a checkpoint, which describes every byte of every file. No torch.

It is two lines: one JSON object, and the SHA-256 of that line. It is written last, so a checkpoint
whose manifest verifies is complete. If the checkpoint is a folder, the manifest is inside; if it is
a file, the manifest is beside it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holdfast.checkpoint.read_errors import MALFORMED, damaged, describe, unreadable
from holdfast.core.errors import RunDirectoryError
from holdfast.core.files import read_file
from holdfast.core.version import __version__

FILE_NAME = "manifest.json"
FORMAT = 1
# The name of the bytes before the first tensor, among the extents of a safetensors file.
HEADER = "header of the file"
# In the year 3058. A later time can only be damage.
_LATEST_UNIX_SECONDS = 2**35
_NUMBERS_BELOW = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The bytes of a file from `begin` to before `end`, and their digest."""

    begin: int
    end: int
    sha256: str
    # Dtype of the tensor; empty for other bytes.
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def size_bytes(self) -> int:
        """Return the number of bytes."""
        return self.end - self.begin


Extents = Mapping[str, Extent]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything that a checkpoint must hold."""

    # Of two saves in a run directory, the one with the larger number is newer.
    save_id: int
    global_step: int
    unix_seconds: float
    # The extents of each file by name. They cover the file without gaps.
    files: dict[str, dict[str, Extent]] = field(default_factory=dict)
    written_by: str = __version__
    format: int = FORMAT

    def size_bytes(self) -> int:
        """Return the bytes in all files but the manifest."""
        return sum(
            extent.size_bytes() for extents in self.files.values() for extent in extents.values()
        )

    def to_bytes(self) -> bytes:
        """Return the file: one line of JSON and the line of its digest."""
        body = json.dumps(asdict(self), separators=(",", ":")).encode()
        return body + b"\n" + _digest_line(body)


def _digest_line(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode() + b"\n"


def manifest_of(checkpoint: Path) -> Path:
    """Return the path of an existing checkpoint's manifest: inside a folder, beside a file."""
    if checkpoint.is_file():
        return manifest_beside(checkpoint)
    return checkpoint / FILE_NAME


def manifest_beside(file: Path) -> Path:
    """Return the path of the manifest of a checkpoint that is a file."""
    return file.with_name(f"{file.name}.{FILE_NAME}")


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and verify the manifest of a checkpoint.

    Raises:
        CheckpointError: H311 if it is missing or damaged.
        RunDirectoryError: H303 if a newer holdfast wrote it, H307 if it cannot be read now.
    """
    try:
        data = read_file(manifest_of(checkpoint))
    except FileNotFoundError as error:
        raise damaged(
            checkpoint, f"{FILE_NAME} is missing, so the save was not finished"
        ) from error
    except OSError as error:
        raise unreadable(checkpoint, error, FILE_NAME) from error
    body, _, digest_line = data.partition(b"\n")
    if digest_line != _digest_line(body):
        raise damaged(checkpoint, f"{FILE_NAME} does not match its own digest")
    try:
        tree: dict[str, Any] = json.loads(body)
        _check_format(checkpoint, tree)
        return _manifest_from(tree)
    except MALFORMED as error:
        why = f"{FILE_NAME} is not what holdfast writes ({describe(error)})"
        raise damaged(checkpoint, why) from error


def _check_format(checkpoint: Path, tree: Mapping[str, Any]) -> None:
    version = tree["format"]
    if type(version) is int and version > FORMAT:
        raise RunDirectoryError(
            f"{checkpoint} was written by holdfast {tree.get('written_by')!s:.40} in format"
            f" {version}",
            limit=f"this holdfast reads formats up to {FORMAT}",
            fix="upgrade holdfast, or start in a new run directory.",
            rule="H303",
        )


def _manifest_from(tree: Mapping[str, Any]) -> Manifest:
    """Check a JSON object, and return it as a manifest: a digest does not prove who wrote it.

    Raises:
        ValueError and the others in `MALFORMED`: It is not a manifest.
    """
    files = {
        name: {key: _extent_from(extent) for key, extent in extents.items()}
        for name, extents in tree["files"].items()
    }
    manifest = Manifest(**{**tree, "files": files})
    for name, extents in files.items():
        _check_file(name, extents.values())
    for number in (manifest.format, manifest.save_id, manifest.global_step):
        _check_number(number)
    if not isinstance(manifest.written_by, str):
        raise TypeError("written_by is not a string")
    if not 0 <= manifest.unix_seconds < _LATEST_UNIX_SECONDS:
        raise ValueError("unix_seconds is out of range")
    return manifest


def _extent_from(tree: Mapping[str, Any]) -> Extent:
    extent = Extent(**{**tree, "shape": tuple(tree["shape"])})
    for number in (extent.begin, extent.end, *extent.shape):
        _check_number(number)
    if extent.end < extent.begin:
        raise ValueError("an extent ends before it begins")
    if not (isinstance(extent.sha256, str) and isinstance(extent.dtype, str)):
        raise TypeError("the digest or dtype of an extent is not a string")
    return extent


def _check_number(number: Any) -> None:
    if type(number) is not int or not 0 <= number < _NUMBERS_BELOW:
        raise ValueError(f"invalid number {number!r:.40}")


def _check_file(name: str, extents: Iterable[Extent]) -> None:
    """Raise ValueError unless a name stays inside the checkpoint and its extents have no gaps."""
    if "\0" in name or {"", ".."} & set(name.split("/")):
        raise ValueError(f"invalid file name {name[:80]!r}")
    position = 0
    for extent in sorted(extents, key=lambda extent: (extent.begin, extent.end)):
        if extent.begin != position:
            raise ValueError(f"the extents of {name[:80]!r} overlap or leave a gap")
        position = extent.end
