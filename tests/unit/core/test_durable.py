"""Durable writes: whole or not there, whatever fails in between."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.core.durable import rename_directory, replace_file, write_file


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Let the kernel refuse writes beyond this size of a file, in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    """After a replacement there is the new content and no temporary file."""
    path = tmp_path / "state.json"
    replace_file(path, b"old, and longer")
    replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert _names(tmp_path) == ["state.json"]


def test_the_old_file_survives_a_write_that_fails(tmp_path: Path) -> None:
    """When the disk refuses the new bytes, the old ones are untouched and nothing is left
    behind.
    """
    path = tmp_path / "state.json"
    replace_file(path, b"old")
    with largest_file(4096), pytest.raises(OSError) as caught:
        replace_file(path, b"x" * 10_000)
    assert caught.value.errno == errno.EFBIG
    assert path.read_bytes() == b"old"
    assert _names(tmp_path) == ["state.json"]


def test_the_target_survives_a_rename_that_fails(tmp_path: Path) -> None:
    """When the last step, the rename, is refused, the target stays and the temporary file goes."""
    target = tmp_path / "state.json"
    target.mkdir()
    with pytest.raises(OSError):
        replace_file(target, b"new")
    assert target.is_dir()
    assert _names(tmp_path) == ["state.json"]


def test_a_directory_never_replaces_another_one(tmp_path: Path) -> None:
    """A rename onto a directory with files is refused, and both stay as they were."""
    source, target = tmp_path / "draft", tmp_path / "final"
    for directory in (source, target):
        directory.mkdir()
        write_file(directory / "data", directory.name.encode())
    with pytest.raises(OSError):
        rename_directory(source, target)
    assert (source / "data").read_bytes() == b"draft"
    assert (target / "data").read_bytes() == b"final"
