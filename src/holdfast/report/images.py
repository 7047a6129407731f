"""The images of a run for its page.

Of each tag the newest and a few earlier ones, whole, and bounded in all.

Nothing but a regular file that is a whole PNG is taken, whatever lies there; what is passed over
leaves a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from holdfast.core.files import opened
from holdfast.core.text import sanitise
from holdfast.guard.images import IMAGES_FOLDER, MOST_FILE_BYTES, MOST_TAGS, png_size

_SHOWN_OF_A_TAG = 5
_MOST_FILES = 1000  # of a folder that are looked at
_MOST_BYTES_IN_ALL = 16 << 20  # plotly's own script is 4.5 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSeen:
    """One image: a whole PNG file, and its size in pixels."""

    tag: str
    global_step: int
    png: bytes
    width: int
    height: int


def read_images(runs: Iterable[Path], problems: list[str]) -> list[ImageSeen]:
    """Return what is to be shown of guards' run directories, by tag and then from the newest step
    to the oldest.

    Sentences about what was passed over are added to `problems`.
    """
    with_images = [run for run in runs if (run / IMAGES_FOLDER).is_dir()]
    chosen: list[tuple[int, str, int, Path]] = []  # how far down in its tag, tag, step, file
    for run in with_images:
        for tag, files in _tags(run / IMAGES_FOLDER, problems):
            name = sanitise(tag if len(with_images) == 1 else f"{tag} of {run.name}", most=160)
            chosen += [
                (place, name, step, path) for place, (step, path) in enumerate(_spread(files))
            ]
    found, left, size = [], 0, 0
    for _, name, step, path in sorted(chosen):  # the newest of every tag before the second of any
        try:
            png = _read(path)
            width, height = png_size(png)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            problems.append(sanitise(f"image {name} of step {step} is left out: {why}", most=300))
            continue
        if size + len(png) > _MOST_BYTES_IN_ALL:
            left += 1
            continue
        size += len(png)
        found.append(ImageSeen(tag=name, global_step=step, png=png, width=width, height=height))
    if left:
        problems.append(
            f"{left} images are left out: a page takes {_MOST_BYTES_IN_ALL >> 20} MiB of them"
        )
    return sorted(found, key=lambda seen: (seen.tag, -seen.global_step))


def _tags(folder: Path, problems: list[str]) -> Iterator[tuple[str, list[tuple[int, Path]]]]:
    """Yield the tags with their files, newest first."""
    try:
        listed = islice(folder.iterdir(), _MOST_FILES)
        for tag in sorted(each for each in listed if each.is_dir() and not each.is_symlink())[
            :MOST_TAGS
        ]:
            files = [
                (int(path.stem), path)
                for path in islice(tag.iterdir(), _MOST_FILES)
                if path.suffix == ".png"
                and path.stem.isascii()
                and path.stem.isdecimal()
                and len(path.stem) < 19
            ]
            if files:
                yield tag.name, sorted(files, reverse=True)
    except OSError as error:
        problems.append(sanitise(f"images cannot be listed: {error.strerror or error}", most=300))


def _spread(files: list[tuple[int, Path]]) -> list[tuple[int, Path]]:
    """Keep the newest, the oldest, and some evenly between."""
    if len(files) <= _SHOWN_OF_A_TAG:
        return files
    return [
        files[round(place * (len(files) - 1) / (_SHOWN_OF_A_TAG - 1))]
        for place in range(_SHOWN_OF_A_TAG)
    ]


def _read(path: Path) -> bytes:
    """Return a regular file, without following a link or waiting for a pipe."""
    with opened(path) as file:
        return file.read(MOST_FILE_BYTES + 1)
