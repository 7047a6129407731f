"""A run whose time is over: it saves, stops, and resumes as if nothing had happened."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.forked_attempts import run_supervised

from holdfast.explain.collecting import collect
from holdfast.explain.judging import judge

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"
STOPPED = "H1623"
# The 32 steps of the program then take more than the time that a run is given.
SLOW = {"seconds_per_step": 0.4, "save_interval_steps": 1000}
TIME_SECONDS = 3
# A job must not have ended before the first step, so it lasts longer, for a busy machine. Of its
# time, 10 s are kept free for the exit.
JOB_SECONDS = 20


def squeue_that_says(folder: Path, unix_seconds: float) -> Path:
    """Make a `squeue` that prints a time as Slurm's does, and return its folder."""
    text = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(unix_seconds))
    squeue = folder / "squeue"
    squeue.write_text(f'#!/bin/sh\n[ "$3" = 4711 ] && echo {text}\n')
    squeue.chmod(0o755)
    return folder


@pytest.mark.parametrize("source", ["policy", "variable", "squeue"])
def test_a_run_stops_in_time_and_resumes_exactly(start, undisturbed, tmp_path, monkeypatch, source):
    """The time is that of the policy, or the end of the Slurm job."""
    request: dict[str, Any] = {}
    ends = time.time() + JOB_SECONDS
    if source == "policy":
        request = {"policy": {"max_time": f"{TIME_SECONDS}s"}}
    else:
        monkeypatch.setenv("SLURM_JOB_ID", "4711")
    if source == "variable":
        monkeypatch.setenv("SLURM_JOB_END_TIME", f"{ends:.0f}")
    if source == "squeue":
        folder = squeue_that_says(tmp_path, ends)
        monkeypatch.setenv("PATH", str(folder), prepend=":")

    run = start(**SLOW, **request)
    end = run.end()

    assert end["stop_reason"].startswith("max_time")
    assert 0 < end["end"] == run.steps()[-1] < 32
    verdict = judge(collect(tmp_path / "run"))
    assert verdict.cause == STOPPED
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    rest = start(save_interval_steps=1000)
    assert rest.end()["digest"] == undisturbed["digest"]
    assert rest.lines()[0]["start"] == end["end"]


def test_the_supervisor_does_not_restart_a_run_whose_time_is_over(tmp_path):
    """Its exit code is that of the stop, until the run has finished; then it is 0 at once."""
    request = {
        "run_dir": str(tmp_path / "guarded"),
        "trace": str(tmp_path / "trace"),
        "policy": {"stop_exit_code": 85},
    }

    def supervise(*options: str, **more: Any) -> int:
        command = [sys.executable, str(PROGRAMS / "train.py"), json.dumps({**request, **more})]
        place = ["--run-dir", str(tmp_path / "run"), *options]
        return run_supervised([*place, "--", *command], timeout=300).returncode

    policy = {"max_time": f"{TIME_SECONDS}s", **request["policy"]}
    assert supervise(seconds_per_step=0.2, policy=policy) == 85
    verdict = json.loads((tmp_path / "run" / "verdict.json").read_text())
    assert verdict["cause"] == STOPPED
    assert supervise() == 0
    steps = (tmp_path / "trace").read_text().count('"step"')
    assert steps == 32

    assert supervise() == 0
    assert (tmp_path / "trace").read_text().count('"step"') == steps
