"""Jobs beside the training: they end, they are waited for, and a forked process does not wait for them."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.background import Job, nonfinite_copies, wait_for_jobs


def test_a_job_runs_beside_and_gives_its_result(tmp_path: Path) -> None:
    """It is under way until its function returns, and `result` waits for what that returned."""
    gate = threading.Event()

    def work() -> int:
        gate.wait(60)
        return threading.get_ident()

    job = Job(work, tmp_path)
    assert job.is_running
    gate.set()
    assert job.result() not in (None, threading.get_ident())
    assert not job.is_running


def test_what_a_job_raises_is_raised_where_it_is_asked_for(tmp_path: Path) -> None:
    """An error does not get lost in its thread, and does not appear anywhere else."""

    def fail() -> None:
        raise ZeroDivisionError("here")

    job = Job(fail, tmp_path)
    with pytest.raises(ZeroDivisionError, match="here"):
        job.result()


def test_jobs_of_a_directory_are_waited_for(tmp_path: Path) -> None:
    """Whoever opens a directory waits for those who still write to it, and for no others."""
    gate, done = threading.Event(), []
    other = Job(lambda: gate.wait(60), tmp_path / "other")
    Job(lambda: done.append(1), tmp_path / "mine")
    wait_for_jobs(tmp_path / "mine")
    assert done == [1]
    assert other.is_running
    gate.set()
    other.result()


def test_a_forked_process_does_not_wait_for_a_thread_that_it_lacks(tmp_path: Path) -> None:
    """In a child that was forked meanwhile a job is over, without a result."""
    gate = threading.Event()
    job = Job(lambda: gate.wait(60), tmp_path)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if not job.is_running and job.result() is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    gate.set()
    assert job.result() is True


@pytest.mark.parametrize("size", [1, 32_767, 32_768, 200_000])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_bad_copies_are_found_wherever_they_are(size: int, value: float) -> None:
    """NaN and Inf are found in the last element of tensors of any size, by name and once each."""
    good, bad = torch.ones(size), torch.ones(size)
    bad[-1] = value
    named = [("good", good), ("bad", bad), ("whole numbers", torch.ones(3, dtype=torch.int64)), ("empty", good[:0])]
    assert nonfinite_copies(iter(named)) == (["bad"], 1)
    assert nonfinite_copies([]) == ([], 0)
