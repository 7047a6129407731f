"""The commands as a user calls them: what they print, as text and as JSON, and how they exit."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import holdfast
from holdfast.cli import checkpoints
from holdfast.cli.main import make_app
from holdfast.testing import flip_bit

app = make_app()


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = [torch.ones(4, 2)] * 6
    with holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=optimizer,
        loader=data,
        save_interval_steps=2,
        async_save=False,
    ) as guard:
        for batch in guard.batches(max_epochs=1):
            guard.step(batch, lambda x: model(x).square().mean())
    return tmp_path


def test_checkpoints_lists_newest_first(run_dir):
    """The table and the JSON hold name, step, size, time and status of each checkpoint."""
    listed = call("checkpoints", run_dir)
    assert listed.exit_code == 0
    names = re.findall(r"\d{6}-step\d{8}", listed.output)
    assert names == ["000004-step00000006", "000003-step00000004", "000002-step00000002"]
    newest, *_ = json.loads(call("checkpoints", run_dir, "--json").output)["checkpoints"]
    assert (newest["global_step"], newest["status"], newest["written_by"]) == (
        6,
        "complete",
        holdfast.__version__,
    )
    assert newest["size_bytes"] > 0
    verified = json.loads(call("checkpoints", run_dir, "--verify", "--json").output)["checkpoints"]
    assert [row["status"] for row in verified] == ["verified"] * 3


def test_a_flipped_bit_is_found_and_is_exit_code_1(run_dir):
    """--verify names the file and the tensor that is damaged, and the others still verify."""
    file = run_dir / "checkpoints/000003-step00000004/model.safetensors"
    flip_bit(file, 8 * file.stat().st_size - 3)
    verified = call("checkpoints", run_dir, "--verify", "--json")
    assert verified.exit_code == 1
    status = [row["status"] for row in json.loads(verified.output)["checkpoints"]]
    assert status[0] == status[2] == "verified"
    assert status[1].startswith("damaged: model.safetensors")
    assert "SHA-256" in call("checkpoints", run_dir, "--verify").output


def test_a_checkpoint_that_a_live_run_removes_meanwhile_is_left_out(run_dir, monkeypatch):
    """What was there when the list was made and is gone when it is read is no damaged
    checkpoint.
    """
    read = checkpoints._row

    def remove_and_read(entry, **given):
        if entry.global_step == 2:
            shutil.rmtree(entry.path)
        return read(entry, **given)

    monkeypatch.setattr(checkpoints, "_row", remove_and_read)
    listed = call("checkpoints", run_dir, "--json")
    assert listed.exit_code == 0, listed.output
    steps = [row["global_step"] for row in json.loads(listed.output)["checkpoints"]]
    assert steps == [6, 4]


@pytest.mark.parametrize("arguments", [["checkpoints", "nowhere"], ["explain", "H999"]])
def test_wrong_use_is_a_message_and_exit_code_2(arguments):
    """An error says what, the limit and the fix, as text or JSON, and never shows a traceback."""
    failed = call(*arguments)
    assert failed.exit_code == 2
    assert "Fix: " in failed.output
    assert "Traceback" not in failed.output
    error = json.loads(call(*arguments, "--json").output)["error"]
    assert {"rule", "what", "limit", "fix"} == set(error)


def test_an_export_into_no_folder_is_an_error_of_that_path(run_dir):
    """Not of the file that is written first."""
    path = run_dir / "nowhere" / "weights.safetensors"
    error = json.loads(call("checkpoints", run_dir, "--export", path, "--json").output)["error"]
    assert (error["rule"], f"'{path}'" in error["what"]) == ("H704", True)


def test_the_version_is_printed():
    """--version prints the version of the package."""
    assert call("--version").output == f"holdfast {holdfast.__version__}\n"
