"""Write the images of a run, such as sample grids and alignment plots.

    images/<tag>/<global step>.png

Each image is checked, converted to 8-bit pixels, encoded by Pillow and written to disk. The number
of files is limited. Tensors are converted by calling their own methods, so this module need not
import torch. ``report.page.images`` reads the images and shows them in the report.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
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
# Limits per run: 64 tags with 16 images of 4 MiB each. Most runs need only a few MiB.
MOST_TAGS = 64
MOST_OF_A_TAG = 16
MOST_PIXEL_BYTES = 4 << 20
# PNG adds at most one byte to each row, and a few bytes to each 16 KiB block that cannot be
# compressed. That is less than 64 KiB for the largest image.
MOST_FILE_BYTES = MOST_PIXEL_BYTES + (64 << 10)
# A browser needs 256 MiB to draw 2**26 pixels, which is a square image with this side length.
LONGEST_SIDE = 1 << 13
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# Due to rounding, floats may lie slightly outside 0 to 1. Deviations up to this are not reported.
_HALF_A_LEVEL = 0.5 / 255


def write_image(run: Path, record: RunRecord, tag: str, image: Any) -> None:
    """Write an image for the current step, delete the tag's oldest images, and record an event.

    If the image cannot be written, or 64 other tags already have images, an ``image_left_out``
    event is recorded instead. No error is raised.

    Args:
        run: The run directory.
        record: The run's record, which provides the current step and receives the event.
        tag: See `Guard.add_image`.
        image: See `Guard.add_image`.

    Raises:
        PolicyError: H105 for an invalid tag or image, H742 if Pillow is missing.
    """
    _check_pillow()
    _check_tag(tag)
    pixels = _pixels_of(image)
    png = encode_png(pixels.levels)

    path = run / IMAGES_FOLDER / tag / f"{record.global_step}.png"
    try:
        make_folder(run, IMAGES_FOLDER)
        if _is_one_tag_too_many(path.parent):
            reason = f"{MOST_TAGS} tags have images already"
            record.emit(run_events.ImageLeftOut(tag=tag, reason=reason))
            return
        make_folder(run, IMAGES_FOLDER, tag)
        replace_file(path, png)
        _delete_oldest(path.parent)
    except OSError as error:
        record.emit(run_events.ImageLeftOut(tag=tag, reason=str(error.strerror or error)))
        return
    record.emit(
        run_events.ImageAdded(
            tag=tag,
            path=str(path.relative_to(run)),
            nonfinite=pixels.nonfinite,
            outside_0_to_1=pixels.outside_0_to_1,
        )
    )


def encode_png(levels: npt.NDArray[np.uint8]) -> bytes:
    """Encode 8-bit gray (height, width) or RGB (height, width, 3) pixels as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(levels).save(file, format="PNG")
    return file.getvalue()


def _check_pillow() -> None:
    """Raise H742 if Pillow is not installed, before any work is done."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise PolicyError(
            "add_image needs Pillow, which is not installed",
            limit="holdfast uses Pillow to encode images as PNG",
            fix="pip install pillow",
            rule="H742",
        ) from error


def _check_tag(tag: object) -> None:
    if isinstance(tag, str) and _TAG.fullmatch(tag) is not None:
        return
    raise PolicyError(
        f"add_image with tag {tag!r}",
        limit=(
            "a tag becomes a folder name: it consists of 1 to 64 letters, digits, '-', '_' and '.',"
            " and starts with a letter or a digit"
        ),
        fix='pass a tag such as "samples" or "alignment-valid"; the step is added automatically.',
        rule="H105",
    )


def _is_one_tag_too_many(folder: Path) -> bool:
    """Return whether creating a tag's folder would exceed the maximum number of tags."""
    if folder.is_dir():
        return False
    return sum(1 for _ in folder.parent.iterdir()) >= MOST_TAGS


def _delete_oldest(folder: Path) -> None:
    """Delete all but the `MOST_OF_A_TAG` most recently written images in a tag's folder.

    Images are ordered by the time of writing rather than by step, because after a rollback, an
    image of a later step may be older.
    """
    images = []
    for path in folder.iterdir():
        if path.name.startswith(".tmp-"):
            # A process was killed while it was writing this file.
            path.unlink(missing_ok=True)
        elif path.suffix == ".png" and path.stem.isdecimal():
            images.append((path.stat().st_mtime_ns, int(path.stem), path))
    # Keep the newest images, which are the last ones in the sorted list.
    for _, _, path in sorted(images)[:-MOST_OF_A_TAG]:
        path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pixels:
    """An image as 8-bit levels, and the numbers of values that could not be represented exactly."""

    levels: npt.NDArray[np.uint8]
    nonfinite: int = 0
    outside_0_to_1: int = 0


def _pixels_of(image: Any) -> _Pixels:
    """Check an image and convert it to 8-bit levels, or raise H105 if it is invalid."""
    array = _without_single_channel(_as_array(image))
    _check_shape(array)
    if array.dtype == np.uint8:
        return _Pixels(levels=array)
    if array.dtype == np.bool_:
        return _Pixels(levels=array.astype(np.uint8) * np.uint8(255))
    if not np.issubdtype(array.dtype, np.floating):
        _refuse(f"values of type {array.dtype}", "convert them to uint8, or to floats from 0 to 1.")

    finite = np.isfinite(array)
    outside = finite & ((array < -_HALF_A_LEVEL) | (array > 1 + _HALF_A_LEVEL))
    clipped = np.nan_to_num(array, nan=0.0, posinf=1.0, neginf=0.0).clip(0.0, 1.0)
    return _Pixels(
        levels=(clipped * 255).round().astype(np.uint8),
        nonfinite=int((~finite).sum()),
        outside_0_to_1=int(outside.sum()),
    )


def _as_array(image: Any) -> npt.NDArray[Any]:
    if isinstance(image, (bytes, bytearray, memoryview)):
        _refuse("the bytes of a file", "decode it first: numpy.asarray(PIL.Image.open(file)).")
    is_tensor = hasattr(image, "detach")
    if is_tensor:
        image = image.detach().cpu()
        if image.is_floating_point():
            # numpy has no bfloat16.
            image = image.float()
    try:
        return np.asarray(image)
    except (ValueError, TypeError) as error:
        _refuse(f"{type(image).__name__} ({error})")


def _without_single_channel(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an image of shape (height, width, 1) as (height, width), and others unchanged."""
    if array.ndim == 3 and array.shape[2] == 1:
        return array[:, :, 0]
    return array


def _check_shape(array: npt.NDArray[Any]) -> None:
    is_grey = array.ndim == 2
    is_rgb = array.ndim == 3 and array.shape[2] == 3
    if not (is_grey or is_rgb):
        channels_first = array.ndim == 3 and array.shape[0] in (1, 3)
        if channels_first:
            _refuse(f"shape {array.shape}", "call .permute(1, 2, 0), because channels come last.")
        _refuse(f"shape {array.shape}")
    if array.size == 0 or array.size > MOST_PIXEL_BYTES or max(array.shape) > LONGEST_SIDE:
        _refuse(f"shape {array.shape}", "scale it down, or pass fewer samples in one grid.")


def _refuse(problem: str, fix: str = "pass an array or a tensor of that shape.") -> NoReturn:
    raise PolicyError(
        f"add_image with {problem}",
        limit=(
            "an image has shape (height, width) or (height, width, 3), uint8 values or floats from"
            f" 0 to 1, at most {MOST_PIXEL_BYTES:,} values, and at most {LONGEST_SIDE} pixels per"
            " side"
        ),
        fix=fix,
        rule="H105",
    )
