"""What both recipes of speech promise alike: they go on as if never stopped, and refuse what makes no training."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from recipes.asr import train as asr
from recipes.separation import train as separation
from recipes.training import Training

_COMMON = ("--words", "2", "--batch-size", "4", "--max-steps", "10", "--eval-interval-steps", "5")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe made small.

    Args:
        main: Its command.
        small: Its options.
        picture: Name of its pictures.
        figure: One that is above 0.
    """

    main: Callable[..., dict[str, Any]]
    small: tuple[str, ...]
    picture: str
    figure: str

    def run(self, run_dir: Path, *options: object) -> dict[str, Any]:
        return self.main([*_COMMON, *self.small, "--run-dir", str(run_dir), *map(str, options)])


RECIPES = {
    "asr": Recipe(
        main=asr.main, picture="hearing", figure="character_error_rate",
        small=("--speakers", "2", "--sentences", "8", "--channels", "16", "--n-mels", "20"),
    ),
    "separation": Recipe(
        main=separation.main, picture="separated", figure="si_snr_improvement_db",
        small=(
            *("--speakers", "3", "--sentences", "4", "--filters", "16", "--bottleneck", "8", "--hidden", "16"),
            *("--blocks", "3", "--seconds", "0.5"),
        ),
    ),
}  # fmt: skip


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return RECIPES[request.param]


def test_a_run_that_was_stopped_ends_as_one_that_was_not(recipe, tmp_path, monkeypatch):
    """Stopped after step 4 and begun again, a run ends with the same weights, figures and pictures."""
    whole = recipe.run(tmp_path / "whole")
    show = Training.show

    def show_and_stop(self: Any, **values: Any) -> None:
        show(self, **values)
        if self.guard.global_step == 4:
            self.guard.request_stop("test")

    monkeypatch.setattr(Training, "show", show_and_stop)
    assert recipe.run(tmp_path / "parted")["global_step"] == 4
    monkeypatch.undo()
    parted = recipe.run(tmp_path / "parted", "--resume")
    assert parted["weights"] == whole["weights"]
    assert parted["figures"] == whole["figures"]
    assert parted["statistics"]["resumes"] == 1
    assert recipe.figure in whole["figures"]
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["weights"] == whole["weights"]
    assert (tmp_path / "whole" / "images" / recipe.picture / "10.png").is_file()


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
def test_sizes_that_make_no_model_are_refused_before_there_is_a_run(name, option, value, said, tmp_path, capsys):
    """The message says what is needed and what to do, and no run directory is made."""
    with pytest.raises(SystemExit) as ended:
        RECIPES[name].run(tmp_path / "run", option, value, "--speech-dir", tmp_path / "speech")
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert option.removeprefix("--") in told or "sizes" in told
    assert said in told
    assert "Fix: " in told
    assert not (tmp_path / "run").exists()
