"""What both recipes of speech refuse: sizes that make no training."""

from __future__ import annotations

import pytest
from recipes.asr import train as asr
from recipes.separation import train as separation

SMALL = (
    "--words",
    "2",
    "--batch-size",
    "4",
    "--max-steps",
    "10",
    "--eval-interval-steps",
    "5",
    "--speakers",
    "3",
)
RECIPES = {
    "asr": (asr, ("--sentences", "8")),
    "separation": (separation, ("--sentences", "4", "--seconds", "0.5")),
}


@pytest.mark.parametrize(
    ("name", "option", "value", "said"),
    [
        ("asr", "--channels", 17, "an even number"),
        ("asr", "--channels", 0, "at least 2"),
        ("asr", "--channels", 10**15, "a model of these sizes cannot be made here"),
        ("asr", "--n-mels", 0, "at least 1"),
        ("asr", "--n-mels", 400, "at most 256"),
        ("asr", "--dropout", 1, "below 1"),
        ("asr", "--learning-rate", 0, "above 0"),
        ("asr", "--batch-size", 0, "at least 1"),
        ("asr", "--eval-interval-steps", 0, "at least 1"),
        ("asr", "--sample-rate", 100, "at least 1000"),
        ("asr", "--quarantine", -1, "H607"),
        ("asr", "--speakers", 10**9, "at most 10000"),
        ("asr", "--words", 10**9, "at most 1000"),
        ("separation", "--length", 15, "an even number"),
        ("separation", "--length", 0, "at least 2"),
        ("separation", "--hidden", 0, "at least 1"),
        ("separation", "--hidden", 10**17, "a model of these sizes cannot be made here"),
        ("separation", "--seconds", 0.001, "at least 0.002"),
        ("separation", "--speakers", 1, "at least 2"),
        ("separation", "--seconds", 10**9, "at most 600"),
        ("separation", "--sample-rate", 10**9, "at most 384000"),
        ("separation", "--batch-size", 13, "pass 12 or less"),
        ("separation", "--quarantine", -1, "H607"),
    ],
)
def test_sizes_that_make_no_model_are_refused_before_there_is_a_run(
    name, option, value, said, tmp_path, capsys
):
    """The message says what is needed and what to do, and no run directory is made."""
    with pytest.raises(SystemExit) as ended:
        recipe, small = RECIPES[name]
        places = ("--run-dir", tmp_path / "run", "--speech-dir", tmp_path / "speech")
        recipe.main([str(each) for each in (*SMALL, *small, *places, option, value)])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert option.removeprefix("--") in told or "sizes" in told
    assert said in told
    assert "Fix: " in told
    assert not (tmp_path / "run").exists()
