"""`holdfast run --requeue`: Slurm is asked to run a job again whose time is over."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.forked_attempts import run_supervised

from holdfast.recorder.reader import read_events

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "programs" / "train.py"
# 32 steps take longer than the time that the run has.
OUT_OF_TIME = {"policy": {"max_time": "1s", "stop_exit_code": 85}, "seconds_per_step": 0.1}
REFUSED = 75


@pytest.fixture
def supervise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that trains under ``holdfast run --requeue`` in a Slurm job.

    Its `scontrol` writes its arguments to a file, and answers as it is told.
    """
    scontrol = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def run(
        answer: str = "", request: dict[str, Any] = OUT_OF_TIME, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{answer}\n')
        scontrol.chmod(0o755)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        places = {"run_dir": str(tmp_path / "guarded"), "trace": str(tmp_path / "trace")}
        training = [sys.executable, str(PROGRAM), json.dumps({**places, **request})]
        options = ["--run-dir", tmp_path / "run", "--requeue"]
        return run_supervised([*options, "--", *training], timeout=300)

    return run


def asked(tmp_path: Path) -> list[str]:
    """Return the arguments of each call of `scontrol`."""
    file = tmp_path / "asked"
    return file.read_text().splitlines() if file.exists() else []


def test_a_job_is_requeued_until_its_run_has_finished(supervise, tmp_path):
    """A task of a job array is named by the array and its index. The exit code is the script's."""
    job = {"SLURM_JOB_ID": "103", "SLURM_ARRAY_JOB_ID": "100", "SLURM_ARRAY_TASK_ID": "3"}

    assert supervise(**job).returncode == 85
    assert asked(tmp_path) == ["requeue 100_3"]

    assert supervise(request={}).returncode == 0
    assert asked(tmp_path) == ["requeue 100_3"]


def test_a_refusal_is_reported_and_loses_nothing(supervise, tmp_path):
    """The exit code and the event say so, and a start by hand resumes from the same step."""
    refused = supervise("echo Access denied >&2; exit 1", SLURM_JOB_ID="4711")

    assert refused.returncode == REFUSED
    assert "Access denied" in refused.stderr
    (event,) = [
        event for event in read_events(tmp_path / "run" / "supervisor") if event.kind == "requeued"
    ]
    assert event.data == {"job": "4711", "refusal": "Access denied"}

    assert supervise(request={}).returncode == 0
    steps = [line for line in (tmp_path / "trace").read_text().splitlines() if '"step"' in line]
    assert [json.loads(line)["step"] for line in steps] == list(range(1, 33))


@pytest.mark.parametrize(
    ("job", "requeued"),
    [
        ("JobState=RUNNING PreemptTime=2026-11-30T12:39:10", True),
        ("JobState=RUNNING PreemptTime=None", False),
        ("JobState=CANCELLED PreemptTime=2026-11-30T12:39:10", False),
    ],
)
def test_after_sigterm_a_job_is_requeued_only_if_it_is_preempted(
    supervise, tmp_path, job, requeued
):
    """`scancel` sends the same signal, and a job that ends during a preemption is not requeued."""
    answer = f'[ "$2" = show ] && echo "JobId=4711 {job} SuspendTime=None"'
    request = {"policy": {"stop_exit_code": 85}, "terminate_at": 3}

    assert supervise(answer + "; exit 0", request, SLURM_JOB_ID="4711").returncode == 85
    assert asked(tmp_path)[0] == "--oneliner show job 4711"
    assert asked(tmp_path)[1:] == ["requeue 4711"] * requeued


def test_only_the_first_task_of_a_job_asks(supervise, tmp_path):
    """Otherwise, each task that `srun` starts would requeue the job."""
    assert supervise(SLURM_JOB_ID="4711", SLURM_PROCID="1").returncode == 85
    assert asked(tmp_path) == []


def test_outside_slurm_the_option_is_an_error(supervise, tmp_path):
    """The command is not started."""
    ended = supervise()

    assert ended.returncode == 2
    assert "H735" in ended.stderr
    assert not (tmp_path / "trace").exists()
