"""What scripts log by clients and frameworks is recorded where they log it, once, and outlives a
kill.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.prepared import run_prepared
from typer.testing import CliRunner

from holdfast.cli.main import make_app
from holdfast.supervise.launch.commands import make_observed_environment

# The part of W&B that a script meets: `init` puts the method of the run into the module.
WANDB = {
    "__init__": (
        "from wandb.sdk.wandb_run import Run\n"
        "def init():\n global log\n run = Run(); log = run.log\n return run\n"
    ),
    "sdk/__init__": "",
    "sdk/wandb_run": (
        "class Run:\n"
        " def log(self, data, step=None, commit=None):\n"
        "  if not isinstance(data, dict): raise ValueError('a dict')\n"
    ),
}
HEAD = """
import os, signal, sys
import torch
import holdfast
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def step():
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


def ran(tmp_path: Path, text: str, *, observed: bool = True, ends: int = 0) -> str:
    """Run a script in a place of its own with the stub of W&B; return what it printed."""
    for name, source in WANDB.items():
        path = tmp_path / "stubs" / "wandb" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (tmp_path / "script.py").write_text(HEAD + text)
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    theirs = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "stubs"), *sys.path])}
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=make_observed_environment(theirs, run, 0) if observed else theirs,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == ends, done.stdout + done.stderr
    assert not [path.read_text() for path in run.glob("processes/failed-*")]
    return done.stdout


def ran_forked(tmp_path: Path, text: str, *, observed: bool) -> str:
    """Run a script without the stub of W&B, forked from a process that has loaded torch alone.

    The script still imports its framework, which is when the observer takes note of it.
    """
    (tmp_path / "script.py").write_text(HEAD + text)
    run = tmp_path / "run"
    run.mkdir()
    done = run_prepared(
        ["script.py"],
        cwd=tmp_path,
        env=make_observed_environment(os.environ, run, 0) if observed else dict(os.environ),
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert not [path.read_text() for path in run.glob("processes/failed-*")]
    return done.stdout


def logged(run: Path) -> list[dict[str, Any]]:
    """Return what `holdfast metrics --jsonl -` prints of scalars."""
    done = CliRunner().invoke(make_app("metrics"), ["metrics", str(run), "--jsonl", "-"])
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"kind"')]
    return [line for line in lines if line["kind"] == "scalar"]


def test_the_clients_of_a_script_that_is_killed(tmp_path: Path) -> None:
    """Numbers of SummaryWriter, W&B and `holdfast.log` are there after kill -9, and what is none
    disturbs nobody.
    """
    pytest.importorskip("tensorboardX")
    text = """
import wandb
from tensorboardX import SummaryWriter
writer, run = SummaryWriter("tb"), wandb.init()
holdfast.log(early=1)
step(); step()
writer.add_scalar("val/wer", torch.tensor([0.25]), 40)
writer.add_scalar("val/wer", scalar_value=float("nan"), global_step=None)
writer.add_scalars("both", {"a": 1, "b": 2}, 7)
wandb.log({"loss": 0.5, "eval": {"cer": {"beam": 0.125}}, "text": "no", "x" * 99: 3, "": 1}, step=9)
run.log({"lr": 1}, commit=False)
for wrong in (lambda: run.log("no dict"), lambda: writer.add_scalar(), lambda: holdfast.log(a="text")):
    try:
        wrong()
    except (ValueError, TypeError) as error:
        print(type(error).__name__)
holdfast.log({"wer": 0.5}, split="test")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert ran(tmp_path, text, ends=-signal.SIGKILL).split() == [
        "ValueError",
        "TypeError",
        "PolicyError",
    ]
    found = [(line["name"], line["value"], line["step"]) for line in logged(tmp_path / "run")]
    assert found == [
        ("early", 1.0, 0),
        ("val/wer", 0.25, 40),
        ("val/wer", "NaN", 2),
        ("both/a", 1.0, 7),
        ("both/b", 2.0, 7),
        ("loss", 0.5, 9),
        ("eval/cer/beam", 0.125, 9),
        ("x" * 64, 3.0, 9),
        ("lr", 1.0, 2),
        ("test/wer", 0.5, 2),
    ]
    assert {
        (line["process"], line["rank"], line["epoch"]) for line in logged(tmp_path / "run")
    } == {("trainer", None, None)}


def test_a_guard_and_an_observer_record_a_value_once(tmp_path: Path) -> None:
    """While a guard is open all goes to it, before and after it to the observer.

    Without either nowhere.
    """
    text = """
import wandb
run = wandb.init()
run.log({"before": 1})
with holdfast.Guard("guarded", model=model, optimizer=optimizer, save_interval_steps=None) as guard:
    guard.step(torch.ones(1, 2), lambda x: model(x).sum())
    guard.log(own=1)
    holdfast.log(by_function=2)
    run.log({"by_client": 3}, step=8)
run.log({"after": 4})
"""
    ran(tmp_path, text, observed=False)
    assert [line["name"] for line in logged(tmp_path / "guarded")] == ["own", "by_function"]
    assert not list((tmp_path / "run").iterdir())
    shutil.rmtree(tmp_path / "guarded")
    ran(tmp_path, text)
    assert sorted(
        (line["name"], line["step"], line["process"]) for line in logged(tmp_path / "run")
    ) == [
        ("after", 1, "trainer"),
        ("before", 0, "trainer"),
        ("by_client", 8, "rank 0"),
        ("by_function", 1, "rank 0"),
        ("own", 1, "rank 0"),
    ]


FRAMEWORKS = {
    "transformers": (
        """
from transformers import Trainer, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__(); self.layer = torch.nn.Linear(2, 1)
    def forward(self, x, labels): return {"loss": (self.layer(x)[:, 0] - labels).square().mean()}
data = [{"x": torch.ones(2), "labels": torch.tensor(1.0)}] * 8
arguments = TrainingArguments("out", max_steps=4, logging_steps=2, use_cpu=True, report_to=[], disable_tqdm=True,
                              save_strategy="no", per_device_train_batch_size=2)
if GUARDED:
    from holdfast.integrations.transformers import HoldfastTrainer as Trainer
trainer = Trainer(Model(), arguments, train_dataset=data)
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print("logs", entry["step"], entry["loss"])
"""
    ),
    "lightning": (
        """
import lightning.pytorch as pl
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__(); self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        if self.global_step % 2: print("logs", self.global_step, loss.item())
        return loss
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
given = {}
if GUARDED:
    from holdfast.integrations.lightning import HoldfastStrategy
    given = {"strategy": HoldfastStrategy()}
trainer = pl.Trainer(max_steps=4, log_every_n_steps=2, accelerator="cpu", logger=False, enable_progress_bar=False,
                     enable_checkpointing=False, enable_model_summary=False, **given)
trainer.fit(Model(), torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2))
"""
    ),
    "accelerate": (
        """
from accelerate import Accelerator
from holdfast.integrations.accelerate import accelerate_guard
accelerator = Accelerator(cpu=True, project_dir="project")
guard = accelerate_guard(accelerator, model=model, optimizer=optimizer) if GUARDED else None
for number in (5, 7):
    accelerator.log({"loss": number / 4}, step=number)
    print("logs", number, number / 4)
"""
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("guarded", "observed"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_a_framework_logs(
    tmp_path: Path, framework: str, guarded: bool, observed: bool
) -> None:
    """It is recorded once at its own steps, by the observer, by the integration, or where both
    are.
    """
    pytest.importorskip(framework)
    text = FRAMEWORKS[framework].replace("GUARDED", str(guarded))
    lines = [line.split() for line in ran_forked(tmp_path, text, observed=observed).splitlines()]
    logs = [(int(line[1]), pytest.approx(float(line[2]))) for line in lines if line[:1] == ["logs"]]
    (ring,) = tmp_path.rglob("scalars.ring")
    assert ("recorder" in ring.parts) is guarded
    found = logged(tmp_path / "run" if observed else ring.parents[2])
    assert [(line["step"], line["value"]) for line in found if line["name"] == "loss"] == logs
    assert len(logs) == 2
