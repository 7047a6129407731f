"""Read a selection of a run's images for its page: the newest and a few earlier ones of each tag.

Only complete PNG files are embedded. For any other file, a sentence is added to the page's
problems. Images are not decoded, so Pillow is not needed. ``guard.images`` writes the images.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from holdfast.core.files import open_to_read
from holdfast.core.text import sanitise
from holdfast.guard.images import IMAGES_FOLDER, LONGEST_SIDE, MOST_FILE_BYTES, MOST_TAGS
from holdfast.report.page.gathered_run import PageImage

_SHOWN_OF_A_TAG = 5
# Maximum number of entries to examine in a folder; a guard writes at most 16 files to each.
_MAX_FILES = 1000
# Maximum total size of all images on a page. For comparison, plotly.js takes up 4.5 MiB.
_MAX_TOTAL_BYTES = 16 << 20
# Maximum number of digits of a step in a file name. A longer number might not fit into 64 bits.
_MAX_STEP_DIGITS = 18

# A PNG file starts with this signature and the chunk IHDR, whose first fields are width and height.
# It ends with the chunk IEND, which is always the same (https://www.w3.org/TR/png-3/#5DataRep).
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_IHDR = struct.Struct(">8s4x4sII")
_IEND = b"\x00\x00\x00\x00IEND\xaeB`\x82"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class _ImageFile:
    """An image file that is a candidate for the page.

    Files are sorted by `place` first, which is their position within the tag. The newest image of
    each tag is therefore read before the second image of any tag.
    """

    place: int
    tag: str
    global_step: int
    path: Path


def read_images(runs: Iterable[Path], problems: list[str]) -> list[PageImage]:
    """Return the images to show, sorted by tag, newest step first.

    Args:
        runs: Run directories of guards.
        problems: A list to which sentences about omitted files are appended.
    """
    images: list[PageImage] = []
    size = 0
    too_large = 0
    for file in sorted(_files_to_show(runs, problems)):
        try:
            image = _read_image(file)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            sentence = f"image {file.tag} of step {file.global_step} is left out: {reason}"
            problems.append(sanitise(sentence, most=300))
            continue
        if size + len(image.png) > _MAX_TOTAL_BYTES:
            too_large += 1
            continue
        size += len(image.png)
        images.append(image)
    if too_large:
        problems.append(
            f"{too_large} images are left out: a page holds at most"
            f" {_MAX_TOTAL_BYTES >> 20} MiB of images"
        )
    return sorted(images, key=lambda image: (image.tag, -image.global_step))


def png_size(data: bytes) -> tuple[int, int]:
    """Return the width and height of a PNG file in pixels, without decoding it.

    Raises:
        ValueError: If the data is not a complete PNG file, or is larger than any image that a guard
            writes.
    """
    if len(data) > MOST_FILE_BYTES:
        raise ValueError(
            f"a PNG file of {len(data):,} bytes; the limit is {MOST_FILE_BYTES:,} bytes"
        )
    if len(data) < _IHDR.size or not data.endswith(_IEND):
        raise ValueError("not a complete PNG file")
    signature, first_chunk, width, height = _IHDR.unpack_from(data)
    if signature != _SIGNATURE or first_chunk != b"IHDR":
        raise ValueError("not a complete PNG file")
    if not (1 <= width <= LONGEST_SIDE and 1 <= height <= LONGEST_SIDE):
        raise ValueError(
            f"a PNG file of {width} x {height} pixels; each side must have 1 to {LONGEST_SIDE}"
        )
    return width, height


def _files_to_show(runs: Iterable[Path], problems: list[str]) -> Iterator[_ImageFile]:
    """Yield the image files that are candidates for the page, without reading them."""
    runs_with_images = [run for run in runs if (run / IMAGES_FOLDER).is_dir()]
    for run in runs_with_images:
        try:
            for folder in _tag_folders(run / IMAGES_FOLDER):
                name = folder.name
                if len(runs_with_images) > 1:
                    name = f"{name} of {run.name}"
                tag = sanitise(name, most=160)
                for place, (step, path) in enumerate(_spread(_image_files(folder))):
                    yield _ImageFile(place=place, tag=tag, global_step=step, path=path)
        except OSError as error:
            sentence = f"the images cannot be listed: {error.strerror or error}"
            problems.append(sanitise(sentence, most=300))


def _tag_folders(folder: Path) -> list[Path]:
    """Return the folders of at most `MOST_TAGS` tags, in alphabetical order, ignoring links."""
    entries = islice(folder.iterdir(), _MAX_FILES)
    folders = [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
    return sorted(folders)[:MOST_TAGS]


def _image_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the step and the path of each image of a tag, newest step first."""
    files = []
    for path in islice(folder.iterdir(), _MAX_FILES):
        digits = path.stem
        is_step = digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_STEP_DIGITS
        if path.suffix == ".png" and is_step:
            files.append((int(digits), path))
    return sorted(files, reverse=True)


def _spread(files: list[tuple[int, Path]]) -> list[tuple[int, Path]]:
    """Return the first file, the last file, and a few evenly spaced files between them."""
    if len(files) <= _SHOWN_OF_A_TAG:
        return files
    distance = (len(files) - 1) / (_SHOWN_OF_A_TAG - 1)
    return [files[round(place * distance)] for place in range(_SHOWN_OF_A_TAG)]


def _read_image(image_file: _ImageFile) -> PageImage:
    """Read an image file without following a link or blocking on a pipe."""
    with open_to_read(image_file.path) as file:
        png = file.read(MOST_FILE_BYTES + 1)
    width, height = png_size(png)
    return PageImage(
        tag=image_file.tag,
        global_step=image_file.global_step,
        png=png,
        width=width,
        height=height,
    )
