"""A batch that is larger than all that there is to learn, in each recipe."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from recipes.tacotron2.train import CLIPS

ROWS = [{"document": f"There are {number} of them here.", "summary": f"Count {number}."} for number in range(9)]


@pytest.mark.parametrize(
    ("recipe", "options", "there"),
    [
        ("classifier", (), "1437 images"),
        ("gan", (), "1437 images"),
        ("pegasus", ("--train-file", "rows.jsonl", "--validation-file", "rows.jsonl"), "9 records"),
        ("separation", ("--speakers", "3", "--sentences", "5"), "15 recordings or mixtures"),
        ("asr", ("--speakers", "3", "--sentences", "5"), "15 utterances"),
        ("tacotron2", ("--data", str(CLIPS)), "7 utterances"),
    ],
)
def test_a_batch_larger_than_the_data_is_refused_before_there_is_a_run(
    recipe: str,
    options: tuple[str, ...],
    there: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With what there is and the largest batch that it makes, and code 2; nothing is made for the run."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"recipes.{recipe}.train").main(
            [*options, "--batch-size", "100000", "--run-dir", "run"]
        )
    assert ended.value.code == 2
    expected = f"--batch-size 100000; there are {there} to learn\nFix: pass {there.split()[0]} or less"
    assert expected in capsys.readouterr().err
    assert not Path("run").exists()
