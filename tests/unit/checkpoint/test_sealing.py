"""Digests for checkpoints that somebody else wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast.checkpoint.seal import begin, check, is_sealed, move_aside, newest_good, seal, unseal, verify
from holdfast.core.errors import CheckpointError
from holdfast.testing import flip_bit


def checkpoint(folder: Path, step: int) -> Path:
    """Write a checkpoint as a framework would, and seal it."""
    path = folder / f"checkpoint-{step}"
    (path / "inner").mkdir(parents=True)
    save_file({"weight": torch.ones(3, 2), "bias": torch.zeros(2)}, path / "model.safetensors")
    (path / "inner" / "state.json").write_text("{}")
    (path / "empty").touch()
    (path / "bad.safetensors").write_bytes(b"no tensors here")
    seal(path, global_step=step, unix_seconds=1.0)
    return path


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """Whatever bit of whatever file is flipped, the manifest's own among them, verification fails."""
    path = checkpoint(tmp_path, 1)
    manifest = verify(path)
    assert set(manifest.files["model.safetensors"]) == {"header of the file", "weight", "bias"}
    assert manifest.files["model.safetensors"]["weight"].shape == (3, 2)
    for file in (each for each in path.rglob("*") if each.is_file()):
        for bit in range(0, 8 * file.stat().st_size, 97):
            flip_bit(file, bit)
            with pytest.raises(CheckpointError, match="H311"):
                verify(path)
            flip_bit(file, bit)
    verify(path)


def test_a_missing_or_a_longer_file_is_found(tmp_path: Path) -> None:
    """A file that is gone, cut or longer than it was does not verify; one that was added does not matter."""
    path = checkpoint(tmp_path, 1)
    (path / "notes.txt").write_text("added later")
    verify(path)
    with (path / "inner" / "state.json").open("a") as file:
        file.write(" ")
    with pytest.raises(CheckpointError, match=r"inner/state.json|state.json"):
        verify(path)
    (path / "inner" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"state\.json"):
        verify(path)


def test_the_newest_that_verifies_is_taken(tmp_path: Path) -> None:
    """Damaged and unfinished ones are passed over, with the reason; if none is left, that is an error."""
    old, middle, new = (checkpoint(tmp_path, step) for step in (1, 2, 3))
    unseal(new)
    flip_bit(middle / "model.safetensors", 700)
    good, refused = newest_good([new, middle, old])
    assert good == old
    assert [path for path, _ in refused] == [new, middle]
    assert "not finished" in refused[0][1]
    with pytest.raises(CheckpointError, match="H312"):
        newest_good([new, middle])
    assert move_aside(middle).name == "damaged-checkpoint-2"


def test_a_folder_from_before_is_taken_as_it_is(tmp_path: Path) -> None:
    """Where no checkpoint was ever sealed the newest is taken; an empty folder has none."""
    first, second = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    unseal(first)
    unseal(second)
    assert not is_sealed(second)
    assert newest_good([second, first]) == (second, [])
    assert newest_good([]) == (None, [])


def test_a_save_that_was_begun_is_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    """What a killed first save left is refused, one from before is taken in its place, else there is none."""
    empty, torn, before = (tmp_path / f"checkpoint-{step}" for step in (3, 2, 1))
    empty.mkdir()  # its first moment
    begin(torn)
    for path in (torn, before):
        path.mkdir(exist_ok=True)
        (path / "model.safetensors").write_bytes(b"half")
    good, refused = newest_good([empty, torn, before])
    assert (good, [path for path, _ in refused]) == (before, [empty, torn])
    assert all("not finished" in why for _, why in refused)
    check(before)
    for path in (empty, torn):
        with pytest.raises(CheckpointError, match="not finished"):
            check(path)
    assert newest_good([empty, torn]) == (None, refused)


def test_a_whole_one_that_is_written_once_more_is_unfinished_until_it_is_sealed(tmp_path: Path) -> None:
    """Torn in that it is refused, and that a whole one was lost is an error, however often it is begun."""
    old, new = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    before = verify(new)
    for _ in range(2):
        begin(new)
        assert not is_sealed(new)
        assert newest_good([new, old])[0] == old
        with pytest.raises(CheckpointError, match="H312"):
            newest_good([new])
    assert seal(new, global_step=2, unix_seconds=1.0).files == before.files
    assert newest_good([new, old]) == (new, [])
    assert {path.name for path in new.iterdir()} == {*before.files, "inner", "manifest.json"} - {"inner/state.json"}
