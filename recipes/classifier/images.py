"""Images from files: a folder of pictures for each class, or the IDX files that MNIST comes in.

``train/<class>/<any name>.png`` and ``test/...`` (also .jpg, .bmp, .gif; read in grey), or
``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-images-...``, ``t10k-labels-...``,
also with ``.gz``.

Without any data, `write_digits` makes such a folder from the 1,797 real handwritten digits of
scikit-learn. Does not: scale, augment or collate (see ``samples``).
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from recipes.options import insist_on_usable, most_quarantined

_PARTS = {True: ("train", "train"), False: ("test", "t10k")}
_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif"}
_IMAGES, _LABELS = 0x803, 0x801  # magic numbers: unsigned bytes in three dimensions, in one
_DIGITS, _TEST_DIGITS = 1797, 360
DIGITS_TO_TRAIN = _DIGITS - _TEST_DIGITS
"""Images that `write_digits` writes to train on."""
_NAMED = 5  # sizes that a message tells


class DataError(ValueError):
    """The data as a whole cannot be used; the message says which file, and what to do."""


class Source(Protocol):
    """Where images come from, one at a time."""

    @property
    def labels(self) -> Sequence[int]:
        """The class of each image."""

    def name(self, index: int) -> str:
        """Return what an image is called, for messages."""

    def shape(self, index: int) -> tuple[int, ...] | None:
        """Return height and width of an image without reading all of it; None if that cannot be."""

    def read(self, index: int) -> bytes:
        """Return what is stored of an image."""

    def decode(self, stored: bytes) -> np.ndarray:
        """Return an image, shape ``(height, width)``, values 0 to 255, or raise."""


def find_source(root: Path, *, train: bool) -> Source:
    """Return the training or the test images of a directory.

    Raises:
        DataError: It holds neither of the two formats, or files that do not belong together.
    """
    folder, prefix = _PARTS[train]
    if (root / folder).is_dir():
        return Folder.of(root / folder, None if train else root / _PARTS[True][0])
    images, labels = (
        _idx_file(root, f"{prefix}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1")
    )
    if images is None or labels is None:
        raise DataError(
            f"{root} holds neither {folder}/<class>/*.png nor {prefix}-images-idx3-ubyte[.gz] with"
            " its labels.\nFix: name a directory of one of these two formats with --data-dir, or"
            " leave it out."
        )
    return Idx.of(images, labels)


def check_classes(test: Source, classes: int) -> None:
    """Refuse test images of classes that are not trained.

    Raises:
        DataError: There are some.
    """
    highest = max(test.labels)
    if highest >= classes:
        name = test.name(list(test.labels).index(highest))
        raise DataError(
            f"{name} of the test images is of class {highest}, and the training images are of 0 to"
            f" {classes - 1}.\nFix: training and test images of one data set."
        )


def shape_of_all(
    source: Source, quarantine: float, needed: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Return the height and width that images have, by their headers.

    Args:
        source: Of the images.
        quarantine: What may be quarantined, as `holdfast.DataLoader` takes it: so many may have
            another size.
        needed: Height and width that they must have; None: those that most of them have.

    Raises:
        DataError: More have another size, or none of them can be read.
        OptionError: More cannot be read than may be quarantined.
    """
    shapes = [source.shape(index) for index in range(len(source.labels))]
    counted = Counter(shape for shape in shapes if shape is not None).most_common()
    if not counted:
        raise DataError(
            f"none of the images such as {source.name(0)} can be read.\nFix: look at one of them."
        )
    unreadable = [
        f"{source.name(index)} cannot be read"
        for index, shape in enumerate(shapes)
        if shape is None
    ]
    insist_on_usable(unreadable, len(shapes), quarantine)
    needed = needed or counted[0][0]
    others = [index for index, shape in enumerate(shapes) if shape not in (None, needed)]
    allowed = most_quarantined(quarantine, len(shapes))
    if len(others) > allowed:
        sizes = ", ".join(f"{many} of {_pixels(shape)}" for shape, many in counted[:_NAMED])
        more = f" and {len(counted) - _NAMED} more sizes" if len(counted) > _NAMED else ""
        fix = (
            "resize them in a copy of the folder, for instance with ImageMagick: "
            f"mogrify -resize '{_pixels(needed)}!' copy/*/*/*"
        )
        raise DataError(
            f"{len(others)} of {len(shapes)} images have another size than {_pixels(needed)} (width"
            f" x height), such as {source.name(others[0])}, which has shape {shapes[others[0]]}."
            f" There are {sizes}{more}.\nLimit: all are of one size; --quarantine {quarantine:g}"
            f" sets {allowed} of these aside.\nFix:"
            f" {fix if isinstance(source, Folder) else 'training and test images of one data set'}"
        )
    return needed


def _pixels(shape: tuple[int, ...]) -> str:
    return f"{shape[1]}x{shape[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """Pictures, one folder for each class; classes are numbered in the order of their names."""

    paths: Sequence[Path]
    labels: Sequence[int]

    @classmethod
    def of(cls, root: Path, training: Path | None = None) -> Folder:
        """Return the pictures below a directory.

        Args:
            root: Holds a folder for each class.
            training: The directory of the training images, where these are others: it says which
                number a class has, also where some have no pictures here.

        Raises:
            DataError: There are none, or to train on of one class only; or the training images lack
                a class.
        """
        _check_installed("PIL", "pillow")
        found = _pictures_below(root)
        names = sorted(
            found if training is None or not training.is_dir() else _pictures_below(training)
        )
        if len(names) < 2:
            raise DataError(
                f"{training or root} holds pictures of fewer than two classes:"
                f" {', '.join(names) or 'none at all'}.\nFix: a folder for each, such as"
                " train/cat/1.png and train/dog/1.png."
            )
        strange = sorted(set(found) - set(names))
        if strange or not found:
            place = root / strange[0] if strange else root
            what = (
                f"is a class that {training} has no pictures of" if strange else "holds no pictures"
            )
            raise DataError(
                f"{place} {what}.\nFix: pictures in folders that are called as those to train on."
            )
        of_all = [
            (path, number) for number, name in enumerate(names) for path in found.get(name, ())
        ]
        return cls(paths=[path for path, _ in of_all], labels=[label for _, label in of_all])

    def name(self, index: int) -> str:
        """Return the path."""
        return str(self.paths[index])

    def shape(self, index: int) -> tuple[int, ...] | None:
        """Return height and width as the header of the file has them.

        None where it cannot be read.
        """
        try:
            with _opened(self.paths[index]) as picture:
                return picture.height, picture.width
        except ValueError:  # the loader says why when it comes to this picture
            return None

    def read(self, index: int) -> bytes:
        """Return the bytes of the file."""
        return self.paths[index].read_bytes()

    def decode(self, stored: bytes) -> np.ndarray:
        """Return the picture in grey; what is no whole picture raises ValueError."""
        with _opened(io.BytesIO(stored)) as picture:
            return np.asarray(picture.convert("L"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Idx:
    """The two files that MNIST and its likes come in."""

    images: np.ndarray
    labels: Sequence[int]
    path: Path

    @classmethod
    def of(cls, images: Path, labels: Path) -> Idx:
        """Return the images of two files.

        Raises:
            DataError: One is no IDX file or is cut off, or their numbers differ.
        """
        found, given = _read_idx(images, _IMAGES), _read_idx(labels, _LABELS)
        if len(found) != len(given):
            raise DataError(
                f"{images} holds {len(found)} images and {labels} {len(given)} labels.\nFix: both"
                " anew."
            )
        if not found.size:
            raise DataError(
                f"{images} holds images of shape {found.shape}: no pixel at all.\nFix: fetch it"
                " again."
            )
        return cls(images=found, labels=given.tolist(), path=images)

    def name(self, index: int) -> str:
        """Return the file and the number."""
        return f"image {index} of {self.path}"

    def shape(self, index: int) -> tuple[int, ...]:
        """Return height and width, which all have."""
        return self.images[index].shape

    def read(self, index: int) -> bytes:
        """Return the bytes of one image."""
        return self.images[index].tobytes()

    def decode(self, stored: bytes) -> np.ndarray:
        """Return the image; what has too few bytes raises."""
        return np.frombuffer(stored, np.uint8).reshape(self.images.shape[1:])


@contextmanager
def _opened(file: Path | io.BytesIO) -> Iterator[Any]:
    """Open a picture, of which Pillow reads no more than its header.

    What it then raises is a ValueError.
    """
    from PIL import Image

    try:
        with Image.open(file) as picture:
            yield picture
    except MemoryError:
        raise  # not the picture's fault
    except Exception as error:  # of damage its decoders raise whatever they run into
        raise ValueError(f"no whole picture: {error!r}") from error


def _pictures_below(root: Path) -> dict[str, list[Path]]:
    """Return the pictures of each folder that has some, by its name."""
    found = {}
    for folder in (path for path in root.iterdir() if path.is_dir()):
        pictures = sorted(path for path in folder.iterdir() if path.suffix.lower() in _SUFFIXES)
        if pictures:
            found[folder.name] = pictures
    return found


def _idx_file(root: Path, name: str) -> Path | None:
    # Some unpack MNIST as train-images.idx3-ubyte.
    names = [name, f"{name}.gz", name.replace("-idx", ".idx")]
    return next((root / each for each in names if (root / each).is_file()), None)


def _read_idx(path: Path, magic: int) -> np.ndarray:
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}).\nFix: fetch it again.") from error
    dimensions = 3 if magic == _IMAGES else 1
    head = 4 + 4 * dimensions
    if len(data) < head or struct.unpack(">I", data[:4])[0] != magic:
        raise DataError(
            f"{path} is no IDX file of {dimensions} dimension(s) of bytes.\nFix: fetch it again."
        )
    shape = struct.unpack(f">{dimensions}I", data[4:head])
    if len(data) != head + int(np.prod(shape)):
        raise DataError(
            f"{path} has {len(data)} bytes and announces {shape}.\nFix: fetch it again: it is cut"
            " off."
        )
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)


def _check_installed(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise DataError(
            f"{package} is not installed, which these images need.\nFix: pip install {package}"
        )


def write_digits(root: Path) -> None:
    """Write scikit-learn's handwritten digits as PNG files, 1,437 to train on and 360 to test with,
    or nothing.

    Raises:
        DataError: A package that this needs is not installed.
    """
    if root.exists():
        return
    _check_installed("PIL", "pillow")
    _check_installed("sklearn", "scikit-learn")
    from PIL import Image
    from sklearn.datasets import load_digits

    found = load_digits()
    parts = root.with_name(f"{root.name}.{os.getpid()}.part")
    for index, (image, label) in enumerate(zip(found.images, found.target, strict=True)):
        part = "train" if index < DIGITS_TO_TRAIN else "test"
        place = parts / part / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 255 / 16).astype(np.uint8)).save(place / f"{index:04d}.png")
    parts.rename(root)


def write_idx(path: Path, values: np.ndarray) -> None:
    """Write bytes as an IDX file; a name that ends in ``.gz`` is compressed."""
    magic = _IMAGES if values.ndim == 3 else _LABELS
    data = (
        struct.pack(f">{1 + values.ndim}I", magic, *values.shape)
        + values.astype(np.uint8).tobytes()
    )
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
