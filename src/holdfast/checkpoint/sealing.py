"""Digests for checkpoints that somebody else writes, such as a training framework. No torch.

A framework writes its files in place, in its own format. Sealing flushes them, reads them once and writes the
manifest last, so that a folder with a manifest that verifies is a whole one. What went wrong between the memory and
the disk before that is not seen: for this the writer itself must make the digests (see ``saver``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from holdfast.checkpoint.manifest import FILE_NAME, Extent, Manifest, read_manifest, verify_files
from holdfast.core.durable import fsync_path, write_file
from holdfast.core.errors import CheckpointError
from holdfast.core.version import __version__

DAMAGED = "damaged-"
_CHUNK_BYTES = 4 * 2**20
_MOST_HEADER_BYTES = 100 * 10**6  # the safetensors format allows no more


def unseal(directory: Path) -> None:
    """Remove the manifest, before files under it are written anew."""
    (directory / FILE_NAME).unlink(missing_ok=True)


def seal(directory: Path, *, global_step: int, unix_seconds: float) -> Manifest:
    """Flush every file below a directory, and write the digests of all of them.

    Args:
        directory: A checkpoint whose files are all written.
        global_step: Of its state.
        unix_seconds: Now.

    Raises:
        OSError: if the disk refuses. There is no manifest then.
    """
    unseal(directory)
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    files = {}
    for path in paths:
        fsync_path(path)
        files[path.relative_to(directory).as_posix()] = extents_of(path)
    manifest = Manifest(
        save_id=global_step,
        global_step=global_step,
        unix_seconds=unix_seconds,
        files=files,
        written_by=__version__,
    )
    write_file(directory / FILE_NAME, manifest.to_bytes())
    for folder in {path.parent for path in paths} | {directory, directory.parent}:
        fsync_path(folder)
    return manifest


def extents_of(path: Path) -> dict[str, Extent]:
    """Return the extents of a file: of safetensors one for each tensor, else one for all of it."""
    cuts: list[tuple[str, int, int, str, tuple[int, ...]]] = [("file", 0, path.stat().st_size, "", ())]
    if path.suffix == ".safetensors":
        with contextlib.suppress(ValueError, KeyError, struct.error):  # it is not what its name says
            cuts = list(_tensors(path))
    with path.open("rb") as file:
        found = {}
        for name, begin, end, dtype, shape in cuts:
            file.seek(begin)
            digest, left = hashlib.sha256(), end - begin
            while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
            found[name] = Extent(begin=begin, end=end, sha256=digest.hexdigest(), dtype=dtype, shape=shape)
    return found


def _tensors(path: Path) -> Iterator[tuple[str, int, int, str, tuple[int, ...]]]:
    """Yield name, begin, end, type and shape of each part of a safetensors file."""
    with path.open("rb") as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(min(length, _MOST_HEADER_BYTES)))
    start = 8 + length
    yield "header of the file", 0, start, "", ()
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            yield name, start + begin, start + end, about["dtype"], tuple(about["shape"])


def verify(directory: Path) -> Manifest:
    """Check every byte of a sealed checkpoint; files that were added later are not looked at.

    Raises:
        CheckpointError: H311, if a byte differs, a file is missing, or it was never sealed.
        RunDirectoryError: H303, for a newer format.
    """
    manifest = read_manifest(directory)
    verify_files(directory, manifest)
    return manifest


def is_sealed(directory: Path) -> bool:
    """Return whether there is a manifest; whether it verifies is another question."""
    return (directory / FILE_NAME).is_file()


def set_aside(directory: Path) -> Path:
    """Rename a checkpoint so that nobody resumes from it, and return its new path."""
    target = directory.with_name(DAMAGED + directory.name)
    if target.exists():
        shutil.rmtree(target)
    return directory.rename(target)


def newest_good(directories: Iterable[Path]) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the first checkpoint that can be trusted, and those before it that cannot, with the reason.

    A checkpoint without a manifest is an unfinished one if any other has one; a folder in which none has was written
    before holdfast came to it, and its newest is taken as it is.

    Args:
        directories: Newest first.

    Raises:
        CheckpointError: H312, if there are checkpoints and none can be trusted.
    """
    candidates = list(directories)
    refused: list[tuple[Path, str]] = []
    if candidates and not any(is_sealed(each) for each in candidates):
        return candidates[0], refused
    for each in candidates:
        try:
            verify(each)
        except CheckpointError as error:
            refused.append((each, error.what))
            continue
        return each, refused
    if refused:
        raise CheckpointError(
            f"none of the {len(refused)} checkpoint(s) in {refused[0][0].parent} verifies ({refused[0][1]})",
            limit="starting from scratch without a word would hide the loss",
            fix="bring back a copy of this directory, or move it away to start again.",
            rule="H312",
        )
    return None, refused


def remove_draft(directory: Path) -> None:
    """Remove what a save that failed has left behind."""
    with contextlib.suppress(OSError):
        shutil.rmtree(directory)
