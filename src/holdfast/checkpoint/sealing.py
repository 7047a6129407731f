"""Digests for checkpoints that somebody else writes, such as a training framework. No torch.

A framework writes its files in place, in its own format. Before it does the folder is marked as unfinished. Sealing
flushes the files, reads them once and writes the manifest last, so that a folder with a manifest that verifies is a
whole one, and one with a mark and no manifest is what a killed save has left. What went wrong between the memory and
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
from holdfast.core.durable import fsync_path, replace_file
from holdfast.core.errors import CheckpointError
from holdfast.core.version import __version__

DAMAGED = "damaged-"
UNFINISHED = "holdfast_unfinished"
_CHUNK_BYTES = 4 * 2**20
_MOST_HEADER_BYTES = 100 * 10**6  # the safetensors format allows no more


def begin(directory: Path) -> None:
    """Mark a folder as unfinished, durably, before a framework writes into it; it is made if need be.

    Raises:
        OSError: if the disk refuses.
    """
    directory.mkdir(parents=True, exist_ok=True)
    mark = directory / UNFINISHED
    if is_sealed(directory):
        (directory / FILE_NAME).replace(mark)  # a mark that is not empty tells that there was a whole one
    else:
        mark.touch()
    for path in (mark, directory, directory.parent):
        fsync_path(path)


def is_unfinished(directory: Path) -> bool:
    """Return whether a save into a folder was begun and not sealed; an empty folder is what its first moment left."""
    if not directory.is_dir() or is_sealed(directory):
        return False
    return (directory / UNFINISHED).exists() or not any(directory.iterdir())


def unseal(directory: Path) -> None:
    """Remove the manifest, where files under it were written anew."""
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
    mark = directory / UNFINISHED
    paths = sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink() and path != mark)
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
    replace_file(directory / FILE_NAME, manifest.to_bytes())  # half of one would look like a damaged checkpoint
    for folder in {path.parent for path in paths} | {directory, directory.parent}:
        fsync_path(folder)
    mark.unlink(missing_ok=True)
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
        RunDirectoryError: H303, for a newer format, H307, if the system does not let it be read.
    """
    manifest = read_manifest(directory)
    verify_files(directory, manifest)
    return manifest


def is_sealed(directory: Path) -> bool:
    """Return whether there is a manifest; whether it verifies is another question."""
    return (directory / FILE_NAME).is_file()


def check(directory: Path) -> None:
    """Verify a checkpoint before it is loaded; one that a framework wrote without holdfast passes.

    Raises:
        CheckpointError: H311, also if the save was not finished.
        RunDirectoryError: H303, for a newer format, H307, if the system does not let it be read.
    """
    if is_sealed(directory) or is_unfinished(directory):
        verify(directory)


def _was_whole(directory: Path) -> bool:
    mark = directory / UNFINISHED
    return is_sealed(directory) or (mark.is_file() and mark.stat().st_size > 0)


def set_aside(directory: Path) -> Path:
    """Rename a checkpoint so that nobody resumes from it, and return its new path."""
    target = directory.with_name(DAMAGED + directory.name)
    if target.exists():
        shutil.rmtree(target)
    return directory.rename(target)


def newest_good(directories: Iterable[Path]) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Return the first checkpoint that can be trusted, and those before it that cannot, with the reason.

    A checkpoint without a manifest is an unfinished one if it is marked so, or if any other has a manifest. Where
    none was ever sealed the newest without a mark was written before holdfast came, and is taken as it is.

    Args:
        directories: Newest first.

    Returns:
        None and all of them, if none was ever whole: there is nothing to lose by a new start.

    Raises:
        CheckpointError: H312, if one was whole and none can be trusted.
        RunDirectoryError: H307, if the system does not let one be read.
    """
    candidates = list(directories)
    sealed = any(_was_whole(each) for each in candidates)
    refused: list[tuple[Path, str]] = []
    for each in candidates:
        if not sealed and not is_unfinished(each):
            return each, refused
        try:
            verify(each)
        except CheckpointError as error:
            refused.append((each, error.what))
            continue
        return each, refused
    if sealed:
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
