"""The manifest: what it says is checked to the last byte, and it is checked itself."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from holdfast.checkpoint.seal import FILE_NAME, Extent, Manifest, read_manifest, verify_files
from holdfast.core.errors import CheckpointError, HoldfastError, RunDirectoryError


def _extent(data: bytes, begin: int, end: int) -> Extent:
    return Extent(begin=begin, end=end, sha256=hashlib.sha256(data[begin:end]).hexdigest(), dtype="U8", shape=(end,))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A checkpoint of one file in two extents."""
    data = bytes(range(100))
    (tmp_path / "data").write_bytes(data)
    manifest = Manifest(
        save_id=3,
        global_step=70,
        unix_seconds=1.5,
        files={"data": {"second": _extent(data, 30, 100), "first": _extent(data, 0, 30)}},
        written_by="1.2.3",
    )
    (tmp_path / FILE_NAME).write_bytes(manifest.to_bytes())
    return tmp_path


def _rewrite(directory: Path, **changes: object) -> None:
    """Write the manifest with other fields and a digest that fits."""
    body = json.loads((directory / FILE_NAME).read_bytes().splitlines()[0])
    text = json.dumps({**body, **changes}).encode()
    (directory / FILE_NAME).write_bytes(text + b"\n" + hashlib.sha256(text).hexdigest().encode() + b"\n")


def test_a_manifest_comes_back_as_it_was_written(directory: Path) -> None:
    """All fields, also the shapes as tuples, survive the file, and the files verify."""
    manifest = read_manifest(directory)
    assert (manifest.save_id, manifest.global_step, manifest.unix_seconds) == (3, 70, 1.5)
    assert manifest.files["data"]["first"].shape == (30,)
    assert manifest.size_bytes() == 100
    assert manifest.to_bytes() == (directory / FILE_NAME).read_bytes()
    verify_files(directory, manifest)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"{}", b"{}\n", b"{}\n" + b"0" * 64 + b"\n", bytes(1000)],
)
def test_a_manifest_without_its_digest_is_refused(content: bytes, directory: Path) -> None:
    """An empty, cut or foreign file is an H311, whatever it holds."""
    (directory / FILE_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match="does not match its own digest") as caught:
        read_manifest(directory)
    assert caught.value.rule == "H311"


def test_a_cut_manifest_is_refused_at_any_length(directory: Path) -> None:
    """No beginning of a manifest passes for a manifest, not even all but the last newline."""
    whole = (directory / FILE_NAME).read_bytes()
    for length in [*range(0, len(whole), 11), *range(len(whole) - 66, len(whole))]:
        (directory / FILE_NAME).write_bytes(whole[:length])
        with pytest.raises(CheckpointError):
            read_manifest(directory)
    (directory / FILE_NAME).write_bytes(whole + b"\n")
    with pytest.raises(CheckpointError):
        read_manifest(directory)


def test_a_directory_without_a_manifest_is_no_checkpoint(directory: Path) -> None:
    """A missing manifest says that the save was not finished, and names the checkpoint."""
    (directory / FILE_NAME).unlink()
    with pytest.raises(CheckpointError, match="the save was not finished") as caught:
        read_manifest(directory)
    assert directory.name in str(caught.value)


def test_a_newer_format_is_not_called_damaged(directory: Path) -> None:
    """A format of the future is an H303 that tells to upgrade, so nobody sets a good checkpoint aside."""
    _rewrite(directory, format=2)
    with pytest.raises(RunDirectoryError, match="format 2") as caught:
        read_manifest(directory)
    assert caught.value.rule == "H303"
    assert "upgrade" in caught.value.fix


@pytest.mark.parametrize("change", [b"", bytes(range(99)), bytes(range(100)) + b"x"])
def test_a_file_of_another_size_is_refused(change: bytes, directory: Path) -> None:
    """A cut or a longer file is refused by its size."""
    manifest = read_manifest(directory)
    (directory / "data").write_bytes(change)
    with pytest.raises(CheckpointError, match=f"data has {len(change)} bytes and the manifest says 100"):
        verify_files(directory, manifest)


@pytest.mark.parametrize(("place", "name"), [(0, "first"), (29, "first"), (30, "second"), (99, "second")])
def test_a_changed_byte_names_its_tensor(place: int, name: str, directory: Path) -> None:
    """The error tells which tensor of which file is damaged."""
    data = bytearray(range(100))
    data[place] ^= 1
    (directory / "data").write_bytes(data)
    with pytest.raises(CheckpointError, match=f"data: {name} has sha256") as caught:
        verify_files(directory, read_manifest(directory))
    assert caught.value.rule == "H311"


def test_a_missing_file_is_refused(directory: Path) -> None:
    """A file that the manifest names and that is gone, or is a directory, makes the checkpoint damaged."""
    manifest = read_manifest(directory)
    (directory / "data").unlink()
    with pytest.raises(HoldfastError, match="data cannot be read"):
        verify_files(directory, manifest)
    (directory / "data").mkdir()
    with pytest.raises(CheckpointError):
        verify_files(directory, manifest)
