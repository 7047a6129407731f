"""The demo: its processes are followed, and its command fails and exits as those of holdfast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recipes.demo import __main__ as command
from recipes.demo import demo_run
from recipes.demo.demo_run import DemoRun
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]

_TRAINS = """
import json, sys, time
with open(sys.argv[1], "w", buffering=1) as trace:
    for step in range(int(sys.argv[2])):
        time.sleep(0.1)
        trace.write(json.dumps({"step": step, "digest": ""}) + "\\n")
    time.sleep(float(sys.argv[3]))
    trace.write(json.dumps({"accuracy": 0.5}) + "\\n")
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Return a run, and what starts a process of it that makes some steps, stands still and
    ends.
    """
    monkeypatch.setattr(demo_run, "_STANDSTILL_SECONDS", 5.0)
    run = DemoRun(
        run_dir=tmp_path, trace=tmp_path / "trace", weights=None, output=tmp_path / "output"
    )

    def start(steps, seconds):
        return subprocess.Popen(
            [sys.executable, "-c", _TRAINS, str(run.trace), str(steps), str(seconds)]
        )

    return run, start


@pytest.mark.slow
def test_a_training_may_take_as_long_as_it_likes_but_not_stand_still(started):
    """A slow machine is no broken promise of the demo; a process that makes no step is killed."""
    run, start = started
    run.finish(start(20, 0))
    assert (run.accuracy, len(run.digests)) == (0.5, 20)
    run.trace.unlink()
    run.digests.clear()
    stuck = start(1, 600)
    with pytest.raises(TimeoutError, match=r"no step for 5 s"):
        run.wait_for_step(stuck, 2)
    assert stuck.returncode < 0


def test_a_training_that_ends_too_soon_is_an_error(started):
    """Neither a step that never came nor an end without a result is taken for one."""
    run, start = started
    with pytest.raises(RuntimeError, match="did not reach step 5"):
        run.wait_for_step(start(2, 0), 5)
    run.trace.unlink()
    run.accuracy = None
    run.output.write_text("mistaken")
    with pytest.raises(RuntimeError, match="exit code 3: mistaken"):
        run.finish(subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]))


def report(held: bool) -> dict[str, Any]:
    row = {
        "fault": "SIGKILL",
        "happened": "killed",
        "remedy": "resume",
        "promise": "bit-exact",
        "held": held,
        "evidence": "digests",
        "lost_steps": 3,
        "seconds": 1.5,
    }
    return {"rows": [row], "accuracy": [0.9, 0.9 if held else None], "seed": 7}


@pytest.mark.parametrize("held", [True, False])
def test_a_broken_promise_is_exit_code_1(tmp_path, monkeypatch, held):
    """The demo exits with 1 if a promise did not hold.

    The campaign is replaced by a made-up report here.
    """
    monkeypatch.setattr(command, "_campaign", lambda seed, quiet: report(held))
    shown = CliRunner().invoke(command.app, ["--out", str(tmp_path)])
    assert shown.exit_code == (0 if held else 1)
    assert f"{int(held)} of 1 promises held" in shown.output
    assert ("NO" in shown.output) is not held
    assert json.loads((tmp_path / "report.json").read_text()) == report(held)
    assert (
        json.loads(CliRunner().invoke(command.app, ["--out", str(tmp_path), "--json"]).output)[
            "held"
        ]
        is held
    )


@pytest.mark.slow
def test_make_demo_starts_it_from_the_clone_and_a_mistake_is_valid_json():
    """What `make demo` calls is found there.

    An unknown option is one object on stdout, and exit code 2.
    """
    (called,) = [
        line for line in (ROOT / "Makefile").read_text().splitlines() if "recipes.demo" in line
    ]
    words = called.split()[1:]
    assert words == ["-m", "recipes.demo"]
    ended = subprocess.run(
        [sys.executable, *words, "--nonsense", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2
    error = json.loads(ended.stdout)["error"]
    assert "--nonsense" in error["what"]
    assert "python -m recipes.demo --help" in error["fix"]
    assert "Traceback" not in ended.stderr
