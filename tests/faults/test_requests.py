"""`holdfast save` and `holdfast stop`, which ask a run from another process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.conftest import PROGRAMS, Life

from holdfast.checkpoint.store import Store
from holdfast.core.lock import find_holder
from holdfast.core.run_requests import RequestFolder
from holdfast.recorder.reader import read_events

pytestmark = pytest.mark.slow

CLI = [sys.executable, "-m", "holdfast"]
STOPPED = "H1623"
SELDOM = {"save_interval_steps": 1000}
_TIMEOUT_SECONDS = 300.0


def ask(action: str, run_dir: Path, *options: str) -> subprocess.Popen[str]:
    """Start a command that asks a run, and return its process."""
    return subprocess.Popen(
        [*CLI, action, str(run_dir), "--json", *options], stdout=subprocess.PIPE, text=True
    )


def result_of(command: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    """Return the exit code of a command and its JSON."""
    output, _ = command.communicate(timeout=_TIMEOUT_SECONDS)
    return command.returncode, json.loads(output)


def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def requests_in(run_dir: Path) -> list[Path]:
    return list((run_dir / "requests").glob("*.request"))


def ask_in_step_7(
    start: Callable[..., Life], tmp_path: Path, action: str, **settings: Any
) -> tuple[Life, subprocess.Popen[str]]:
    """Start a training, ask it while it is in the body of its seventh step, and end that step."""
    ends_step = tmp_path / "ends_step"
    run = start(long_step=7, ends_long_step=str(ends_step), **SELDOM, **settings)
    run.wait_for(lambda line: line.get("step") == 7)
    command = ask(action, tmp_path / "run")
    wait_until(lambda: requests_in(tmp_path / "run"))
    ends_step.touch()
    return run, command


def events_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    events = read_events(run_dir / "recorder" / "rank0")
    return [dict(event.data) for event in events if event.kind == kind]


def test_a_run_saves_on_request_and_resumes_from_there(start, tmp_path, undisturbed):
    """The checkpoint is that of the batch in which the request arrived, and the run goes on.

    A run that is killed after it resumes from there, and ends bit-identical.
    """
    run, command = ask_in_step_7(start, tmp_path, "save", seconds_per_step=0.05)
    code, result = result_of(command)
    run.wait_for(lambda line: line.get("step", 0) >= 9)
    run.kill()

    assert (code, result["global_step"], result["problem"]) == (0, 7, None)
    assert (tmp_path / "run" / "checkpoints" / result["checkpoint"]).is_dir()
    (event,) = events_of(tmp_path / "run", "request_received")
    assert event["action"] == "save"
    rest = start(**SELDOM)
    assert rest.end()["digest"] == undisturbed["digest"]
    assert rest.lines()[0]["resumed_from"] == result["checkpoint"]


def test_a_run_stops_on_request(start, tmp_path, undisturbed):
    """It saves, ends its loop as after a signal, and releases its directory.

    `holdfast explain` says that it was stopped, and a new start goes on bit-identical.
    """
    run_dir = tmp_path / "run"
    run, command = ask_in_step_7(start, tmp_path, "stop", policy={"stop_exit_code": 85})
    code, result = result_of(command)

    assert (code, result["global_step"], result["problem"]) == (0, 7, None)
    assert run.process.wait(_TIMEOUT_SECONDS) == 85
    assert events_of(run_dir, "stop_requested")[0]["reason"] == "requested from outside"
    explained = subprocess.run(
        [*CLI, "explain", str(run_dir), "--json"], capture_output=True, text=True, check=False
    )
    assert json.loads(explained.stdout)["cause"] == STOPPED
    rest = start(**SELDOM)
    assert rest.end()["digest"] == undisturbed["digest"]
    assert rest.lines()[0]["start"] == 7


def test_a_run_that_does_not_reach_a_boundary_is_asked_in_vain(start, tmp_path):
    """The request is withdrawn when the time is up: the run that continues later saves nothing."""
    run_dir = tmp_path / "run"
    run = start(seconds_per_step=0.02, **SELDOM)
    run.wait_for(lambda line: line.get("step", 0) >= 2)
    run.send(signal.SIGSTOP)
    code, result = result_of(ask("save", run_dir, "--timeout", "0.5"))
    run.send(signal.SIGCONT)
    run.end()

    assert (code, result["checkpoint"]) == (1, None)
    assert requests_in(run_dir) == []
    assert events_of(run_dir, "request_received") == []


def test_a_request_to_a_dead_process_stops_no_later_one(start, tmp_path):
    """A later process has other things to do, even one with the same PID on the same host."""
    run_dir = tmp_path / "run"
    run = start(seconds_per_step=0.02, **SELDOM)
    run.wait_for(lambda line: line.get("step", 0) >= 2)
    holder = find_holder(run_dir / "lock")
    run.kill()
    RequestFolder(run_dir).send("stop", holder)
    rest = start(**SELDOM)

    assert rest.end()["stop_reason"] is None
    assert requests_in(run_dir) == []


def test_a_run_without_a_process_or_without_a_guard_is_an_error(start, tmp_path):
    """Nobody would carry out the request: exit code 2, and another reason for each."""
    run_dir = tmp_path / "run"
    start(epochs=1).end()
    ended_code, ended = result_of(ask("stop", run_dir))
    supervised = tmp_path / "supervised"
    subprocess.run([*CLI, "run", "--run-dir", str(supervised), "--", "true"], check=True)
    supervised_code, without_guard = result_of(ask("save", supervised))

    assert (ended_code, ended["error"]["rule"]) == (2, "H736")
    assert (supervised_code, without_guard["error"]["rule"]) == (2, "H731")
    assert requests_in(run_dir) == []


def test_all_ranks_save_and_stop_on_request(tmp_path):
    """The first rank reads the request, and all ranks carry it out after the same step."""
    run_dir = tmp_path / "run"
    log = tmp_path / "log"
    program = [str(PROGRAMS / "stopped_ranks.py"), json.dumps({"run_dir": str(run_dir)})]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with log.open("w") as output:
        ranks = subprocess.Popen([*launcher, *program], stdout=output, stderr=output)
    try:
        wait_until(lambda: "rank 1 step 5" in log.read_text() or ranks.poll() is not None)
        save_code, saved = result_of(ask("save", run_dir))
        stop_code, stopped = result_of(ask("stop", run_dir))
        assert ranks.wait(_TIMEOUT_SECONDS) == 0, log.read_text()
    finally:
        ranks.kill()
        ranks.wait()

    assert (save_code, saved["problem"]) == (0, None)
    assert (stop_code, stopped["problem"]) == (0, None)
    assert 5 <= saved["global_step"] < stopped["global_step"] < 400
    steps = {entry.global_step for entry in Store(run_dir / "checkpoints").entries()}
    assert {saved["global_step"], stopped["global_step"]} <= steps
    for rank in range(2):
        end = f"rank {rank} ended at {stopped['global_step']}: requested from outside"
        assert end in log.read_text()
