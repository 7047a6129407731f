"""While finished loops are skipped, the script prints and writes nothing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from holdfast.guard.unchanged.replaying.silence import Silence


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


def test_lines_are_appended_once(tmp_path: Path) -> None:
    """A log that is open already gets no line twice, one that was emptied is written again."""
    with (tmp_path / "log").open("a") as log, (tmp_path / "results").open("w") as results:
        log.write("before\n")
        silence = Silence()
        silence.begin()
        log.write("again\n")
        results.write("again\n")
        silence.end()
        log.write("after\n")

    assert (tmp_path / "log").read_text() == "before\nafter\n"
    assert (tmp_path / "results").read_text() == "again\n"


def test_existing_folders_and_links_do_not_end_the_script(tmp_path: Path) -> None:
    """The earlier attempt has made them, and removing the old link has no effect meanwhile."""
    folder = tmp_path / "epoch1"
    folder.mkdir()
    link = tmp_path / "latest"
    link.symlink_to(folder)
    silence = Silence()
    silence.begin()

    folder.mkdir()
    link.unlink()
    os.symlink(folder, link)  # noqa: PTH211 - as scripts do
    silence.end()

    assert link.is_symlink()
    with pytest.raises(FileExistsError):
        folder.mkdir()
