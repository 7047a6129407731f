"""Leaks in real trainings.

The line is named from inside, the training stays the same, and the verdict tells it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.prepared import Prepared, run_prepared

from holdfast.core.events.event import Event
from holdfast.recorder.progress import read_board, request_trace
from holdfast.recorder.reader import read_events
from holdfast.recorder.run_files import BOARD_FILE, read_processes
from holdfast.supervise.launch.commands import make_observed_environment

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parent / "programs" / "leak_list.py"
CLI = [sys.executable, "-c", "from holdfast.cli.main import main; main()", "run"]
_TIMEOUT_SECONDS = 120.0
_LINE = next(
    number
    for number, line in enumerate(PROGRAM.read_text().splitlines(), 1)
    if "history.append" in line
)


def events_of(run: Path) -> list[Event]:
    assert not list(run.glob("processes/failed-*")), next(
        run.glob("processes/failed-*")
    ).read_text()
    return [
        event
        for folder, info in read_processes(run)
        if info.role == "trainer"
        for event in read_events(folder)
    ]


def go_on(run: Path) -> Path:
    """Return the file that a training waits for before it takes its fifth step."""
    return run.with_name("go on")


def request(run: Path, ended: Callable[[], Any]) -> None:
    """Request a trace from the trainer of a run, once it has made some steps, and let it go on."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while time.monotonic() < deadline and ended() is None:
        for folder, _ in read_processes(run):
            standing = read_board(folder / BOARD_FILE)
            if standing is not None and standing.step >= 3:
                request_trace(folder / BOARD_FILE, 1)
                go_on(run).touch()
                return
        time.sleep(0.01)


def test_a_traced_training_computes_the_same(tmp_path: Path) -> None:
    """Every loss and the random states at the end are those of a plain run, and the line that
    keeps is named.
    """
    run = tmp_path / "run"
    run.mkdir()
    program = [PROGRAM, "200"]
    plain = run_prepared(program, text=False, timeout=_TIMEOUT_SECONDS)
    assert plain.returncode == 0, plain.stderr
    environment = {**make_observed_environment(os.environ, run, 0), "GO_ON": str(go_on(run))}
    with Prepared(program, env=environment, stdout=subprocess.PIPE) as process:
        request(run, process.poll)
        output, _ = process.communicate(timeout=_TIMEOUT_SECONDS)
    assert process.returncode == 0
    assert output == plain.stdout
    (leak,) = [event.data for event in events_of(run) if event.kind == "leak"]
    assert (leak["form"], leak["signature"]) == ("graph", "H1502")
    assert leak["retained_at"].startswith(f"{PROGRAM}:{_LINE} in main: history.append(outputs)")
    assert leak["held_by"] == "history[...] in leak_list.py, main()"
    assert [event.data["found"] for event in events_of(run) if event.kind == "leak_trace"] == [1]


def test_a_run_that_a_leak_has_ended_is_told_so(tmp_path: Path) -> None:
    """When memory has run out, the verdict is the leak, and the line stands first in what to do."""
    run = tmp_path / "run"
    command = [
        *CLI,
        "--run-dir",
        str(run),
        "--max-restarts",
        "0",
        "--",
        sys.executable,
        str(PROGRAM),
        "5000",
        "128",
    ]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "GO_ON": str(go_on(run))}
    with subprocess.Popen(
        command, env=alone, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        request(run, process.poll)
        _, errors = process.communicate(timeout=_TIMEOUT_SECONDS)
    assert process.returncode not in (0, None), errors
    verdict = json.loads((run / "verdict.json").read_text())
    assert verdict["cause"] == "H1502", verdict
    assert verdict["family"] == "host out of memory"
    assert verdict["fix"].startswith(f"Look first at {PROGRAM}:{_LINE} ")
