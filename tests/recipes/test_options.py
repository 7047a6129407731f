"""Options of recipes: what is read from where, and what is refused before there is a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from recipes.options import RunOptions, read_options


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(RunOptions):
    """Of a recipe that does nothing."""

    size: Literal["small", "large"] = "small"
    rate: float = 0.5
    limit: int | None = None
    text: str = "a text"
    place: Path | None = None

    def check(self) -> None:
        """Look at each option."""
        RunOptions.check(self)
        self.at_least({"limit": 1})
        self.above_zero("rate")


def read(*argv: object, **named: Any) -> tuple[Options, Any]:
    return read_options(Options, [str(each) for each in argv], **named)


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    with pytest.raises(SystemExit) as ended:
        read(*argv)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_command_line_is_stronger_than_the_file_and_the_file_than_the_default(
    tmp_path, monkeypatch
):
    """So it is for a recipe's own options.

    For those of the policy see ``test_order_of_settings.py``.
    """
    config = tmp_path / "config.yaml"
    config.write_text("rate: 1e-3\nsize: large\nmax-steps: 7\nlimit: null\nplace: ~/b\n")
    monkeypatch.setenv("HOME", "/home/of/a")
    options, policy = read("--config", config, "--rate", 2, "--max-grad-norm", "none")
    assert (options.rate, options.size, options.max_steps, options.limit) == (2.0, "large", 7, None)
    assert options.place == Path("/home/of/a/b")
    assert policy.max_grad_norm is None


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--limit", 0, "at least 1 is needed"),
        ("--rate", 0, "above 0 is needed"),
        ("--rate", "nan", "not finite"),
        ("--max-steps", -1, "at least 0"),
        ("--max-steps", 2.5, "one of INT"),
        ("--num-workers", -1, "at least 0"),
        ("--num-workers", 10**6, "at most 1024"),
        ("--seed", -1, "at least 0"),
        ("--seed", 10**30, "below"),
        ("--limit", 10**30, "below"),
        ("--run-dir", __file__, "a directory is needed"),
        ("--size", "medium", "small|large"),
        ("--place", "", "a path is needed"),
        ("--rat", 1, "did you mean '--rate'"),
        ("--max-grad-nrom", 1, "did you mean '--max-grad-norm'"),
        ("--max-grad-norm", "much", "[H102]"),
        ("--policy", "nowhere.yaml", "nowhere.yaml cannot be read"),
        ("--config", "nowhere.yaml", "nowhere.yaml cannot be read"),
    ],
)
def test_values_that_make_no_training_end_with_a_message(option, value, said, capsys):
    """It names the option and what is needed."""
    told = refused(capsys, option, value)
    assert said in told
    assert option.removeprefix("--").replace("-", "_") in told.replace("-", "_")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rat: 1", "did you mean 'rate'"),
        (
            "max_grad_norm: 1",
            "a value of the policy: write it into a file for --policy, or pass --max-grad-norm",
        ),
        ("text: no", "goes into quotes"),
        ("place: [a, b]", "PATH|none is needed"),
        ("run_dir: null", "PATH is needed"),
        ("limit: 1.5", "INT|none is needed"),
        ("limit: 0", "at least 1"),
        ("resume: maybe", "BOOL is needed"),
        ("quux: 1", "'quux' is not an option of this recipe\n"),
        ("- rate", "a mapping of options to values"),
        ("rate: [", "cannot be read"),
    ],
)
def test_a_file_of_options_that_cannot_be_used_ends_with_a_message(text, said, tmp_path, capsys):
    """Misspelt keys, values of the wrong type, and what YAML reads as something else."""
    (tmp_path / "config.yaml").write_text(text)
    assert said in refused(capsys, "--config", tmp_path / "config.yaml")


def test_resume_without_a_run_makes_none(tmp_path, capsys):
    """A run directory that is not there is a misspelt one: nothing is made in it."""
    told = refused(capsys, "--resume", "--run-dir", tmp_path / "nowhere")
    assert "nowhere holds no checkpoint to go on from" in told
    assert not (tmp_path / "nowhere").exists()
