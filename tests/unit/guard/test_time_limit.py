"""The time of a run: it stops early enough to save, and not earlier."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import kinds_of, square_of, the_event

import holdfast
from holdfast.core.policy.policy import Policy
from holdfast.guard.run.slurm import end_of_job
from holdfast.testing import FakeClock

pytestmark = pytest.mark.usefixtures("unchecked_splits")

STEPS = 300


@pytest.fixture(autouse=True)
def without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test as on a machine without Slurm, unless it sets these variables itself."""
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)


class Run:
    """A run of steps that take one second of a fake clock, in the directory of earlier runs.

    Args:
        run_dir: The run directory.
        save_seconds: The time that a checkpoint takes.
        **settings: Arguments of the guard.
    """

    def __init__(self, run_dir: Path, save_seconds: float = 0.0, **settings: Any) -> None:
        torch.manual_seed(0)
        self.clock = FakeClock()
        self.model = torch.nn.Linear(3, 1)
        # A save asks the model for its state, and a step does not.
        self.model.register_state_dict_post_hook(lambda *_: self.clock.advance(save_seconds))
        self.guard = holdfast.Guard(
            run_dir,
            model=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), 0.01),
            loader=[torch.randn(4, 3)] * STEPS,
            clock=self.clock,
            async_save=False,
            **settings,
        )

    def step(self, batch: torch.Tensor) -> None:
        self.guard.step(batch, square_of(self.model))
        self.clock.advance(1.0)

    def train(self, body: Callable[[int], object] = lambda step: None, **limits: int) -> float:
        """Train to the end of the loop, and return the time at which it ended.

        Args:
            body: Function that the loop's body calls after each step, with the global step.
            **limits: The limits of the loop. Defaults to one epoch.
        """
        for batch in self.guard.batches(**(limits or {"max_epochs": 1})):
            self.step(batch)
            body(self.guard.global_step)
        return self.clock.monotonic_seconds()

    def saved_step(self) -> int:
        """Return the step of the newest checkpoint."""
        return max(
            event.global_step for event in self.guard.events() if event.kind == "checkpoint_saved"
        )


@pytest.mark.parametrize("save_seconds", [0.0, 3.0, 10.0])
def test_a_run_saves_and_stops_before_its_time_is_over(tmp_path, save_seconds):
    """It stops at the last boundary that leaves time for one more step and for saves."""
    run = Run(tmp_path, save_seconds, max_time="2m", save_interval_steps=20)

    ended = run.train()

    # A save that blocks the loop is a part of the step, and the time of two saves is kept free.
    assert 120 - 2 * (1.0 + save_seconds) - 2 * save_seconds <= ended <= 120
    assert run.guard.stop_reason.startswith("max_time")
    assert the_event(run.guard, "stop_requested").data["reason"] == run.guard.stop_reason
    assert run.saved_step() == run.guard.global_step < STEPS


def test_a_validation_that_might_not_finish_is_not_started(tmp_path):
    """The time kept free is that of the longest step so far, with what the loop's body does."""
    run = Run(tmp_path, max_time="1m40s")

    # Validations end after 40 s and 80 s.
    ended = run.train(lambda step: run.clock.advance(0.0 if step % 10 else 30.0))

    assert ended == 80.0
    assert run.guard.global_step == 20


def test_the_first_step_counts_only_until_there_is_another(tmp_path):
    """It may compile the model, which no later step does."""
    run = Run(tmp_path, max_time="100s")

    run.train(lambda step: run.clock.advance(44.0 if step == 1 else 0.0))

    assert run.guard.global_step == 55


def test_a_run_makes_one_step_even_if_there_is_no_time(tmp_path):
    """Otherwise, a run that is restarted again and again would make no progress."""
    first = Run(tmp_path, max_time="1s")
    first.train()
    second = Run(tmp_path, max_time="1s")
    second.train()

    assert (first.guard.global_step, second.guard.global_step) == (1, 2)


@pytest.mark.parametrize(
    ("max_time", "stops_before"),
    [("auto", 50), ("30s", 30), ("2m", 50), (None, None)],
)
def test_the_end_of_a_slurm_job_is_a_limit_too(tmp_path, monkeypatch, max_time, stops_before):
    """The earlier of the two counts. None turns off both. A job needs ten seconds for its exit."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", "50")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    run = Run(tmp_path, max_time=max_time)

    ended = run.train(max_steps=60)

    if stops_before is None:
        assert ended == 60
        assert run.guard.stop_reason is None
    else:
        exit_seconds = 10 if stops_before == 50 else 0
        assert stops_before - exit_seconds - 2 <= ended <= stops_before - exit_seconds
        assert the_event(run.guard, "time_limited").data["end"] == stops_before


@pytest.mark.parametrize("end", ["soon", "", "-5", "nan", "0"])
def test_an_end_that_is_unknown_or_has_passed_stops_nothing(tmp_path, monkeypatch, end):
    """One event says so."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", end)
    run = Run(tmp_path)

    assert run.train(max_steps=5) == 5
    run.train(max_steps=10)

    assert run.guard.global_step == 10
    assert kinds_of(run.guard, "end_of_job_unknown", "stop_requested") == ["end_of_job_unknown"]


def test_without_slurm_nothing_is_recorded(tmp_path):
    """A run on a workstation has no limit unless it is given one."""
    run = Run(tmp_path)

    run.train(max_steps=5)

    assert kinds_of(run.guard, "end_of_job_unknown", "time_limited") == []


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        ("echo N/A", "N/A"),
        ("echo slurm_load_jobs error: Invalid job id specified >&2; exit 1", "Invalid job id"),
        ("exec sleep 60", "timed out"),
        (None, "squeue"),
    ],
)
def test_an_answer_of_squeue_without_a_time_is_an_error(tmp_path, monkeypatch, answer, shown):
    """The message holds what `squeue` has printed, or why there is no answer."""
    monkeypatch.setattr("holdfast.guard.run.slurm._SQUEUE_SECONDS", 0.5)
    if answer is not None:
        squeue = tmp_path / "squeue"
        squeue.write_text(f"#!/bin/sh\n{answer}\n")
        squeue.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"

    with pytest.raises(ValueError, match=shown):
        end_of_job({"SLURM_JOB_ID": "4711", "PATH": path}, now=0.0)


@pytest.mark.parametrize(("code", "exits"), [(None, 0), (85, 85)])
def test_a_script_without_a_loop_of_the_guard_ends_as_on_a_signal(tmp_path, code, exits):
    """The step in which the time is nearly over is not made, and the one before it is saved."""
    run = Run(tmp_path, max_time="100s", stop_exit_code=code)
    batch = torch.randn(4, 3)

    with pytest.raises(SystemExit) as ended:
        for _ in range(STEPS):
            run.step(batch)

    assert ended.value.code == exits
    assert run.clock.monotonic_seconds() <= 100
    assert run.saved_step() == run.guard.global_step == 99


def test_the_exit_code_of_stops_is_that_of_the_time(tmp_path):
    """Without one, the script goes on after the loop, and its next loop makes no step."""
    run = Run(tmp_path, max_time="100s")
    run.train()
    with pytest.raises(SystemExit) as ended:
        run.train(max_steps=STEPS)
    assert ended.value.code == 0
    assert run.guard.global_step == 99

    run = Run(tmp_path, max_time="100s", stop_exit_code=85)
    with pytest.raises(SystemExit) as ended:
        run.train()
    assert ended.value.code == 85
    assert run.saved_step() == run.guard.global_step == 198


@pytest.mark.parametrize("max_time", ["auto", "1s"])
def test_a_finished_run_that_is_started_again_ends_at_once(tmp_path, max_time):
    """It makes no step, and is not stopped, so its exit code is 0."""
    Run(tmp_path).train(max_steps=5)
    run = Run(tmp_path, max_time=max_time, stop_exit_code=85)
    run.clock.advance(50.0)

    run.train(max_steps=5)

    assert run.guard.global_step == 5
    assert run.guard.stop_reason is None
    assert the_closing(run) == "finished"


def the_closing(run: Run) -> str:
    """Return how the newest process of a run says that it has ended."""
    return [event.data["how"] for event in run.guard.events() if event.kind == "closed"][-1]


def test_the_variable_sets_the_time(tmp_path, monkeypatch):
    """As with every field."""
    monkeypatch.setenv("HOLDFAST_MAX_TIME", "0-00:01:40")
    run = Run(tmp_path)

    assert 98 <= run.train() <= 100
    assert Policy().max_time == "0-00:01:40"
