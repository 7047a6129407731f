"""A guarded training under `holdfast run` that was restarted has one step number, whoever shows
it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.forked_attempts import supervise_forked
from tests.prepared import WITHOUT_HOLDFAST
from typer.testing import CliRunner

from holdfast.cli.main import make_app
from holdfast.core.clock import SystemClock
from holdfast.recorder.run_files import read_processes
from holdfast.report.live.watching import Runs, Watched
from holdfast.report.page.environment import environment
from holdfast.report.page.gathering import gather
from holdfast.report.page.goodput import goodput

pytestmark = pytest.mark.slow
SCRIPT = """
import os, signal, sys, time
import torch
import holdfast
nets = {name: torch.nn.Linear(4, 1) for name in ("critic", "maker")}
optimizers = {name: torch.optim.Adam(net.parameters(), 0.01) for name, net in nets.items()}
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = holdfast.DataLoader(data, batch_size=4)
guard = holdfast.Guard("runs/guarded", model=nets, optimizer=optimizers, loader=loader,
    policy=holdfast.Policy(save_interval_steps=20, async_save=False))
again = os.environ.get("ATTEMPT_BY_HOLDFAST") != "0"
for batch in guard.batches(max_steps=200):
    for name, net in nets.items():
        guard.step(batch[0], lambda x: net(x).square().mean(), optimizer=name)
    guard.log(accuracy=1.0)
    if guard.global_step >= 60 and not again:
        os.kill(os.getpid(), signal.SIGKILL)
    if guard.global_step >= 100 and sys.argv[1:] == ["waits"] and again:
        print("waits", flush=True)
        time.sleep(1000)
"""


def start(tmp_path: Path, *words: str) -> subprocess.Popen[bytes]:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--restart-delay", "0.1", "--run-dir", "runs/a"]
    return supervise_forked(
        [*options, "--", sys.executable, "train.py", *words],
        loaded=WITHOUT_HOLDFAST,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def test_steps_names_and_processes_are_those_of_the_guard(tmp_path: Path) -> None:
    """Page, `watch` and metrics go on at the step that was saved.

    Optimizers have the guard's names; no phantom.
    """
    for words in (
        ["init", "-q", "-b", "main"],
        ["add", "-A"],
        ["commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True
        )
    assert start(tmp_path).wait(240) == 0, (tmp_path / "runs" / "a" / "output.log").read_text()
    run = tmp_path / "runs" / "a"
    lanes = {lane.label: lane for lane in gather(run).lanes}
    second = next(lane for name, lane in lanes.items() if "attempt 1" in name and "critic" in name)
    assert (second.curves["loss"].steps.min() > 20, second.last_step) == (True, 200)
    assert any("maker" in name for name in lanes)
    assert not any("Adam" in name for name in lanes)
    seen = Watched(run, SystemClock()).look()
    assert max(each.step for each in seen.processes) == 200
    done = CliRunner().invoke(make_app("metrics"), ["metrics", str(run), "--jsonl", "-"])
    points: list[dict[str, Any]] = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")
    ]
    later = [each["step"] for each in points if each["kind"] == "step" and each["attempt"] == 1]
    assert (min(later) > 20, max(later)) == (True, 200)
    picture = gather(run)
    found = environment(picture)
    assert (found["code (git)"]["branch"], found["code (git)"]["dirty"]) == ("main", "false")
    assert found["policy, where it is not the usual"] == {
        "save_interval_steps": "20",
        "async_save": "false",
    }
    assert (found["hyperparameters"]["maker.0.lr"], found["hyperparameters"]["batch_size"]) == (
        "0.01",
        "4",
    )
    spent = goodput(picture)
    assert list(spent)[:2] == ["steps", "repeated steps"]
    assert {"saves", "start-up", "down"} <= set(spent)
    assert [info.role for _, info in read_processes(run)] == ["trainer", "trainer"]
    assert [each.path.name for each in Runs(tmp_path / "runs", SystemClock()).look()] == ["a"]


def test_a_killed_supervisor_leaves_no_verdict_of_the_attempt_before(tmp_path: Path) -> None:
    """What `watch` and the page say of the newest attempt is about that one."""
    process, log = start(tmp_path, "waits"), tmp_path / "runs" / "a" / "output.log"
    for _ in range(60_000):
        if process.poll() is not None or (log.exists() and b"waits" in log.read_bytes()):
            break
        time.sleep(0.005)
    assert process.poll() is None, log.read_text()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    watched = Watched(log.parent, SystemClock())
    for _ in range(60_000):
        if (seen := watched.look()).state == "ended":
            break
        time.sleep(0.005)
    assert seen.verdict is not None
    assert "supervisor" in seen.verdict.summary, seen.verdict
    assert gather(log.parent).verdict == seen.verdict
