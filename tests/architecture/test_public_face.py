"""What users hold on to: names, arguments, commands and flags.

A change here is a decision, not an accident.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import typer.main

import holdfast
from holdfast.cli.main import make_app

app = make_app()

ROOT = Path(__file__).parents[2]


def test_the_exported_names() -> None:
    """The package exports these names and no others, all of which can be had."""
    assert holdfast.__all__ == [
        "BatchError",
        "CheckpointError",
        "DataLoader",
        "Event",
        "Guard",
        "HoldfastError",
        "LoaderError",
        "Loss",
        "NonFiniteError",
        "OutOfMemoryError",
        "Policy",
        "PolicyError",
        "RunDirectoryError",
        "StepResult",
        "TwoPass",
        "__version__",
        "advise_learning_rate",
        "latest",
        "log",
        "watch",
    ]
    assert dir(holdfast) == sorted(holdfast.__all__)
    assert all(getattr(holdfast, name) is not None for name in holdfast.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        holdfast.Trainer  # noqa: B018


def test_the_arguments_of_the_guard() -> None:
    """The signatures of Guard are the contract that other tools build on."""
    assert list(inspect.signature(holdfast.Guard).parameters) == [
        "run_dir",
        "model",
        "optimizer",
        "scheduler",
        "loader",
        "state",
        "averaged",
        "policy",
        "split",
        "clock",
        "overrides",
    ]
    assert list(inspect.signature(holdfast.Guard.batches).parameters) == [
        "self",
        "max_epochs",
        "max_steps",
    ]
    assert list(inspect.signature(holdfast.Guard.step).parameters) == [
        "self",
        "batch",
        "loss_fn",
        "optimizer",
        "split",
    ]
    public = {name for name in vars(holdfast.Guard) if not name.startswith("_")}
    assert public == {
        "add_image",
        "averaged",
        "batches",
        "best",
        "close",
        "diagnose",
        "emit",
        "epoch",
        "epochs_validated",
        "evaluate",
        "evaluate_batches",
        "events",
        "global_step",
        "log",
        "request_stop",
        "save",
        "statistics",
        "step",
        "stop_reason",
        "validated",
    }


def test_the_fields_of_a_result_and_of_the_policy() -> None:
    """Field names are part of the contract; every policy field has its docstring under it."""
    assert [field.name for field in dataclasses.fields(holdfast.StepResult)] == [
        "loss",
        "items",
        "grad_norm",
        "micro_batch_size",
        "attempts",
        "skipped",
        "reason",
        "dropped_samples",
        "extra",
    ]
    source = (ROOT / "src/holdfast/core/policy/policy.py").read_text().splitlines()
    for field in dataclasses.fields(holdfast.Policy):
        (line,) = [
            number for number, text in enumerate(source) if text.startswith(f"    {field.name}: ")
        ]
        assert source[line + 1].strip().startswith('"""'), field.name


def test_the_commands_and_their_flags() -> None:
    """Every command has --json, and no flag appears or disappears unnoticed."""
    group = typer.main.get_command(app)
    commands = getattr(group, "commands")  # noqa: B009 - click's type does not show it
    flags = {
        name: sorted(
            option
            for parameter in command.params
            for option in parameter.opts
            if option.startswith("--")
        )
        for name, command in commands.items()
    }
    assert flags == {
        "chaos": [
            "--budget",
            "--exhaustive-saves",
            "--json",
            "--only",
            "--page",
            "--restarts",
            "--seed",
            "--writes",
        ],
        "checkpoints": ["--export", "--export-averaged", "--json", "--step", "--verify"],
        "explain": ["--attempt", "--bundle", "--json", "--status"],
        "run": [
            "--grace-seconds",
            "--hang-limit",
            "--json",
            "--max-log-bytes",
            "--max-preemptions",
            "--max-restarts",
            "--mirror",
            "--no-observe",
            "--no-watchdog",
            "--notify",
            "--quiet",
            "--requeue",
            "--restart-delay",
            "--resume",
            "--run-dir",
        ],
        "watch": ["--json", "--once"],
        "attach": ["--json", "--seconds"],
        "save": ["--json", "--timeout"],
        "stop": ["--json", "--timeout"],
        "compare": ["--fail-on-regression", "--json", "--out", "--self-contained"],
        "doctor": ["--json", "--run-dir"],
        "report": ["--json", "--out", "--self-contained"],
        "events": ["--json", "--kind"],
        "metrics": ["--follow", "--json", "--jsonl", "--tensorboard", "--wandb"],
        "plan": [
            "--device",
            "--global-batch-size",
            "--gpus",
            "--json",
            "--margin",
            "--micro-batch-size",
            "--out",
            "--precision",
            "--set",
            "--shard",
            "--vary",
            "--verify",
        ],
        "quarantine": ["--evidence", "--json", "--release", "--release-all"],
    }


def test_importing_holdfast_loads_no_torch() -> None:
    """A Policy with a preset needs no yaml either.

    The commands, rules and pages start without torch.
    """
    code = (
        "import sys, holdfast; holdfast.Policy.preset('tts'); assert 'yaml' not in sys.modules;"
        " from holdfast.cli.main import make_app; make_app(); from holdfast.report.page import run_page;"
        " from holdfast.cli import plan, checkpoints, quarantine; from holdfast.recorder import reader;"
        " from holdfast.explain import rules; rules.all_rules(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_the_wheel_holds_all_that_the_package_needs(tmp_path) -> None:
    """Built and installed elsewhere, without the source tree, the package explains its rules and
    trains a step.
    """
    target = tmp_path / "installed"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "install",
        "--no-deps",
    ]
    # It makes a wheel first
    subprocess.run([*pip, "--no-compile", "--target", str(target), str(ROOT)], check=True)
    assert len(list(target.glob("torch_holdfast-*.dist-info"))) == 1
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import holdfast, torch, tempfile\n"
        "assert holdfast.__file__.startswith(sys.argv[1])\n"
        "from pathlib import Path; assert Path(holdfast.__file__).with_name('py.typed').exists()\n"
        "from holdfast.explain.rules import all_rules; assert len(all_rules()) > 30\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "with holdfast.Guard(tempfile.mkdtemp(), model=model, optimizer=optimizer) as guard:\n"
        "    guard.step(torch.ones(4, 2), lambda x: model(x).mean())\n"
    )
    subprocess.run([sys.executable, "-c", code, str(target)], check=True, cwd=tmp_path)


def test_no_message_installs_the_other_project_that_is_called_holdfast() -> None:
    """The distribution is torch-holdfast; a hint without `torch-` installs a stranger's package."""
    files = [each for folder in ("src", "docs", "recipes") for each in (ROOT / folder).rglob("*.*")]
    texts = {each: each.read_text() for each in files if each.suffix in (".py", ".md", ".yaml")}
    wrong = re.compile(r"(?<!torch-)\bholdfast\[|pip install ['\"]?holdfast\b")
    assert not [str(each) for each, text in texts.items() if wrong.search(text)]
