"""The seal and the search: no changed byte passes, and the newest that verifies is taken."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast.checkpoint.manifest import manifest_of, read_manifest
from holdfast.checkpoint.newest import move_aside, newest_good
from holdfast.checkpoint.seal import begin, check, is_sealed, seal
from holdfast.checkpoint.verify import verify
from holdfast.core.errors import CheckpointError, HoldfastError, RunDirectoryError
from holdfast.testing import flip_bit


def checkpoint(folder: Path, step: int, kind: str = "folder") -> Path:
    """Write a checkpoint as a framework would, and seal it."""
    path = folder / f"checkpoint-{step}"
    if kind == "file":
        path.write_bytes(bytes(range(100)))
    else:
        (path / "inner").mkdir(parents=True)
        save_file({"weight": torch.ones(3, 2), "bias": torch.zeros(2)}, path / "model.safetensors")
        (path / "inner" / "state.json").write_text("{}")
        (path / "empty").touch()
        (path / "bad.safetensors").write_bytes(b"no tensors here")
    seal(path, global_step=step, unix_seconds=1.5)
    return path


def search(paths: Iterable[Path]) -> tuple[Path | None, list[tuple[Path, str]]]:
    refused: list[tuple[Path, str]] = []
    return newest_good(paths, lambda path, why: refused.append((path, why))), refused


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_every_flipped_bit_is_found(kind: str, tmp_path: Path) -> None:
    """Whatever bit of whatever file is flipped, the manifest's own among them, verification
    fails.
    """
    path = checkpoint(tmp_path, 7, kind)
    manifest = verify(path)
    assert (manifest.global_step, manifest.unix_seconds) == (7, 1.5)
    assert manifest.to_bytes() == manifest_of(path).read_bytes()
    if kind == "folder":
        assert set(manifest.files["model.safetensors"]) == {"header of the file", "weight", "bias"}
        assert manifest.files["model.safetensors"]["weight"].shape == (3, 2)
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert manifest.size_bytes() == sum(
        each.stat().st_size for each in files if each != manifest_of(path)
    )
    for file in files:
        for bit in range(0, 8 * file.stat().st_size, 97):
            flip_bit(file, bit)
            with pytest.raises(CheckpointError, match="H311"):
                verify(path)
            flip_bit(file, bit)
    verify(path)


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    """A changed byte names its tensor, another size both sizes.

    A file that was added later does not matter.
    """
    path = checkpoint(tmp_path, 1)
    (path / "notes.txt").write_text("added later")
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + b"\1")
    with pytest.raises(CheckpointError, match=r"model.safetensors: (weight|bias) has SHA-256"):
        verify(path)
    for other in (whole[:-1], whole + b"x", b""):
        weights.write_bytes(other)
        with pytest.raises(
            CheckpointError, match=f"has {len(other)} bytes, but the manifest expects {len(whole)}"
        ):
            verify(path)
    weights.unlink()
    with pytest.raises(HoldfastError, match=r"model\.safetensors cannot be read"):
        verify(path)
    weights.mkdir()
    with pytest.raises(CheckpointError):
        verify(path)


def test_no_part_of_a_manifest_passes_for_one(tmp_path: Path) -> None:
    """Cut at any length, empty, longer or foreign it is an H311.

    A newer format is an H303 that says to upgrade.
    """
    path = checkpoint(tmp_path, 1)
    manifest = path / "manifest.json"
    whole = manifest.read_bytes()
    cut = [
        whole[:length]
        for length in [*range(0, len(whole), 11), *range(len(whole) - 66, len(whole))]
    ]
    for content in [*cut, whole + b"\n", b"\n", b"{}\n" + b"0" * 64 + b"\n", bytes(1000)]:
        manifest.write_bytes(content)
        with pytest.raises(CheckpointError, match="does not match its own digest"):
            read_manifest(path)
    newer = json.dumps({**json.loads(whole.splitlines()[0]), "format": 2}).encode()
    manifest.write_bytes(newer + b"\n" + hashlib.sha256(newer).hexdigest().encode() + b"\n")
    with pytest.raises(RunDirectoryError, match=r"format 2[^$]*upgrade[^$]*H303"):
        read_manifest(path)
    manifest.unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-1: manifest\.json is missing"):
        read_manifest(path)


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_the_newest_that_verifies_is_taken(kind: str, tmp_path: Path) -> None:
    """Damaged and unfinished ones are passed over, with the reason.

    If none is left, that is an error.
    """
    old, middle, new = (checkpoint(tmp_path, step, kind) for step in (1, 2, 3))
    manifest_of(new).unlink()
    flip_bit(middle / "model.safetensors" if kind == "folder" else middle, 700)
    good, refused = search([new, middle, old])
    assert good == old
    assert [path for path, _ in refused] == [new, middle]
    assert "did not finish" in refused[0][1]
    with pytest.raises(CheckpointError, match="H312"):
        search([new, middle])
    manifest_of(middle).unlink()
    with pytest.raises(CheckpointError, match="H312"):
        newest_good([new, middle], lambda *_: None, complete=True)
    assert search([new, middle]) == (new, []), "none was ever sealed, so it is from before holdfast"
    assert search([]) == (None, [])
    assert move_aside(middle).name == "damaged-checkpoint-2"


def test_a_save_that_was_begun_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    """What a killed first save left is refused, one from before is taken in its place, else
    there is none.
    """
    empty, torn, before = (tmp_path / f"checkpoint-{step}" for step in (3, 2, 1))
    empty.mkdir()  # its first moment
    begin(torn)
    for path in (torn, before):
        path.mkdir(exist_ok=True)
        (path / "model.safetensors").write_bytes(b"half")
    good, refused = search([empty, torn, before])
    assert (good, [path for path, _ in refused]) == (before, [empty, torn])
    assert all("did not finish" in why for _, why in refused)
    check(before)
    for path in (empty, torn):
        with pytest.raises(CheckpointError, match="did not finish"):
            check(path)
    assert search([empty, torn]) == (None, refused)


def test_a_whole_one_that_is_written_once_more_is_unfinished_until_it_is_sealed(
    tmp_path: Path,
) -> None:
    """Torn in that it is refused, and that a whole one was lost is an error, however often it is
    begun.
    """
    old, new = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    before = verify(new)
    for _ in range(2):
        begin(new)
        assert not is_sealed(new)
        assert search([new, old])[0] == old
        with pytest.raises(CheckpointError, match="H312"):
            search([new])
    seal(new, global_step=2, unix_seconds=1.0)
    assert verify(new).files == before.files
    assert search([new, old]) == (new, [])
    assert {path.name for path in new.iterdir()} == {*before.files, "inner", "manifest.json"} - {
        "inner/state.json"
    }


def test_a_folder_that_cannot_be_listed_is_an_error_with_a_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rights that are missing for a folder without a manifest give H307 and change nothing."""
    folder = tmp_path / "step-1"
    folder.mkdir()

    def refuse(path: Path) -> Iterator[Path]:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(RunDirectoryError) as caught:
        newest_good([folder], lambda *_: None, renames=True)
    assert caught.value.rule == "H307"
    assert folder.is_dir()


def test_a_header_is_no_tensor(tmp_path: Path) -> None:
    """A manifest that gives the header of a file a type and a shape is not one of ours."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
    seal(folder, global_step=1, unix_seconds=2.0)
    tree = json.loads((folder / "manifest.json").read_bytes().splitlines()[0])
    tree["files"]["model.safetensors"]["header of the file"] |= {"dtype": "U8", "shape": [1]}
    body = json.dumps(tree).encode()
    digest = hashlib.sha256(body).hexdigest().encode()
    (folder / "manifest.json").write_bytes(body + b"\n" + digest + b"\n")
    with pytest.raises(CheckpointError) as caught:
        verify(folder)
    assert caught.value.rule == "H311"
