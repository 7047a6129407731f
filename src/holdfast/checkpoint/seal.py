"""Seal a checkpoint that a framework wrote, by adding a manifest with digests.

For holdfast's own checkpoints, digests are computed from the tensors in memory (see ``saver``). A
framework's checkpoint is sealed in two steps. Before the framework writes the checkpoint, its
folder is marked as unfinished. Afterwards, every file is flushed and read once to compute its
digest. Data that was corrupted on the way from memory to disk is therefore not detected.

This module does not import torch.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from holdfast.checkpoint.manifest import FILE_NAME, HEADER, Extent, Manifest, manifest_of
from holdfast.checkpoint.read_errors import MALFORMED
from holdfast.checkpoint.safetensors_header import tensor_places
from holdfast.checkpoint.verify import digest, verify
from holdfast.core.durable import fsync_path, replace_file
from holdfast.core.files import SHARED, open_to_read

# Name of the file that marks a folder's save as unfinished. The file contains the manifest of the
# folder's previous checkpoint, if there was one.
UNFINISHED = "holdfast_unfinished"


def is_sealed(checkpoint: Path) -> bool:
    """Return whether a checkpoint has a manifest. The manifest is not verified."""
    return manifest_of(checkpoint).is_file()


def is_unfinished(folder: Path) -> bool:
    """Return whether a folder contains a save that was started but never sealed.

    An empty folder counts as unfinished, because creating the folder is the first action of a save.
    """
    if not folder.is_dir() or is_sealed(folder):
        return False
    return (folder / UNFINISHED).exists() or not any(folder.iterdir())


def was_sealed(checkpoint: Path) -> bool:
    """Return whether a checkpoint was ever sealed, even if a later save has begun to replace it."""
    # A marker that is not empty contains the manifest of the sealed checkpoint.
    mark = checkpoint / UNFINISHED
    return is_sealed(checkpoint) or (mark.is_file() and mark.stat().st_size > 0)


def check(checkpoint: Path) -> None:
    """Verify a checkpoint before it is loaded, unless it was written without holdfast.

    Raises:
        HoldfastError: See `verify`.
    """
    if is_sealed(checkpoint) or is_unfinished(checkpoint):
        verify(checkpoint)


def begin(folder: Path) -> None:
    """Mark a folder as unfinished before a framework writes to it, and flush the marker to disk.

    The folder is created if it does not exist.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / UNFINISHED
    if is_sealed(folder):
        # Renaming the manifest to the marker records that the folder held a complete checkpoint.
        (folder / FILE_NAME).replace(mark)
    else:
        mark.touch()
    for path in (mark, folder, folder.parent):
        fsync_path(path)


def seal(checkpoint: Path, *, global_step: int, unix_seconds: float) -> None:
    """Flush every file of a checkpoint to disk, and write a manifest with the files' digests.

    The checkpoint may be a folder or a single file.

    Raises:
        OSError: The disk is full or fails. No manifest is written in this case.
    """
    manifest_path = manifest_of(checkpoint)
    manifest_path.unlink(missing_ok=True)
    paths = _files_of(checkpoint)
    files = {}
    for path in paths:
        fsync_path(path)
        files[path.relative_to(checkpoint).as_posix()] = _extents_of(path)
    # A framework's checkpoint has no save number, so its step takes the place of the number.
    manifest = Manifest(
        save_id=global_step, global_step=global_step, unix_seconds=unix_seconds, files=files
    )
    # The manifest is replaced atomically, because an incomplete one would look like damage.
    replace_file(manifest_path, manifest.to_bytes(), SHARED)
    folders = {path.parent for path in paths}
    for folder in folders | {manifest_path.parent, checkpoint.parent}:
        fsync_path(folder)
    if checkpoint.is_dir():
        (checkpoint / UNFINISHED).unlink(missing_ok=True)


def _files_of(checkpoint: Path) -> list[Path]:
    """Return the files to seal: all files except symbolic links and holdfast's marker file."""
    if checkpoint.is_file():
        candidates = [checkpoint]
    else:
        candidates = [path for path in checkpoint.rglob("*") if path != checkpoint / UNFINISHED]
    return sorted(path for path in candidates if path.is_file() and not path.is_symlink())


def _extents_of(path: Path) -> dict[str, Extent]:
    """Return a file's extents by name.

    A safetensors file has an extent for its header and one for each tensor. Any other file has a
    single extent.
    """
    if path.suffix == ".safetensors":
        # The file may not be a safetensors file despite its suffix.
        with contextlib.suppress(*MALFORMED):
            return _extents_of_tensors(path)
    size_bytes = path.stat().st_size
    with open_to_read(path) as file:
        return {"file": Extent(begin=0, end=size_bytes, sha256=digest(file, 0, size_bytes))}


def _extents_of_tensors(path: Path) -> dict[str, Extent]:
    header_bytes, places = tensor_places(path)
    with open_to_read(path) as file:
        extents = {HEADER: Extent(begin=0, end=header_bytes, sha256=digest(file, 0, header_bytes))}
        for place in places:
            extents[place.name] = Extent(
                begin=place.begin,
                end=place.end,
                sha256=digest(file, place.begin, place.end),
                dtype=place.dtype,
                shape=place.shape,
            )
    return extents
