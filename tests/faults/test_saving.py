"""Programs that end, are stopped or are killed while a checkpoint is written beside their training."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.prepared import Prepared

from holdfast.checkpoint.store import Store

_PROGRAM = str(Path(__file__).parent / "programs" / "saving.py")


class Program:
    """One process of the program.

    Args:
        folder: Of its run directory and its trace.
        request: What it is asked for.
        new: Whether it has an interpreter that it started itself; others are forked from one that is prepared.
    """

    def __init__(self, folder: Path, request: dict[str, Any], *, new: bool) -> None:
        self._trace = folder / "trace.jsonl"
        full = {"run_dir": str(folder / "run"), "trace": str(self._trace), **request}
        self._before = len(self.all_lines())
        program = [_PROGRAM, json.dumps(full)]
        given: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process: subprocess.Popen[str]
        self.process = subprocess.Popen([sys.executable, *program], **given) if new else Prepared(program, **given)

    def all_lines(self) -> list[dict[str, Any]]:
        """Return what was written, by earlier lives too."""
        if not self._trace.exists():
            return []
        return [json.loads(line) for line in self._trace.read_bytes().split(b"\n")[:-1]]

    def lines(self) -> list[dict[str, Any]]:
        """Return what this process has written."""
        return self.all_lines()[self._before :]

    def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        """Wait for a line."""
        deadline = time.monotonic() + 120
        while not any(condition(line) for line in self.lines()):
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def ended(self) -> int:
        """Wait for the end, and return the exit status."""
        self.process.communicate(timeout=120)
        return self.process.returncode


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Return a function that starts a process of the program; what still runs at the end of the test is killed."""
    started: list[Program] = []

    def start_one(*, new: bool = False, **request: Any) -> Program:
        started.append(Program(tmp_path, request, new=new))
        return started[-1]

    yield start_one
    for run in started:
        if run.process.poll() is None:
            os.kill(run.process.pid, signal.SIGKILL)
            run.process.wait()
        assert run.process.stdout is not None
        run.process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [("return", 0), ("error", 1), ("exit", 3), ("break", 0)])
def test_a_program_that_ends_finishes_the_save_that_it_began(start, tmp_path, end, status):
    """However an interpreter ends, without `close`: the checkpoint that was under way is there and verifies."""
    run = start(end=end, new=end == "return")
    assert run.ended() == status
    assert {"saving": True} in run.lines()
    entries = Store(tmp_path / "run" / "checkpoints").entries()
    assert entries[0].global_step >= 4
    for entry in entries:
        entry.verify()
    assert not list((tmp_path / "run" / "checkpoints").glob(".tmp-*"))


@pytest.mark.slow
def test_sigterm_finishes_the_save_under_way_and_saves_the_last_step(start, tmp_path):
    """A stop that comes in the middle of a write loses neither that checkpoint nor the steps since."""
    run = start(end="never", seconds_per_step=0.005, save_interval_steps=4)
    run.wait_for(lambda line: line.get("begun", 0) >= 4)
    run.process.send_signal(signal.SIGTERM)
    assert run.ended() == 0
    last = run.lines()[-1]
    assert last["stop_reason"] == "SIGTERM"
    (newest, *others) = Store(tmp_path / "run" / "checkpoints").entries()
    assert newest.global_step == last["left"]
    assert others[0].global_step >= 4
    newest.verify()


@pytest.mark.slow
def test_sigkill_at_any_moment_leaves_a_state_that_was_there(start):
    """Killed at random moments of saves beside the training, the run always resumes with the weights of a step."""
    chance = random.Random(5)
    for _ in range(6):
        run = start(end="never", save_interval_steps=1)
        target = chance.randint(1, 12)
        run.wait_for(lambda line: line.get("begun", 0) >= run.lines()[0]["start"] + target)  # noqa: B023
        time.sleep(chance.random() * 0.05)
        run.process.send_signal(signal.SIGKILL)
        run.process.communicate()
    last = start(end="return", steps=1)
    assert last.ended() == 0
    known = {line["digest"] for line in last.all_lines() if "step" in line}
    resumed = [line for line in last.all_lines() if line.get("start", 0) > 0]
    assert len(resumed) >= 4
    assert all(line["digest"] in known for line in resumed)
