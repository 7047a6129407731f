"""Damaged files and full disks: nothing bad is loaded, nothing good is lost, training goes on."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from recipes.demo.small_disk import command_with_small_disk
from tests.faults.small_run import same, train

import holdfast
from holdfast.testing import flip_bit


@pytest.mark.slow
def test_no_flipped_bit_is_ever_loaded(trained, tmp_path):
    """Any bit of any file.

    The checkpoint is set aside with an event, and the run goes on from the one before.
    """
    trained(tmp_path / "good")
    _, expected = train(tmp_path / "undisturbed", 9)
    chance = random.Random(3)
    each_file = sorted(
        each.name for each in max((tmp_path / "good" / "checkpoints").iterdir()).iterdir()
    )
    for name in each_file * 3:
        run_dir = tmp_path / "run"
        shutil.copytree(tmp_path / "good", run_dir)
        newest = max((run_dir / "checkpoints").iterdir())
        file, bit = newest / name, chance.randrange(8 * (newest / name).stat().st_size)
        flip_bit(file, bit)
        guard, model = train(run_dir, 9)
        (found,) = [event for event in guard.events() if event.kind == "checkpoint_damaged"]
        assert found.data["checkpoint"] == newest.name, (file, bit)
        assert guard.resumed_from is not None
        assert guard.resumed_from.name.endswith("step00000004")
        assert same(model, expected)
        shutil.rmtree(run_dir)


def test_nothing_that_verifies_is_an_error_and_not_a_silent_new_start(trained, tmp_path):
    """With every checkpoint damaged the run refuses to begin from scratch, again and again."""
    trained(tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        (path / "optimizer.safetensors").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(holdfast.CheckpointError, match="H312"):
            train(tmp_path, 9)


@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors", "state.json"])
def test_a_missing_file_is_damage(trained, tmp_path, name):
    """A checkpoint that lacks a file is set aside like one with a flipped bit."""
    trained(tmp_path)
    (max((tmp_path / "checkpoints").iterdir()) / name).unlink()
    guard, _ = train(tmp_path, 6)
    assert guard.resumed_from is not None
    assert guard.resumed_from.name.endswith("step00000004")


def test_the_leftovers_of_a_killed_save_are_removed(trained, tmp_path):
    """A draft that was never renamed is no checkpoint and does not stay."""
    trained(tmp_path)
    draft = tmp_path / "checkpoints" / ".tmp-000009-step00000099"
    shutil.copytree(max((tmp_path / "checkpoints").iterdir()), draft)
    guard, _ = train(tmp_path, 6)
    assert guard.global_step == 6
    assert not draft.exists()


@pytest.mark.slow
def test_a_full_disk_stops_no_training(start, undisturbed, small_disk):
    """Saves fail with an event while the disk is full, older checkpoints stay, and later saves
    succeed.
    """
    run = start(
        command=command_with_small_disk(small_disk, []),
        run_dir=str(small_disk / "run"),
        fill_at=8,
        free_at=23,
        filler=str(small_disk / "filler"),
        async_save=False,
    )
    end = run.end()
    failed = [event for event in end["events"] if event[0] == "save_failed"]
    saved = [event[1] for event in end["events"] if event[0] == "checkpoint_saved"]
    assert [event[1] for event in failed] == [10, 15, 20]
    assert all("No space left on device" in event[2]["error"] for event in failed)
    assert saved == [0, 5, 25, 30, 32]
    assert end["digest"] == undisturbed["digest"]


@pytest.mark.slow
def test_a_kill_on_a_full_disk_resumes_from_the_last_good_checkpoint(
    undisturbed, small_disk, tmp_path
):
    """Killed while the disk is full, and started again on the full disk, the run goes on from
    what was saved.
    """
    # Both lives see the same small disk, so they are children of one shell that has it mounted.
    program = str(Path(__file__).parent / "programs" / "train.py")
    common = {
        "run_dir": str(small_disk / "run"),
        "filler": str(small_disk / "filler"),
        "async_save": False,
    }
    requests = [
        json.dumps({**common, "trace": str(tmp_path / "1"), "fill_at": 8, "die_at": 13}),
        json.dumps({**common, "trace": str(tmp_path / "2")}),
    ]
    script = "; ".join(f"{sys.executable} {program} '{request}'" for request in requests)
    ended = subprocess.run(
        command_with_small_disk(small_disk, ["sh", "-c", script]) or [],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    first, second = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("1", "2")
    )
    assert first[-1] == {"step": 13}, "it was killed"
    assert second[0]["resumed_from"] == "000002-step00000005", ended.stdout + ended.stderr
    assert second[-1]["digest"] == undisturbed["digest"]
