"""Start the training program, wait for what it says, hurt it, and read what it left."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from recipes.demo.small_disk import command_with_small_disk
from tests.faults.small_run import train
from tests.prepared import Prepared

PROGRAMS = Path(__file__).parent / "programs"
_TIMEOUT_SECONDS = 300.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    """Return a folder for a small disk, where one may be mounted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if command_with_small_disk(disk, []) is None:
        pytest.skip("no small disk may be mounted here, neither as root nor in a user namespace")
    return disk


class Life:
    """One process of a training program, which writes to a trace.

    `command` is what comes before the interpreter, such as one that mounts a disk; None: it is
    forked from a process that is prepared.
    """

    def __init__(
        self,
        trace: Path,
        request: dict[str, Any],
        command: list[str] | None,
        name: str = "train.py",
    ) -> None:
        self.trace = trace
        program = [str(PROGRAMS / name), json.dumps({"trace": str(trace), **request})]
        given: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "start_new_session": True,
        }
        if command is None:
            self.process: subprocess.Popen[str] = Prepared(program, **given, text=True)
        else:
            self.process = subprocess.Popen(
                [*command, sys.executable, *program], **given, text=True
            )

    def lines(self) -> list[dict[str, Any]]:
        """Return what was written so far; a line that was cut by a kill does not count."""
        if not self.trace.exists():
            return []
        return [json.loads(line) for line in self.trace.read_bytes().split(b"\n")[:-1]]

    def steps(self) -> list[int]:
        return [line["step"] for line in self.lines() if "step" in line]

    def wait_for(self, condition: Callable[[dict[str, Any]], Any]) -> None:
        """Wait for a line; a process that ends before it fails the test."""
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while not any(condition(line) for line in self.lines()):
            assert self.process.poll() is None, (
                f"ended with {self.process.returncode}: {self.output()}"
            )
            assert time.monotonic() < deadline, f"nothing came: {self.lines()[-3:]}"
            time.sleep(0.005)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the trainer alone, as the kernel does, and wait until it is gone."""
        self.send(signal.SIGKILL)
        self.process.wait()

    def output(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def end(self) -> dict[str, Any]:
        """Wait for the end and return the last line."""
        output, _ = self.process.communicate(timeout=_TIMEOUT_SECONDS)
        assert self.process.returncode == 0, output
        return self.lines()[-1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Life]]:
    """Return a function that starts a life.

    Whatever still runs at the end of the test is killed.
    """
    lives: list[Life] = []
    numbers = itertools.count()

    def start_one(
        *, command: list[str] | None = None, program: str = "train.py", **request: Any
    ) -> Life:
        full = {**request, "run_dir": str(tmp_path / request.get("run_dir", "run"))}
        life = Life(tmp_path / f"trace{next(numbers)}.jsonl", full, command, program)
        lives.append(life)
        return life

    yield start_one
    for life in lives:
        if life.process.poll() is None:
            os.killpg(life.process.pid, signal.SIGKILL)
            life.process.wait()
        if life.process.stdout is not None:
            life.process.stdout.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the last line of a run that nothing happened to, of a new interpreter.

    Its hashes are others.
    """
    place = tmp_path_factory.mktemp("undisturbed")
    life = Life(place / "trace.jsonl", {"run_dir": str(place / "run")}, [])
    return life.end()


@pytest.fixture(scope="session")
def undisturbed_of_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the last line of a run on torch's own loader that nothing happened to."""
    place = tmp_path_factory.mktemp("undisturbed_of_torch")
    return Life(
        place / "trace.jsonl", {"run_dir": str(place / "run"), "loader": "torch"}, None
    ).end()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], None]:
    """Return a function that puts a small run which has trained six steps into a folder.

    A copy of one.
    """
    once = tmp_path_factory.mktemp("trained")
    train(once, 6)
    return lambda place: shutil.copytree(once, place, dirs_exist_ok=True) and None
