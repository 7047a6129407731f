"""`holdfast watch` as a user calls it: one picture, JSON, and a terminal in which it ends with the run."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from tests.unit.report.made_runs import add_process, make_run, sample
from typer.testing import CliRunner, Result

from holdfast.cli import watch
from holdfast.recorder.progress import Phase


def call(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(watch.run)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_once_prints_one_picture(tmp_path):
    """It holds the run, the process, its step and why it ended, without escape sequences in a pipe."""
    printed = call(make_run(tmp_path / "train-1"), "--once")
    assert printed.exit_code == 0, printed.output
    for expected in ("train-1", "python train.py", "ended in forward backward", "300", "shapes differ", "[H970]"):
        assert expected in printed.output, expected
    assert "\x1b" not in printed.output


def test_json_is_the_same_picture_for_machines(tmp_path):
    """Phases have names, and what is unknown is a text that float() reads."""
    facts = json.loads(call(make_run(tmp_path / "run"), "--json").output)
    (process,) = facts["processes"]
    assert (process["step"], process["phase"], process["alive"]) == (300, "forward_backward", False)
    assert facts["state"] == "ended"
    assert facts["verdict"]["cause"] == "H970"


@pytest.mark.slow
def test_in_a_terminal_it_ends_with_the_run(tmp_path: Path) -> None:
    """A real process on a real terminal redraws the picture, and leaves it when the process that trains is gone."""
    trainer = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    run = tmp_path / "run"
    folder = add_process(run, [sample(5)], phase=Phase.DATA_WAIT)
    ticks = Path(f"/proc/{trainer.pid}/stat").read_text().rpartition(")")[2].split()[19]
    process = json.loads((folder / "process.json").read_text())
    (folder / "process.json").write_text(json.dumps({**process, "pid": trainer.pid, "ticks": int(ticks)}))
    ours, theirs = pty.openpty()
    code = "import sys, typer; from holdfast.cli import watch; typer.run(watch.run)"
    watching = subprocess.Popen([sys.executable, "-c", code, str(run)], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    with trainer:
        while b"data wait" not in shown:
            shown += os.read(ours, 4096)
    try:
        while True:
            shown += os.read(ours, 4096)
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(ours)
    assert watching.wait(60) == 0
    assert b"ended in data wait" in shown
