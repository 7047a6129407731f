"""The files of `docs/how-to/spot-machines.md` continue a run on another machine."""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.docs.pages import DOCS, blocks
from tests.prepared import Prepared

FILES = {block.title: block.text for block in blocks(DOCS / "how-to" / "spot-machines.md")}


def unit() -> Any:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(FILES["train.service"])
    return parser["Service"]


class Machine:
    """A folder with the script, whose disk is another folder."""

    def __init__(self, folder: Path, disk: Path) -> None:
        folder.mkdir()
        self.folder = folder
        text = FILES["train.py"].replace("/mnt/runs", str(disk))
        # A line for each step, so that the test can disturb the process after some of them.
        text = text.replace("    guard.step(", '    print("step", flush=True)\n    guard.step(')
        (folder / "train.py").write_text(text)

    def start(self) -> subprocess.Popen[str]:
        """Start the command of the unit, with its environment."""
        program, *arguments = shlex.split(unit()["ExecStart"])
        assert program.endswith("/python")
        name, value = unit()["Environment"].split("=")
        return Prepared(
            arguments,
            cwd=self.folder,
            env={**os.environ, name: value, "HOLDFAST_SAVE_INTERVAL_STEPS": "20"},
            stdout=subprocess.PIPE,
            text=True,
        )


def lines_until_step(process: subprocess.Popen[str], step: int) -> list[str]:
    """Return what a process has printed when it begins its nth step."""
    assert process.stdout is not None
    lines = [process.stdout.readline().strip()]
    while lines.count("step") < step:
        lines.append(process.stdout.readline().strip())
    return lines


def weights(disk: Path) -> dict[str, torch.Tensor]:
    return torch.load(disk / "final.pt", weights_only=True)


def finish(machine: Machine) -> str:
    """Run to the end, and return the first line."""
    process = machine.start()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert output.splitlines()[-1] == "ended at step 1024"
    return output.splitlines()[0]


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run that nothing disturbs."""
    disk = tmp_path / "undisturbed"
    disk.mkdir()
    finish(Machine(tmp_path / "first", disk))
    return weights(disk)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.slow
def test_a_shutdown_and_a_kill_continue_on_the_same_disk(
    tmp_path: Path, expected: dict[str, torch.Tensor]
) -> None:
    """The unit's signal gives its exit code and loses no step; SIGKILL repeats a few."""
    disk = tmp_path / "disk"
    disk.mkdir()

    process = Machine(tmp_path / "a", disk).start()
    lines_until_step(process, 30)
    process.send_signal(signal.Signals[unit()["KillSignal"]])
    steps = 30 + process.communicate(timeout=300)[0].count("step\n")
    assert process.returncode == int(unit()["RestartPreventExitStatus"])

    process = Machine(tmp_path / "b", disk).start()
    assert lines_until_step(process, 50)[0] == f"continues at step {steps}"
    process.kill()
    process.communicate(timeout=300)

    assert steps < int(finish(Machine(tmp_path / "c", disk)).split()[-1]) <= steps + 50
    assert_equal(weights(disk), expected)


class Metadata(BaseHTTPRequestHandler):
    """Answers as the metadata service of AWS does: 404 until the end is announced."""

    announced = threading.Event()
    asked = threading.Event()

    def do_PUT(self) -> None:
        self._answer(200, b"token")

    def do_GET(self) -> None:
        is_right = self.headers["X-aws-ec2-metadata-token"] == "token"
        self._answer(200 if is_right and self.announced.is_set() else 404, b"{}")
        self.asked.set()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def metadata() -> Iterator[str]:
    """Return the address of a metadata service."""
    Metadata.announced.clear()
    Metadata.asked.clear()
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_an_announcement_stops_the_run_and_a_copy_continues_it(
    tmp_path: Path, metadata: str, expected: dict[str, torch.Tensor]
) -> None:
    """The script waits, stops the run once the end is announced, and a copy is the same run."""
    disk = tmp_path / "disk"
    disk.mkdir()
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "holdfast").write_text(f'#!/bin/sh\nexec {sys.executable} -m holdfast "$@"\n')
    (tools / "holdfast").chmod(0o755)
    (tmp_path / "on-notice.sh").write_text(FILES["on-notice.sh"])
    process = Machine(tmp_path / "a", disk).start()
    lines_until_step(process, 1)

    watcher = subprocess.Popen(
        ["sh", tmp_path / "on-notice.sh", disk / "a"],
        env={
            **os.environ,
            "PATH": f"{tools}:{os.environ['PATH']}",
            "METADATA": metadata,
            "INTERVAL": "0.1",
        },
    )
    assert Metadata.asked.wait(300)
    assert watcher.poll() is None
    Metadata.announced.set()
    output, _ = process.communicate(timeout=300)
    assert watcher.wait(300) == 0
    assert process.returncode == int(unit()["RestartPreventExitStatus"])

    other_disk = tmp_path / "other"
    shutil.copytree(disk, other_disk)
    shutil.rmtree(disk)
    steps = 1 + output.count("step\n")
    assert finish(Machine(tmp_path / "b", other_disk)) == f"continues at step {steps}"
    assert_equal(weights(other_disk), expected)
