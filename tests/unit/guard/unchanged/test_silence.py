"""While finished loops are skipped, the script prints and writes nothing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from holdfast.guard.unchanged.silence import Silence


def test_nothing_is_printed_or_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Prints, saved tensors, written, copied and removed files have no effect until the end."""
    kept = tmp_path / "kept.txt"
    kept.write_text("kept")
    silence = Silence()
    silence.begin()

    os.write(1, b"printed")
    torch.save(torch.zeros(1), tmp_path / "weights.pt")
    (tmp_path / "new.txt").write_text("new")
    kept.write_text("lost")
    shutil.copyfile(kept, tmp_path / "copy.txt")
    kept.unlink()
    os.remove(kept)  # noqa: PTH107 - as scripts do
    silence.end()

    assert kept.read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    assert "printed" not in capfd.readouterr().out


def test_output_is_let_through_afterwards(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """After the end, everything works as before, however often begin and end are called."""
    silence = Silence()
    silence.begin()
    silence.begin()
    silence.end()
    silence.end()

    os.write(1, b"printed")
    torch.save(torch.zeros(1), tmp_path / "weights.pt")

    assert (tmp_path / "weights.pt").exists()
    assert "printed" in capfd.readouterr().out


def test_metrics_are_not_logged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the function of W&B nor the method of a run logs anything until the end."""
    logged = []

    class Run:
        def log(self, metrics: dict[str, float]) -> None:
            logged.append(metrics)

    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(log=run.log))
    monkeypatch.setitem(sys.modules, "wandb.sdk.wandb_run", SimpleNamespace(Run=Run))
    silence = Silence()
    silence.begin()

    sys.modules["wandb"].log({"loss": 1.0})
    run.log({"loss": 1.0})
    silence.end()
    run.log({"loss": 2.0})

    assert logged == [{"loss": 2.0}]
