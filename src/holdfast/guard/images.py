"""Images of a run, such as sample grids and alignment plots: checked, written as PNG, bounded.

    images/<tag>/<global step>.png

Does not: show them (see ``report.images``), nor import torch: a tensor is asked for its array.
"""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from holdfast.core.durable import replace_file
from holdfast.core.errors import PolicyError
from holdfast.core.events import run_events
from holdfast.core.files import make_folder
from holdfast.guard.record import RunRecord

IMAGES_FOLDER = "images"
# Bounds of what a run keeps: 64 tags of 16 images of 4 MiB, and in practice some MiB. What a
# browser draws: 2 ** 26 pixels take 256 MiB there.
MOST_TAGS = 64
MOST_OF_A_TAG = 16
MOST_PIXEL_BYTES = 4 << 20
# What does not compress takes a byte a row and 5 in 16 KiB more
MOST_FILE_BYTES = MOST_PIXEL_BYTES + (64 << 10)
LONGEST_SIDE = 1 << 13
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _RGB = 0, 2  # colour types of PNG
_HALF_A_LEVEL = 0.5 / 255  # what a float may lie outside 0 to 1 by rounding


def keep_image(run: Path, record: RunRecord, tag: str, image: Any) -> None:
    """Write an image of the step that the run stands at, drop the oldest of its tag, and record it.

    A disk that refuses, and a tag beyond the 64th, are recorded as ``image_left_out`` and passed
    over. Arguments and errors are those of `Guard.add_image`.
    """
    if not isinstance(tag, str) or _TAG.fullmatch(tag) is None:
        raise PolicyError(
            f"add_image with tag {tag!r}",
            limit=(
                "it names a folder: 1 to 64 letters, digits, '-', '_' and '.', the first a letter"
                " or digit"
            ),
            fix='pass a tag such as "samples" or "alignment-valid"; the step is added for you.',
            rule="H105",
        )
    png, odd = _as_png(image)
    folder = run / IMAGES_FOLDER / tag
    path = folder / f"{record.global_step}.png"
    try:
        make_folder(run, IMAGES_FOLDER)
        if not folder.is_dir() and sum(1 for _ in folder.parent.iterdir()) >= MOST_TAGS:
            record.emit(
                run_events.ImageLeftOut(tag=tag, reason=f"{MOST_TAGS} tags have images already")
            )
            return
        make_folder(run, IMAGES_FOLDER, tag)
        replace_file(path, png)
        _drop_oldest(folder)
    except OSError as error:
        record.emit(run_events.ImageLeftOut(tag=tag, reason=str(error.strerror or error)))
        return
    record.emit(run_events.ImageAdded(tag=tag, path=str(path.relative_to(run)), **odd))


def _drop_oldest(folder: Path) -> None:
    """Keep what was written last.

    After a return to an earlier step, files of later ones are older than the new.
    """
    found = []
    for path in folder.iterdir():
        if path.name.startswith(".tmp-"):  # of a process that was killed while it wrote
            path.unlink(missing_ok=True)
        elif path.suffix == ".png" and path.stem.isdecimal():
            found.append((path.stat().st_mtime_ns, int(path.stem), path))
    for _, _, path in sorted(found)[:-MOST_OF_A_TAG]:
        path.unlink(missing_ok=True)


def png_size(data: bytes) -> tuple[int, int]:
    """Return width and height of a PNG file that has a beginning and an end."""
    if len(data) > MOST_FILE_BYTES:
        raise ValueError(
            f"a PNG file of {len(data):,} bytes, where {MOST_FILE_BYTES:,} are kept at most"
        )
    if data[:8] != _SIGNATURE or data[12:16] != b"IHDR" or not data.endswith(_chunk(b"IEND", b"")):
        raise ValueError("not a whole PNG file")
    width, height = struct.unpack_from(">II", data, 16)
    if not all(1 <= side <= LONGEST_SIDE for side in (width, height)):
        raise ValueError(
            f"a PNG file of {width} x {height} pixels, where a side has 1 to {LONGEST_SIDE}"
        )
    return width, height


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def encoded_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """Return a PNG file of 8-bit grey (height, width) or RGB (height, width, 3)."""
    height, width = pixels.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 8, _GREY if pixels.ndim == 2 else _RGB, 0, 0, 0)
    # Before each row the number of its filter: none
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))
    body = zlib.compress(rows.tobytes(), 6)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _as_png(image: Any) -> tuple[bytes, dict[str, int]]:
    """Return an image as a PNG file, and counts of what is odd about its values."""
    if isinstance(image, (bytes, bytearray, memoryview)):
        _refuse("bytes of a file", "decode it first: numpy.asarray(PIL.Image.open(file)).")
    if hasattr(image, "detach"):  # a tensor
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image  # numpy has no bfloat16
    try:
        array = np.asarray(image)
    except (ValueError, TypeError) as error:
        _refuse(f"{type(image).__name__} ({error})")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] != 3):
        channels_first = array.ndim == 3 and array.shape[0] in (1, 3)
        _refuse(
            f"shape {array.shape}",
            "call .permute(1, 2, 0): channels come last." if channels_first else None,
        )
    if array.size == 0 or max(array.shape) > LONGEST_SIDE or array.size > MOST_PIXEL_BYTES:
        _refuse(f"shape {array.shape}", "scale it down, or pass fewer samples in one grid.")
    if array.dtype in (np.uint8, np.bool_):
        return encoded_png(array.astype(np.uint8) * (255 if array.dtype == np.bool_ else 1)), {}
    if not np.issubdtype(array.dtype, np.floating):
        _refuse(f"values of type {array.dtype}", "convert them to uint8, or to floats from 0 to 1.")
    finite = np.isfinite(array)
    outside = finite & ((array < -_HALF_A_LEVEL) | (array > 1 + _HALF_A_LEVEL))
    odd = {"nonfinite": int((~finite).sum()), "outside_0_to_1": int(outside.sum())}
    levels = np.nan_to_num(array, nan=0.0, posinf=1.0, neginf=0.0).clip(0.0, 1.0) * 255
    return encoded_png(levels.round().astype(np.uint8)), odd


def _refuse(what: str, fix: str | None = None) -> NoReturn:
    raise PolicyError(
        f"add_image with {what}",
        limit=(
            "an image is (height, width) or (height, width, 3), uint8 or floats from 0 to 1, of at"
            f" most {MOST_PIXEL_BYTES:,} values and {LONGEST_SIDE} a side"
        ),
        fix=fix or "pass an array or a tensor of that shape.",
        rule="H105",
    )
