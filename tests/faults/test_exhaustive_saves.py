"""`holdfast chaos --exhaustive-saves` kills the process before each change that a save makes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.faults.test_chaos import forking
from tests.prepared import WITHOUT_HOLDFAST

from holdfast.chaos import trials
from holdfast.chaos.campaign import Campaign
from holdfast.chaos.results import CampaignReport
from holdfast.core.errors import PolicyError

_SCRIPT = """
import json
import os
import torch

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
first = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    first = saved["step"]
for step in range(first, 6):
    loss = model(torch.ones(2, 3) * step).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 2:
        SAVE
"""
_RENAMED = """torch.save({"model": model.state_dict(), "step": step + 1}, "last.tmp")
        os.replace("last.tmp", "last.pt")"""
_TWO_FILES = """torch.save({"model": model.state_dict(), "step": step + 1}, "last.pt")
        torch.save(step, "step.tmp")
        os.replace("step.tmp", "step.pt")"""
_COPIED = """torch.save({"model": model.state_dict(), "step": step + 1}, "new.pt")
        os.system("cp new.pt last.pt")"""
_LOGGED = """steps = json.loads(open("log.json").read()) if os.path.exists("log.json") else []
        with open("log.json", "w") as file:
            json.dump([*steps, step], file)
        torch.save({"model": model.state_dict(), "step": step + 1}, "last.tmp")
        os.replace("last.tmp", "last.pt")"""
_IN_PLACE = """torch.save({"model": model.state_dict(), "step": step + 1}, "last.pt")"""
_GUARDED = """
import time
import holdfast
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loader = holdfast.DataLoader(torch.arange(32.0), batch_size=4)
guard = holdfast.Guard(
    "run", model=model, optimizer=optimizer, loader=loader,
    save_interval_steps=2, async_save=False, keep_latest_k=2,
)
for batch in guard.batches(max_epochs=1):
    guard.step(batch, lambda part: model(part[:, None].expand(-1, 4)).square().mean())
"""


def tried(origin: Path, script: str) -> CampaignReport:
    """Return the report of a campaign with these faults only."""
    (origin / "train.py").write_text(script)
    command = [sys.executable, "train.py"]
    # The script evaluates nothing, so there are no faults of this kind.
    return Campaign(command, origin=origin, only=["eval"], exhaustive_saves=True).run()


@pytest.fixture(autouse=True)
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the commands from a process that has torch loaded."""
    monkeypatch.setattr(trials, "subprocess", forking())


@pytest.mark.slow
def test_a_save_that_renames_survives_every_kill(tmp_path: Path) -> None:
    """The file is written beside the old one, so the run resumes after a kill at any call."""
    report = tried(tmp_path, _SCRIPT.replace("SAVE", _RENAMED))

    assert [row.result for row in report.rows] == ["exact"] * len(report.rows)
    assert "write to last.tmp" in report.rows[0].fault
    assert any("rename last.tmp to last.pt" in row.fault for row in report.rows)


@pytest.mark.slow
def test_a_save_in_place_is_found(tmp_path: Path) -> None:
    """A kill between emptying the file and writing it leaves no checkpoint to resume from."""
    report = tried(tmp_path, _SCRIPT.replace("SAVE", _IN_PLACE))

    assert report.rows[0].result == "does not survive"
    assert "write to last.pt" in report.rows[0].fault


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save", "change"),
    [
        (_TWO_FILES, "write to last.pt"),
        (_COPIED, "write to last.pt"),
        (_LOGGED, "write to log.json"),
    ],
    ids=["first of two files", "copied by another process", "log before the save"],
)
def test_every_file_that_a_save_changes_is_tried(tmp_path: Path, save: str, change: str) -> None:
    """The unsafe change is not in the last call of `torch.save`, but before or after it."""
    report = tried(tmp_path, _SCRIPT.replace("SAVE", save))

    results = {row.fault.partition(": ")[2]: row.result for row in reversed(report.rows)}
    assert results[change] == "does not survive"


@pytest.mark.slow
def test_a_killed_call_is_never_made(tmp_path: Path) -> None:
    """Before the rename, the older checkpoint is in place, so its steps are repeated."""
    report = tried(tmp_path, _SCRIPT.replace("SAVE", _RENAMED))

    (row,) = [row for row in report.rows if "rename last.tmp" in row.fault]
    assert row.comparison["steps_again"] == 2


@pytest.mark.slow
def test_a_guard_survives_every_kill_in_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This includes the removal of old checkpoints and the rename of the new one."""
    monkeypatch.setattr(trials, "subprocess", forking(loaded=WITHOUT_HOLDFAST))

    report = tried(tmp_path, _GUARDED)

    assert {row.result for row in report.rows} == {"exact"}
    changes = " ".join(row.fault for row in report.rows)
    assert "model.safetensors" in changes
    assert "rename" in changes
    assert "remove" in changes


@pytest.mark.slow
def test_a_run_without_a_save_is_refused(tmp_path: Path) -> None:
    """There is nothing to watch in a script that saves only after its last step, or never."""
    with pytest.raises(PolicyError) as raised:
        tried(tmp_path, _SCRIPT.replace("SAVE", "pass"))

    assert raised.value.rule == "H729"
