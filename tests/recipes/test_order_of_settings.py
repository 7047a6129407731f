"""One rule at every entrance: argument over variable over file over preset over default.

No name passes unread.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from recipes.options import RunOptions, read_options

import holdfast
from holdfast import Policy
from holdfast.guard.hosted import hosted_policy

PRESET = "separation"  # max_grad_norm 5.0
RECIPES = {
    "asr": "Options",
    "separation": "Options",
    "classifier": "ClassifierOptions",
    "gan": "GanOptions",
    "tacotron2": "TacotronOptions",
    "pegasus": "PegasusOptions",
    "gpt": "GptOptions",
    "lora": "LoraOptions",
    "diffusion": "DiffusionOptions",
}


def options_of(recipe: str) -> type[RunOptions]:
    found: type[RunOptions] = getattr(
        importlib.import_module(f"recipes.{recipe}.train"), RECIPES[recipe]
    )
    return found


def written(path: Path, values: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(values)))
    return path


def in_options(values: Mapping[str, Any]) -> list[str]:
    return [
        part
        for name, value in values.items()
        for part in ("--" + name.replace("_", "-"), str(value))
    ]


def by_yaml(folder: Path, file: dict[str, Any], given: dict[str, Any]) -> Policy:
    return Policy.from_yaml(written(folder / "policy.yaml", file), **given)


def by_of(folder: Path, file: dict[str, Any], given: dict[str, Any]) -> Policy:
    return Policy.of(written(folder / "policy.yaml", file), **given)


def by_guard(folder: Path, file: dict[str, Any], given: dict[str, Any]) -> Policy:
    model = torch.nn.Linear(1, 1)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    path = written(folder / "policy.yaml", file)
    with holdfast.Guard(folder / "run", model=model, optimizer=sgd, policy=path, **given) as guard:
        return guard.policy


def by_arguments(folder: Path, file: dict[str, Any], given: dict[str, Any]) -> Policy:
    parser = argparse.ArgumentParser()
    Policy.add_arguments(parser)
    path = written(folder / "policy.yaml", file)
    return Policy.from_arguments(parser.parse_args(["--policy", str(path), *in_options(given)]))


def by_recipe(name: str) -> Callable[..., Policy]:
    def read(folder: Path, file: dict[str, Any], given: dict[str, Any]) -> Policy:
        path = written(folder / "policy.yaml", file)
        return read_options(options_of(name), ["--policy", str(path), *in_options(given)])[1]

    return read


def by_options_file(folder: Path, file: dict[str, Any], given: dict[str, Any]) -> Policy:
    """The case that was found: SpeechBrain's other name of the field, in the file of --config."""
    named = {"clip_grad_norm": file["max_grad_norm"]} if "max_grad_norm" in file else {}
    path, policy = (
        written(folder / "config.yaml", named),
        written(folder / "policy.yaml", {"preset": PRESET}),
    )
    argv = ["--config", str(path), "--policy", str(policy), *in_options(given)]
    return read_options(options_of("separation"), argv)[1]


ENTRANCES = {
    "from_yaml": by_yaml,
    "of": by_of,
    "Guard": by_guard,
    "from_arguments": by_arguments,
    "--config": by_options_file,
    **{f"recipes.{name}": by_recipe(name) for name in RECIPES},
}


@pytest.mark.parametrize("entrance", ENTRANCES)
def test_argument_over_variable_over_file_over_preset_over_default(entrance, tmp_path, monkeypatch):
    """Of all combinations of places that name a field the strongest counts."""
    for argument, variable, file in itertools.product((False, True), repeat=3):
        monkeypatch.delenv("HOLDFAST_MAX_GRAD_NORM", raising=False)
        if variable:
            monkeypatch.setenv("HOLDFAST_MAX_GRAD_NORM", "2.0")
        in_file = {"preset": PRESET, **({"max_grad_norm": 3.0} if file else {})}
        found = ENTRANCES[entrance](tmp_path, in_file, {"max_grad_norm": 1.0} if argument else {})
        expected = (
            1.0
            if argument
            else 2.0
            if variable
            else 3.0
            if file
            else Policy.preset(PRESET).max_grad_norm
        )
        assert found.max_grad_norm == expected, (argument, variable, file)
        assert found.keep_latest_k == 3


def test_two_names_of_one_field_at_the_same_place_are_refused(capsys):
    """--clip-grad-norm is as strong as --max-grad-norm; both are no order."""
    argv = ["--clip-grad-norm", "2", "--max-grad-norm", "3"]
    with pytest.raises(SystemExit):
        read_options(options_of("asr"), argv)
    assert "--clip-grad-norm and --max-grad-norm" in capsys.readouterr().err


def test_clip_grad_norm_on_the_command_line_is_an_argument(monkeypatch):
    """It wins over a variable, which wins over the same name in a file.

    Below 0 it turns clipping off.
    """
    monkeypatch.setenv("HOLDFAST_MAX_GRAD_NORM", "2.0")
    for value, expected in (("7", 7.0), ("-1", None)):
        assert (
            read_options(options_of("asr"), ["--clip-grad-norm", value])[1].max_grad_norm
            == expected
        )
    with pytest.raises(SystemExit):
        read_options(options_of("asr"), ["--clip-grad-norm", "0"])


def test_a_fault_sets_what_nobody_has_set(monkeypatch):
    """The classifier's --fault is weaker than an option beside it and than a variable."""
    monkeypatch.setenv("HOLDFAST_MAX_GRAD_NORM", "2.0")
    options, policy = read_options(
        options_of("classifier"), ["--fault", "exploding-gradients", "--depth", "3"]
    )
    assert (options.depth, options.init_scale, policy.max_grad_norm) == (3, 3.0, 2.0)


@pytest.mark.parametrize(
    ("name", "value", "host"),
    [
        ("max_grad_norm", "2.0", {"max_grad_norm": 1.0, "precision": "fp32"}),
        ("precision", "fp32", {"max_grad_norm": None, "precision": "bf16"}),
        ("precision", "bf16", {"max_grad_norm": None, "precision": "fp32"}),
        ("save_interval_steps", "7", {}),
        ("save_interval_steps", "auto", {}),
        ("save_interval_minutes", "7", {}),
        ("scheduler_interval", "epoch", {}),
        ("nonfinite_patience", "9", {"nonfinite_patience": 3}),
    ],
)
def test_a_variable_that_contradicts_a_framework_is_an_error(name, value, host, monkeypatch):
    """It was dropped, since it was compared with a policy that had read it, too."""
    monkeypatch.setenv(f"HOLDFAST_{name.upper()}", value)
    with pytest.raises(holdfast.PolicyError, match=f"HOLDFAST_{name.upper()}") as caught:
        hosted_policy(None, host="the host", **host)
    assert caught.value.rule == "H109"


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        # A dict is an argument, above a variable; a preset named in it or beside it lies below one.
        (lambda: Policy.of({"preset": PRESET}), {"max_grad_norm": 2.0}),
        (lambda: Policy.of({"preset": PRESET, "max_grad_norm": 3.0}), {"max_grad_norm": 3.0}),
        (lambda: Policy.of({"max_grad_norm": 3.0}, preset=PRESET), {"max_grad_norm": 3.0}),
        (lambda: Policy.of({"max_grad_norm": 3.0}, max_grad_norm=4.0), {"max_grad_norm": 4.0}),
        # A variable that says the same as a framework is fine, and so is one that the framework has
        # no setting for.
        (
            lambda: hosted_policy(None, host="the host", max_grad_norm=2.0, precision="fp32"),
            {"max_grad_norm": 2.0, "nonfinite_patience": 9},
        ),
    ],
)
def test_what_each_place_says_beside_two_variables(read, expected, monkeypatch):
    """Dicts, presets and a framework's own settings keep their places in the order."""
    monkeypatch.setenv("HOLDFAST_MAX_GRAD_NORM", "2.0")
    monkeypatch.setenv("HOLDFAST_NONFINITE_PATIENCE", "9")
    found = read()
    assert {name: getattr(found, name) for name in expected} == expected
