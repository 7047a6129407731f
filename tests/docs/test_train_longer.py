"""The program of `docs/how-to/train-longer.md` continues as the page says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.docs.pages import DOCS, blocks, session, shows
from tests.prepared import run_prepared

_PAGE = DOCS / "how-to" / "train-longer.md"
_TRAIN = next(block.text for block in blocks(_PAGE) if block.title == "train.py")


def run(folder: Path, epochs: int) -> Any:
    return run_prepared(["train.py", str(epochs)], cwd=folder, timeout=300)


def test_a_finished_run_is_continued_with_the_longer_schedule(tmp_path: Path) -> None:
    """The commands of the page print what it shows, and the rates are those of a longer run."""
    (tmp_path / "whole").mkdir()
    for folder in (tmp_path, tmp_path / "whole"):
        (folder / "train.py").write_text(_TRAIN)
    (console,) = (block.text for block in blocks(_PAGE) if block.language == "console")

    for command, shown in session(console):
        program, script, epochs = command.split()
        assert (program, script) == ("python", "train.py")
        ended = run(tmp_path, int(epochs))
        assert ended.returncode == 0, ended.stderr
        assert shows(shown, ended.stdout)

    assert ended.stdout.splitlines() == run(tmp_path / "whole", 4).stdout.splitlines()[2:]
    listed = run_prepared(
        ["-m", "holdfast", "events", "runs/longer", "--kind", "schedule_length_changed", "--json"],
        cwd=tmp_path,
        timeout=300,
    )
    (event,) = json.loads(listed.stdout)["events"]
    assert event["global_step"] == 20


def test_more_epochs_with_the_old_schedule_are_refused(tmp_path: Path) -> None:
    """H105 comes before the next step, and the corrected script continues the run."""
    (tmp_path / "train.py").write_text(_TRAIN.replace("total_steps=epochs", "total_steps=2"))
    assert run(tmp_path, 2).returncode == 0

    refused = run(tmp_path, 3)

    assert refused.returncode == 1
    assert "[H105]" in refused.stderr
    assert refused.stdout == ""
    (tmp_path / "train.py").write_text(_TRAIN)
    assert "ended at step 30" in run(tmp_path, 3).stdout
