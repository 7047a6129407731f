"""A recipe that is stopped: by Ctrl-C, once and twice, and by an error of holdfast."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from recipes.tacotron2 import espeak
from tests.prepared import Prepared

from holdfast.checkpoint.store import Store

ROOT = Path(__file__).parents[2]
SMALL = ("--batch-size", "16", "--width", "8")


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Return a function that starts a program of Python.

    What still runs at the end of the test is killed.
    """
    started: list[subprocess.Popen[str]] = []

    def start_one(*arguments: object) -> subprocess.Popen[str]:
        started.append(
            Prepared(
                arguments,
                cwd=ROOT,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def checkpoints(run_dir: Path) -> list[int]:
    return [entry.global_step for entry in Store(run_dir / "checkpoints").entries()]


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_saves_and_says_how_to_go_on(start, tmp_path, times):
    """To the whole group, as a terminal sends it, or twice at once, as `timeout` does.

    Code 130, no traceback.
    """
    options = (
        "-m",
        "recipes.classifier",
        "--run-dir",
        tmp_path,
        *SMALL,
        "--save-interval-steps",
        5,
    )
    process = start(*options, "--max-steps", 100_000, "--num-workers", 2)
    wait_until(lambda: max(checkpoints(tmp_path), default=0) >= 5, process)
    for _ in range(times):
        os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert err.count("holdfast: SIGINT: ") == 1
    assert "ends the process at once" in err
    step = int(
        re.search(r"interrupted at step (\d+): the same command, or with --resume, goes on", err)[1]
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["global_step"], result["stopped"]) == (step, "SIGINT")
    assert checkpoints(tmp_path)[0] == step
    assert "found: []" in out
    assert "SIGINT" in (tmp_path / "report.html").read_text()
    rest = start(*options, "--max-steps", step + 1, "--resume", "--lr", 0.02)
    _, err = rest.communicate(timeout=300)
    assert rest.returncode == 0, err
    assert f"going on from step {step} " in err
    assert (
        "the learning rate is the checkpoint's, 0.05, not 0.02. Fix: another --run-dir begins anew."
        in err
    )


@pytest.mark.slow
@pytest.mark.skipif(not espeak.is_installed(), reason="espeak-ng is not installed")
def test_ctrl_c_while_data_are_made_ends_a_recipe_with_a_line(start, tmp_path):
    """No loop runs yet that could end.

    Code 130, no traceback, and the next start makes the rest.
    """
    options = ("-m", "recipes.tacotron2", "--run-dir", tmp_path, "--clips", 2000)
    process = start(*options)
    wait_until(lambda: any(tmp_path.rglob("*.wav")), process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert err.endswith(
        "interrupted: the same command begins anew, or goes on from the newest checkpoint\n"
    )
    assert "Traceback" not in err


@pytest.mark.slow
def test_an_error_of_holdfast_ends_with_its_text_and_leaves_page_and_findings(start, tmp_path):
    """The example of the README.

    What was found stands in the page, in result.json and at the end; exit code 1.
    """
    process = start(
        "-m",
        "recipes.classifier",
        "--fault",
        "lr-too-high",
        "--spike-action",
        "roll_back",
        "--run-dir",
        tmp_path,
    )
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert "Traceback" not in err
    assert err.count("[H503] run `holdfast explain H503`\n") == 1
    assert err.endswith(f"What was found meanwhile: holdfast explain {tmp_path}\n")
    assert re.search(r"^found: .*'H825'", out, re.MULTILINE)
    result = json.loads((tmp_path / "result.json").read_text())
    assert "H825" in result["figures"]["found"]
    assert "the loss has diverged" in result["stopped"]
    assert "H825" in (tmp_path / "report.html").read_text()
