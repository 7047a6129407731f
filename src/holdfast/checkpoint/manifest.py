"""The manifest of a checkpoint, whose digests cover every byte of every file.

The manifest has two lines: a JSON object, and the SHA-256 of the first line. It is written last, so
a checkpoint is complete if its manifest is valid. If the checkpoint is a folder, the manifest is in
this folder. If the checkpoint is a single file, the manifest is next to it.

This module does not import torch.
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
# In a safetensors file, the name of the extent that covers the bytes before the first tensor.
HEADER = "header of the file"
# A time in the year 3058. A later timestamp means that the manifest is damaged.
_LATEST_UNIX_SECONDS = 2**35
# All integers in a valid manifest are below this number.
_NUMBERS_BELOW = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The range ``[begin, end)`` of bytes in a file, and the digest of these bytes."""

    begin: int
    end: int
    sha256: str
    # Dtype of the tensor in this range. Empty if the range does not contain a tensor.
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def size_bytes(self) -> int:
        """Return the number of bytes in the range."""
        return self.end - self.begin


Extents = Mapping[str, Extent]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The files that a checkpoint must contain, and when the checkpoint was saved."""

    # Number of the save. The newest checkpoint in a run directory has the largest number.
    save_id: int
    global_step: int
    unix_seconds: float
    # The extents of each file, by file name and extent name. They cover all bytes of the file.
    files: dict[str, dict[str, Extent]] = field(default_factory=dict)
    written_by: str = __version__
    format: int = FORMAT

    def size_bytes(self) -> int:
        """Return the total size in bytes of all files except the manifest."""
        return sum(
            extent.size_bytes() for extents in self.files.values() for extent in extents.values()
        )

    def to_bytes(self) -> bytes:
        """Return the contents of the manifest file: a line of JSON and a line with its digest."""
        body = json.dumps(asdict(self), separators=(",", ":")).encode()
        return body + b"\n" + _digest_line(body)


def _digest_line(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest().encode() + b"\n"


def manifest_of(checkpoint: Path) -> Path:
    """Return the path of the manifest of an existing checkpoint, either a folder or a file."""
    if checkpoint.is_file():
        return manifest_beside(checkpoint)
    return checkpoint / FILE_NAME


def manifest_beside(file: Path) -> Path:
    """Return the path of the manifest of a single-file checkpoint, which is next to the file."""
    return file.with_name(f"{file.name}.{FILE_NAME}")


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and verify the manifest of a checkpoint.

    Raises:
        CheckpointError: H311 if the manifest is missing or damaged.
        RunDirectoryError: H303 if a newer holdfast wrote the manifest, H307 if it is temporarily
            unreadable.
    """
    try:
        data = read_file(manifest_of(checkpoint))
    except FileNotFoundError as error:
        raise damaged(checkpoint, f"{FILE_NAME} is missing, so the save did not finish") from error
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
        why = f"{FILE_NAME} was not written by holdfast ({describe(error)})"
        raise damaged(checkpoint, why) from error


def _check_format(checkpoint: Path, tree: Mapping[str, Any]) -> None:
    version = tree["format"]
    if type(version) is int and version > FORMAT:
        raise RunDirectoryError(
            f"{checkpoint} was written by holdfast {tree.get('written_by')!s:.40} in checkpoint"
            f" format {version}",
            limit=f"the installed holdfast reads formats up to {FORMAT}",
            fix="upgrade holdfast, or start in a new run directory.",
            rule="H303",
        )


def _manifest_from(tree: Mapping[str, Any]) -> Manifest:
    """Convert a JSON object to a manifest, checking every field.

    Raises:
        ValueError and the others in `MALFORMED`: The object is not a valid manifest, although its
            digest matches. Another program may have written it.
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
    """Check that a file name stays inside the checkpoint and that extents cover the whole file.

    Raises:
        ValueError: The name is invalid, or the extents overlap or leave a gap.
    """
    if "\0" in name or {"", ".."} & set(name.split("/")):
        raise ValueError(f"invalid file name {name[:80]!r}")
    position = 0
    for extent in sorted(extents, key=lambda extent: (extent.begin, extent.end)):
        if extent.begin != position:
            raise ValueError(f"the extents of {name[:80]!r} overlap or leave a gap")
        position = extent.end
