"""The seal of a checkpoint: a manifest that says what must lie in each file, to the last byte.

No torch.

The manifest is two lines: one JSON object, and the SHA-256 of that line. It is written last, so a
checkpoint whose manifest verifies is a whole one. It lies inside a checkpoint that is a folder, and
beside one that is a file.

Our own checkpoints get their digests from memory (see ``saver``). What a framework writes in place
is sealed afterwards: its folder is marked as unfinished before, then every file is flushed and read
once. What went wrong between the memory and the disk is not seen there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.core.durable import fsync_path, replace_file
from holdfast.core.errors import CheckpointError, HoldfastError, RunDirectoryError
from holdfast.core.files import SHARED, opened, read_file
from holdfast.core.version import __version__

FILE_NAME = "manifest.json"
FORMAT = 1
HEADER = "header of the file"  # among the extents of a safetensors file
UNFINISHED = "holdfast_unfinished"
_CHUNK_BYTES = 4 * 2**20
_MOST_HEADER_BYTES = 100 * 10**6  # the safetensors format allows no more
# What says nothing about the bytes: too little of the machine, missing rights, a network disk that
# is away. Not so an input/output error, which a disk reports for what it has lost.
_LATEST = 2**35  # in Unix seconds: the year 3058
_ODD = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
    struct.error,
)
"""What JSON that somebody else has made raises where it is read."""
_PASSING = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.EAGAIN,
    errno.EINTR,
    errno.EACCES,
    errno.EPERM,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The bytes of a file from `begin` to before `end`, with their digest.

    Of a tensor also type and shape.
    """

    begin: int
    end: int
    sha256: str
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All that a checkpoint must hold.

    For each file its extents by name, which cover it without gaps.

    Of two saves in a run directory, the one with the larger `save_id` is newer.
    """

    save_id: int
    global_step: int
    unix_seconds: float
    files: dict[str, dict[str, Extent]] = field(default_factory=dict)
    written_by: str = __version__
    format: int = FORMAT

    def size_bytes(self) -> int:
        """Return the bytes in all files but the manifest."""
        return sum(
            extent.end - extent.begin
            for extents in self.files.values()
            for extent in extents.values()
        )

    def to_bytes(self) -> bytes:
        """Return the file: one line of JSON and the line of its digest."""
        body = json.dumps(asdict(self), separators=(",", ":")).encode()
        return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def manifest_of(checkpoint: Path) -> Path:
    """Return where the manifest of a checkpoint that exists lies.

    Inside a folder, beside a file.
    """
    return manifest_beside(checkpoint) if checkpoint.is_file() else checkpoint / FILE_NAME


def manifest_beside(file: Path) -> Path:
    """Return where the manifest of a checkpoint that is a file lies."""
    return file.with_name(f"{file.name}.{FILE_NAME}")


# --- verify


def read_manifest(checkpoint: Path) -> Manifest:
    """Read and verify the manifest of a checkpoint.

    H311 if it is missing or damaged, H303 if a newer holdfast wrote it, H307 if the system does not
    let it be read.
    """
    try:
        data = read_file(manifest_of(checkpoint))
    except FileNotFoundError as error:
        raise damaged(
            checkpoint, f"{FILE_NAME} is missing, so the save was not finished"
        ) from error
    except OSError as error:
        raise unreadable(checkpoint, error, FILE_NAME) from error
    body, _, rest = data.partition(b"\n")
    if rest != hashlib.sha256(body).hexdigest().encode() + b"\n":
        raise damaged(checkpoint, f"{FILE_NAME} does not match its own digest")
    try:
        tree: dict[str, Any] = json.loads(body)
        if type(tree["format"]) is int and tree["format"] > FORMAT:
            raise RunDirectoryError(
                f"{checkpoint} was written by holdfast {tree.get('written_by')!s:.40} in format"
                f" {tree['format']}",
                limit=f"this holdfast reads formats up to {FORMAT}",
                fix="upgrade holdfast, or start in a new run directory.",
                rule="H303",
            )
        return _checked(tree)
    except _ODD as error:
        why = (
            f"{FILE_NAME} is not what holdfast writes ({type(error).__name__}: {str(error)[:200]})"
        )
        raise damaged(checkpoint, why) from error


@contextlib.contextmanager
def reading(checkpoint: Path, part: str = "") -> Iterator[None]:
    """Turn what is raised while a checkpoint is read whose digests are right into `not_ours`
    (H311).

    `part` is the component that is read, if it is one.
    """
    try:
        yield
    except HoldfastError:
        raise
    except _ODD as error:
        raise not_ours(checkpoint, error, part) from error


def _checked(tree: dict[str, Any]) -> Manifest:
    """Return the manifest that JSON stands for.

    One of `_ODD` if it is none: a digest proves no origin.
    """
    files = {
        name: {
            key: Extent(**{**extent, "shape": tuple(extent["shape"])})
            for key, extent in extents.items()
        }
        for name, extents in tree["files"].items()
    }
    found = Manifest(**{**tree, "files": files})
    numbers = [found.format, found.save_id, found.global_step]
    for name, extents in files.items():
        parts = sorted(extents.values(), key=lambda each: (each.begin, each.end))
        covered = [each.begin for each in parts] == [0, *(each.end for each in parts)][:-1]
        texts = all(isinstance(text, str) for each in parts for text in (each.sha256, each.dtype))
        if {"", ".."} & set(name.split("/")) or "\0" in name or not covered or not texts:
            raise ValueError(f"what it says of {name[:80]!r}")
        numbers += [
            number for each in parts for number in (each.begin, each.end - each.begin, *each.shape)
        ]
    sound = all(type(number) is int and 0 <= number < 2**63 for number in numbers)
    if not (sound and isinstance(found.written_by, str) and 0 <= found.unix_seconds < _LATEST):
        raise ValueError("a number or its time")
    return found


def verify(checkpoint: Path) -> Manifest:
    """Check every byte of a sealed checkpoint, at about 1.5 GB/s.

    Files that were added later are not looked at.

    H311 names the file, the tensor and both digests, or says that it was never sealed; else as
    `read_manifest`.
    """
    manifest = read_manifest(checkpoint)
    for name, extents in manifest.files.items():
        verify_file(checkpoint, name, extents)
        if HEADER in extents and not _is_header(_file(checkpoint, name), extents):
            raise damaged(checkpoint, f"the header of {name} is not what {FILE_NAME} says")
    return manifest


def _is_header(path: Path, extents: dict[str, Extent]) -> bool:
    """Return whether a safetensors file says of its parts what the manifest says, and that can
    be their sizes.
    """
    try:
        found = {
            name: Extent(
                begin=begin, end=end, sha256=extents[name].sha256, dtype=dtype, shape=shape
            )
            for name, begin, end, dtype, shape in tensors_in(path)
        }
        tensors = [each for name, each in found.items() if name != HEADER]
        sizes = [
            (8 * (each.end - each.begin), math.prod(each.shape) * _bits(each.dtype))
            for each in tensors
        ]
    except _ODD:
        return False
    return found == extents and all(size == due for size, due in sizes)


def verify_file(checkpoint: Path, name: str, extents: dict[str, Extent]) -> None:
    """Check every byte of one file of a checkpoint: H311, also if there is no such file.

    H307 if the system does not let it be read, which says nothing about its bytes.
    """
    expected = max((extent.end for extent in extents.values()), default=0)
    try:
        path = _file(checkpoint, name)
        size = path.stat().st_size
        if size != expected:
            raise damaged(
                checkpoint, f"{path.name} has {size} bytes and the manifest says {expected}"
            )
        with opened(path) as file:
            for key, extent in sorted(extents.items(), key=lambda item: item[1].begin):
                found = _digest(file, extent.begin, extent.end)
                if found != extent.sha256:
                    raise damaged(
                        checkpoint,
                        f"{path.name}: {key} has sha256 {found[:12]}... on disk "
                        f"and {extent.sha256[:12]}... in the manifest",
                    )
    except OSError as error:
        raise unreadable(checkpoint, error, name) from error


def _file(checkpoint: Path, name: str) -> Path:
    """Return where a file of a checkpoint lies; H311 if a link leads out of it."""
    if checkpoint.is_file():
        return checkpoint.resolve()
    whole, path = checkpoint.resolve(), checkpoint / name
    if path.parent.resolve() != whole / Path(name).parent:
        raise damaged(checkpoint, f"{name} lies elsewhere, behind a link")
    return path


def _bits(dtype: str) -> int:
    """Return the bits of an element, which the names of the format say: F8_E4M3 has 8.

    A BOOL has 8 too.
    """
    return 8 if dtype == "BOOL" else int(dtype.partition("_")[0].lstrip("BFIUC"))


def is_sealed(checkpoint: Path) -> bool:
    """Return whether there is a manifest; whether it verifies is another question."""
    return manifest_of(checkpoint).is_file()


def is_unfinished(folder: Path) -> bool:
    """Return whether a save into a folder was begun and not sealed.

    An empty folder is what its begin left.
    """
    if not folder.is_dir() or is_sealed(folder):
        return False
    return (folder / UNFINISHED).exists() or not any(folder.iterdir())


def was_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint was ever sealed, also if it was begun once more since then."""
    mark = checkpoint / UNFINISHED
    return is_sealed(checkpoint) or (mark.is_file() and mark.stat().st_size > 0)


def check(checkpoint: Path) -> None:
    """Verify a checkpoint before it is loaded.

    One that a framework wrote without holdfast passes.
    """
    if is_sealed(checkpoint) or is_unfinished(checkpoint):
        verify(checkpoint)


def damaged(checkpoint: Path, why: str) -> CheckpointError:
    """Return the error that says what is wrong with a checkpoint."""
    return CheckpointError(
        f"checkpoint {checkpoint.name}: {why}",
        limit="a checkpoint is loaded only if every byte verifies",
        fix=(
            "nothing to do if an older checkpoint verifies (`holdfast checkpoints RUN_DIR --verify`"
            " says so); else copy it again from where it came."
        ),
        rule="H311",
    )


def not_ours(checkpoint: Path, error: BaseException, part: str = "") -> CheckpointError:
    """Return the error for a checkpoint whose digests are right and whose content no holdfast has
    written.

    Digests do not say who made them. The checkpoint stays where it is: a mistake of ours must not
    cost a good one.
    """
    where = f"{part!r} in checkpoint {checkpoint.name}" if part else f"checkpoint {checkpoint.name}"
    return CheckpointError(
        f"{where} cannot be read ({type(error).__name__}: {str(error)[:200]})",
        limit=(
            "every digest is right, so the disk has kept what was written: another program has"
            " changed it, or holdfast has a bug. Nothing was changed on the disk"
        ),
        fix=(
            "copy it again from where it came. To resume from the checkpoint before it, `mv"
            f" {checkpoint} {_aside(checkpoint)}`."
        ),
        rule="H311",
    )


def _aside(checkpoint: Path) -> Path:
    """Return where a checkpoint is moved that nobody shall resume from."""
    return checkpoint.with_name(f"damaged-{checkpoint.name}")


def unreadable(
    checkpoint: Path, error: OSError, name: str | None = None
) -> CheckpointError | RunDirectoryError:
    """Return what a system's error means: H307 for a checkpoint that may well be whole.

    For lost bytes H311.

    Without a `name` its bytes were verified already, so that they cannot be lost.
    """
    if name is not None and error.errno not in _PASSING:
        return damaged(checkpoint, f"{name} cannot be read ({error})")
    return RunDirectoryError(
        f"checkpoint {checkpoint.name} cannot be read now ({error})",
        limit=(
            "that says nothing about its bytes, and going on from an older one would lose work:"
            " nothing was changed on the disk"
        ),
        fix=(
            "start again when it can be read (open files, rights, the disk). If it never can be"
            f" again, `mv {checkpoint} {_aside(checkpoint)}` lets the run go on from the one"
            " before."
        ),
        rule="H307",
    )


# --- seal what a framework writes


def begin(folder: Path) -> None:
    """Mark a folder as unfinished, durably, before a framework writes into it.

    It is made if need be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / UNFINISHED
    if is_sealed(folder):
        # A mark that is not empty says that there was a whole one
        (folder / FILE_NAME).replace(mark)
    else:
        mark.touch()
    for path in (mark, folder, folder.parent):
        fsync_path(path)


def seal(checkpoint: Path, *, global_step: int, unix_seconds: float) -> None:
    """Flush every file of a checkpoint, a folder or a file, and write the digests of all of them.

    OSError if the disk refuses; there is no manifest then.
    """
    manifest, mark = manifest_of(checkpoint), checkpoint / UNFINISHED
    manifest.unlink(missing_ok=True)
    found = [checkpoint] if checkpoint.is_file() else checkpoint.rglob("*")
    paths = sorted(
        path for path in found if path.is_file() and not path.is_symlink() and path != mark
    )
    files = {}
    for path in paths:
        fsync_path(path)
        files[path.relative_to(checkpoint).as_posix()] = _extents_of(path)
    sealed = Manifest(
        save_id=global_step, global_step=global_step, unix_seconds=unix_seconds, files=files
    )
    # Half of one would look like a damaged checkpoint
    replace_file(manifest, sealed.to_bytes(), SHARED)
    for folder in {path.parent for path in paths} | {manifest.parent, checkpoint.parent}:
        fsync_path(folder)
    if checkpoint.is_dir():
        mark.unlink(missing_ok=True)


def _extents_of(path: Path) -> dict[str, Extent]:
    """Return the extents of a file: of safetensors one for each tensor, else one for all of it."""
    parts: list[tuple[str, int, int, str, tuple[int, ...]]] = [
        ("file", 0, path.stat().st_size, "", ())
    ]
    if path.suffix == ".safetensors":
        with contextlib.suppress(*_ODD):  # it is not what its name says
            parts = list(tensors_in(path))
    with opened(path) as file:
        return {
            name: Extent(
                begin=begin, end=end, sha256=_digest(file, begin, end), dtype=dtype, shape=shape
            )
            for name, begin, end, dtype, shape in parts
        }


def tensors_in(path: Path) -> Iterator[tuple[str, int, int, str, tuple[int, ...]]]:
    """Yield name, begin, end, type and shape of each part of a safetensors file."""
    with opened(path) as file:
        length = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(min(length, _MOST_HEADER_BYTES)))
    start = 8 + length
    yield HEADER, 0, start, "", ()
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = about["data_offsets"]
            if not (type(begin) is type(end) is int and 0 <= begin <= end):
                raise ValueError(f"{name!r:.80} has no place in {path.name}")
            yield name, start + begin, start + end, about["dtype"], tuple(about["shape"])


def _digest(file: BinaryIO, begin: int, end: int) -> str:
    file.seek(begin)
    digest, left = hashlib.sha256(), end - begin
    while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest()
