"""`Location`: a folder in a store that fsspec can reach. Only this module knows fsspec."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from holdfast.core.errors import PolicyError, RunDirectoryError
from holdfast.core.files import SHARED, create_file, open_to_read
from holdfast.core.secrets import SecretUrl, without_secrets

# Number of bytes copied at a time.
_CHUNK_BYTES = 4 * 2**20
# Stores that upload a file in parts get parts of this size. It must be at least 5 MiB for S3. A
# part is the unit in which progress is seen, so it must also pass a slow link in some seconds.
_PART_BYTES = 8 * 2**20
# S3 takes at most 10,000 parts, so the parts of a very large file are larger.
_MOST_PARTS = 9_000
_MAX_DETAIL_LENGTH = 300

# Schemes of local disks, of which fsspec knows several.
_LOCAL = ("file", "local")
# Object stores have no folders. Creating one there would at best do nothing, and could create a
# bucket by mistake.
_OBJECT_STORES = frozenset(
    {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "memory"}
)
# Errors that waiting does not cure: missing rights, a bucket or host that does not exist, or a
# store that is read-only.
_REFUSALS = (PermissionError, FileNotFoundError, NotADirectoryError, NotImplementedError)
# The same from the libraries of the stores, whose errors are of no common type.
_NAMES_OF_REFUSALS = ("CredentialsError", "CredentialsNotFoundError", "ParamValidationError")
# A scheme with one slash, as in ``s3:/bucket/run``.
_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


class Location:
    """A folder in a store. Names of files in it are relative and use ``/``.

    Every method may raise any exception of the store's library.

    Args:
        url: The URL of the folder.
        file_system: The fsspec file system.
        root: The path of the folder in the file system.
        is_object_store: Whether the store has no folders.
    """

    def __init__(self, url: SecretUrl, file_system: Any, root: str, *, is_object_store: bool):
        # The URL without credentials, for messages.
        self.name = url.redacted
        self._files = file_system
        self._root = root.rstrip("/")
        self._is_object_store = is_object_store

    def is_inside(self, directory: Path) -> bool:
        """Return whether this location is in a directory of the local disk."""
        is_local = self._files.protocol in (_LOCAL, _LOCAL[0])
        return is_local and Path(self._root).resolve().is_relative_to(directory.resolve())

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def list_names(self, folder: str) -> list[str]:
        """Return the names of the files and folders in a folder, or [] if it does not exist."""
        # Another machine may have written there since the last call.
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._path(folder), detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rpartition("/")[2] for path in paths]

    def read(self, name: str) -> bytes:
        """Return the contents of a small file."""
        contents: bytes = self._files.cat_file(self._path(name))
        return contents

    def write(self, name: str, contents: bytes) -> None:
        """Write a small file."""
        self._make_parent_of(name)
        self._files.pipe_file(self._path(name), contents)

    def upload(self, source: Path, name: str, note_progress: Callable[[], None]) -> None:
        """Copy a local file to the store.

        Args:
            source: The local file.
            name: The name of the copy.
            note_progress: Called after each part of the file.
        """
        self._make_parent_of(name)
        part_bytes = max(_PART_BYTES, source.stat().st_size // _MOST_PARTS)
        with (
            open_to_read(source) as file,
            self._files.open(self._path(name), "wb", block_size=part_bytes) as copy,
        ):
            while chunk := file.read(_CHUNK_BYTES):
                copy.write(chunk)
                note_progress()

    def _make_parent_of(self, name: str) -> None:
        if not self._is_object_store:
            parent = self._path(name).rpartition("/")[0]
            self._files.makedirs(parent, exist_ok=True)

    def size_bytes(self, name: str) -> int:
        """Return the size of a file in the store."""
        return int(self._files.size(self._path(name)))

    def open_to_read(self, name: str) -> BinaryIO:
        """Open a file in the store. It can be sought, and reads ahead."""
        file: BinaryIO = self._files.open(self._path(name), "rb", block_size=_PART_BYTES)
        return file

    def download(self, name: str, target: Path) -> None:
        """Copy a file of the store to a local file, and flush it to disk."""
        with self.open_to_read(name) as file, create_file(target, SHARED) as copy:
            while chunk := file.read(_CHUNK_BYTES):
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())

    def remove_file(self, name: str) -> None:
        """Remove a file, if it exists."""
        try:
            self._files.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def remove_folder(self, name: str) -> None:
        """Remove all files below a folder, if there are any."""
        try:
            if self._is_object_store:
                # `rm` would take brackets in a name for a pattern.
                for file in self._files.find(self._path(name)):
                    self._files.rm_file(file)
            else:
                self._files.rm(self._path(name), recursive=True)
        except FileNotFoundError:
            return


def open_location(url: SecretUrl) -> Location:
    """Return the location of a URL, without a request to the store.

    Raises:
        PolicyError: H119 if fsspec does not know the scheme, its package is not installed, or the
            URL is incomplete.
    """
    _check_form(url)
    try:
        return _open(url)
    except ImportError as error:
        scheme = _scheme_of(url)
        raise _unusable(
            url,
            f"the package for {scheme}:// is not installed ({error})",
            _installation_for(scheme),
        ) from error
    except ValueError as error:
        raise _unusable(
            url,
            f"fsspec cannot open it ({describe(error)})",
            "pass a URL such as s3://bucket/run, gs://bucket/run or file:///mnt/disk/run. For"
            " s3://, run `pip install s3fs`.",
        ) from error


def _check_form(url: SecretUrl) -> None:
    """Refuse URLs that fsspec accepts, but that do not mean what they seem to mean.

    Raises:
        PolicyError: H119 for such a URL.
    """
    if "::" in url:
        raise _unusable(
            url,
            "chained URLs with :: are not supported",
            "pass the URL of the store itself, such as s3://bucket/run.",
        )
    if _ONE_SLASH.match(url):
        raise _unusable(
            url,
            "a scheme is followed by two slashes; with one, it would be a folder in the working"
            " directory",
            "write s3://bucket/run, for example.",
        )
    if url.startswith("file://") and not url.startswith("file:///"):
        raise _unusable(
            url,
            "the path in a file:// URL is absolute",
            "write file:///mnt/disk/run, or pass a path without file://.",
        )
    if url.startswith("memory:"):
        raise _unusable(
            url,
            "such a store is lost with the process",
            "pass the URL of a store that outlives it, such as s3://bucket/run.",
        )


def _installation_for(scheme: str) -> str:
    if scheme in ("s3", "s3a"):
        return "pip install s3fs"
    return "pip install fsspec and the package that the message names."


def _open(url: SecretUrl) -> Location:
    # Imported here because only runs with a mirror need it.
    from fsspec.core import url_to_fs

    scheme = _scheme_of(url)
    # Without its caches, fsspec asks the store each time, so that it sees what others write.
    file_system, root = url_to_fs(str(url), use_listings_cache=False, skip_instance_cache=True)
    if not root.strip("/"):
        raise ValueError("the URL names no folder")
    if file_system.protocol in (_LOCAL, _LOCAL[0]) and not Path(root).parent.is_dir():
        # Creating the parent would hide copies on a disk that is not mounted yet.
        raise _unusable(
            url,
            f"the folder {Path(root).parent} does not exist",
            "mount the disk, or create the folder, before training starts.",
        )
    is_object_store = scheme in _OBJECT_STORES
    return Location(url, file_system, root, is_object_store=is_object_store)


def _scheme_of(url: str) -> str:
    scheme, separator, _ = url.partition("://")
    return scheme if separator else _LOCAL[0]


def _unusable(url: SecretUrl, why: str, fix: str) -> PolicyError:
    return PolicyError(f"mirror={url!r}", limit=why, fix=fix, rule="H119")


def refused(location: Location, error: BaseException) -> RunDirectoryError:
    """Return an H321 error for a store that cannot be used before training begins."""
    return RunDirectoryError(
        f"mirror {location.name} cannot be used ({describe(error)})",
        limit=(
            "it must exist, and this process must be allowed to list, read, write and delete files"
            " there"
        ),
        fix="check the URL, the credentials and their permissions, or omit mirror.",
        rule="H321",
    )


def is_refusal(error: BaseException) -> bool:
    """Return whether an error of a store will not go away by waiting."""
    return isinstance(error, _REFUSALS) or type(error).__name__.endswith(_NAMES_OF_REFUSALS)


def describe(error: BaseException) -> str:
    """Return a one-line description of an error, without credentials."""
    (text,) = without_secrets([f"{type(error).__name__}: {error}"])
    return " ".join(text.split())[:_MAX_DETAIL_LENGTH]
