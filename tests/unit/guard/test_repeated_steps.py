"""A resumed run compares the steps that it repeats with the recording of its earlier attempt."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import events, guarded, kinds_of, square_of
from torch import nn
from torch.utils.data import DataLoader

import holdfast

SAVED_AT = 4
KILLED_AT = 7


def guard_of(run_dir: Path, *, seed: int = 0) -> tuple[holdfast.Guard, nn.Module]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.3), nn.Linear(4, 1))
    loader = DataLoader(torch.randn(80, 2), batch_size=8, shuffle=True)  # type: ignore[arg-type]
    guard = guarded(run_dir, model, loader=loader, save_interval_steps=SAVED_AT, async_save=False)
    return guard, model


def train(run_dir: Path, *, steps: int, scale: float = 1.0, die: bool = False) -> holdfast.Guard:
    """Train up to a step. `scale` changes the loss, as a change of the script would."""
    guard, model = guard_of(run_dir)
    for batch in guard.batches(max_steps=steps + die):
        if guard.global_step == steps:
            os._exit(9)
        guard.step(batch, lambda x: scale * square_of(model)(x))
    return guard


@pytest.fixture
def killed_run(tmp_path: Path) -> Path:
    """Return the directory of a run that was killed three steps after its newest checkpoint."""
    code = f"""
import sys
from pathlib import Path
from tests.unit.guard.test_repeated_steps import train

train(Path(sys.argv[1]), steps={KILLED_AT}, die=True)
"""
    ended = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], check=False)
    assert ended.returncode == 9
    return tmp_path / "run"


def test_identical_steps_are_counted(killed_run):
    """The steps between the checkpoint and the kill are repeated with the same bits."""
    guard = train(killed_run, steps=10)

    (repeated,) = events(guard, "steps_repeated")
    assert repeated.data == {"steps": KILLED_AT - SAVED_AT, "largest_difference": 0.0}
    assert repeated.global_step == KILLED_AT
    assert not kinds_of(guard, "repeated_step_differs")


def test_a_run_that_ends_before_the_last_of_them_counts_those_so_far(killed_run):
    """A run that stops while it repeats steps reports those that it has compared."""
    guard = train(killed_run, steps=SAVED_AT + 1)

    (repeated,) = events(guard, "steps_repeated")
    assert repeated.data["steps"] == 1


def test_the_first_step_that_differs_is_reported_once(killed_run):
    """A script that computes another loss after the resume is told at which step."""
    guard = train(killed_run, steps=10, scale=2.0)

    (differs,) = events(guard, "repeated_step_differs")
    assert differs.global_step == SAVED_AT + 1
    assert differs.data["loss"] == pytest.approx(2 * differs.data["earlier_loss"])
    assert differs.data["equal_steps"] == 0
    assert not kinds_of(guard, "steps_repeated")


def test_steps_from_before_a_change_of_the_script_are_not_compared(killed_run):
    """A run that differs from its first attempt is compared with the attempt after it instead."""
    changed, model = guard_of(killed_run)
    for batch in changed.batches(max_steps=10):
        if changed.global_step == SAVED_AT + 2:
            break
        changed.step(batch, lambda x: 2 * square_of(model)(x))

    guard = train(killed_run, steps=10, scale=2.0)

    assert kinds_of(guard, "repeated_step_differs") == ["repeated_step_differs"]
    (repeated,) = events(guard, "steps_repeated")
    assert repeated.data["steps"] == 1


def test_steps_from_before_a_rollback_are_not_compared(tmp_path):
    """After a rollback, a run trains on other batches, so its older steps prove nothing."""
    code = """
import os, sys
from pathlib import Path
from tests.unit.guard.guarded import square_of
from tests.unit.guard.test_repeated_steps import guard_of

guard, model = guard_of(Path(sys.argv[1]))
for number, batch in enumerate(guard.batches(max_epochs=9)):
    if number == 8:
        os._exit(9)
    bad = 6 <= number < 8
    guard.step(batch, lambda x: square_of(model)(x) * (float("nan") if bad else 1.0))
"""
    environment = {**os.environ, "HOLDFAST_NONFINITE_PATIENCE": "2"}
    subprocess.run([sys.executable, "-c", code, tmp_path], env=environment, check=False)
    guard, _ = guard_of(tmp_path)
    rolled_back: list[Any] = kinds_of(guard, "rolled_back")
    guard.close()
    guard = train(tmp_path, steps=10)

    assert rolled_back
    assert not kinds_of(guard, "repeated_step_differs", "steps_repeated")
