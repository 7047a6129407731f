"""A loop over ``guard.batches`` that keeps its own ``optimizer.step()``: its steps are counted,
recorded, saved and resumed. Steps that no checkpoint could hold are refused before a weight moves.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import events, guarded, kinds_of, square_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.recorder.black_box import StepMark
from holdfast.recorder.reader import read_steps

DATA = [torch.randn(8, 2) for _ in range(3)]


class Lookahead(torch.optim.Optimizer):
    """A wrapper that steps the optimizer inside it, and holds its parameter groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


class OwnLoop:
    """A script with dropout, shuffling, a scheduler and accumulation that takes its own steps."""

    def __init__(self, run_dir: Path, *, accumulate: int = 1, **settings: Any) -> None:
        torch.manual_seed(0)
        self.accumulate = accumulate
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5)
        data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        self.losses: list[float] = []
        self.guard = guarded(
            run_dir,
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            loader=DataLoader(data, batch_size=8, shuffle=True),
            **{"save_interval_steps": 1000, **settings},
        )

    def train(
        self, *, stop_after: int | None = None, after_step: Callable[[int], object] | None = None
    ) -> OwnLoop:
        """Train for three epochs, or request a stop after some batches.

        `after_step` is called in the loop body with the number of steps of this process.
        """
        for number, (x, y) in enumerate(self.guard.batches(max_epochs=3), start=1):
            loss = (self.model(x) - y).square().mean() / self.accumulate
            loss.backward()
            if number % self.accumulate == 0:
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.item())
                if after_step is not None:
                    after_step(len(self.losses))
            if number == stop_after:
                self.guard.request_stop()
        return self

    def state(self) -> list[Any]:
        moments = self.optimizer.state_dict()["state"]
        return [
            *(parameter.detach().numpy().tobytes() for parameter in self.model.parameters()),
            *(moment.numpy().tobytes() for each in moments.values() for moment in each.values()),
            self.scheduler.state_dict(),
        ]


def step_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    square_of(model)(batch).backward()
    optimizer.step()


def train_by_hand(
    run_dir: Any, model: nn.Module, optimizer: Any, stepped: torch.optim.Optimizer, **kept: Any
) -> holdfast.Guard:
    guard = guarded(run_dir, model, optimizer, loader=DATA, **kept)
    for batch in guard.batches(max_epochs=2):
        step_by_hand(model, stepped, batch)
    return guard


# --- what is counted, recorded, saved and resumed


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("stop_after", [1, 6, 11])
def test_a_stopped_loop_resumes_exactly(tmp_path, accumulate, stop_after):
    """A loop that was stopped, also in the middle of an accumulation, ends with the same bits."""
    undisturbed = OwnLoop(tmp_path / "undisturbed", accumulate=accumulate).train()

    stopped = OwnLoop(tmp_path / "run", accumulate=accumulate).train(stop_after=stop_after)
    resumed = OwnLoop(tmp_path / "run", accumulate=accumulate).train()

    # A stop waits for the step that the gradients are for.
    assert stopped.guard.global_step == math.ceil(stop_after / accumulate)
    assert resumed.guard.global_step == undisturbed.guard.global_step == 24 // accumulate
    assert resumed.state() == undisturbed.state()


def test_a_killed_loop_resumes_from_its_newest_save(tmp_path):
    """Saves are due as with ``guard.step``, and only where no gradients are accumulated."""
    undisturbed = OwnLoop(tmp_path / "undisturbed", accumulate=4).train()
    code = """
import os, sys
from pathlib import Path
from tests.unit.guard.test_own_steps import OwnLoop

loop = OwnLoop(Path(sys.argv[1]), accumulate=4, save_interval_steps=1, async_save=False)
loop.train(after_step=lambda step: os._exit(9) if step == 4 else None)
"""

    killed = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], check=False)
    resumed = OwnLoop(tmp_path / "run", accumulate=4)
    resumed_at = resumed.guard.global_step
    resumed.train()

    assert killed.returncode == 9
    assert resumed_at == 3
    assert resumed.state() == undisturbed.state()


def test_steps_are_recorded_with_their_losses_and_norms(tmp_path):
    """The recording of the steps holds the losses on which the loop called ``backward``."""
    loop = OwnLoop(tmp_path).train()

    steps = read_steps(tmp_path / "recorder" / "rank0")
    committed = [step for step in steps if step.mark is StepMark.COMMITTED]
    assert [step.loss for step in committed] == pytest.approx(loop.losses)
    assert all(step.grad_norm > 0 for step in committed)
    assert kinds_of(loop.guard, "loop_steps") == ["loop_steps"]


def test_the_scheduler_is_left_to_the_loop(tmp_path):
    """The guard saves a scheduler that the loop advances, and does not advance it as well."""
    loop = OwnLoop(tmp_path, scheduler_interval="epoch").train()
    assert loop.scheduler.last_epoch == 24


def test_nan_is_reported_once_and_saved_never(tmp_path):
    """NaN takes effect in a loop's own step. It is an event, and no checkpoint holds it."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = guarded(
        tmp_path,
        model,
        optimizer,
        loader=[*DATA, DATA[0] * math.nan, DATA[0]],
        save_interval_steps=1,
        async_save=False,
    )

    for batch in guard.batches(max_epochs=1):
        step_by_hand(model, optimizer, batch)

    (taken,) = events(guard, "nonfinite_step_taken")
    assert taken.global_step == 4
    assert torch.isfinite(model.weight).all()
    assert kinds_of(guard, "rolled_back")


def test_an_error_that_ends_the_script_is_recorded(tmp_path):
    """An error in the loop body, such as out of memory, is in the recording of the run."""
    code = """
import sys
from pathlib import Path
from tests.unit.guard.guarded import ask_for_too_much
from tests.unit.guard.test_own_steps import OwnLoop

OwnLoop(Path(sys.argv[1])).train(after_step=ask_for_too_much)
"""

    environment = {name: os.environ[name] for name in os.environ if name != "PYTEST_CURRENT_TEST"}
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path], env=environment, check=False, capture_output=True
    )

    assert ended.returncode == 1
    (left,) = events(OwnLoop(tmp_path).guard, "left_by_exception")
    assert "memory" in left.data["message"]


# --- what is refused


def test_a_run_takes_all_its_steps_in_one_way(tmp_path):
    """``guard.step`` after a step of the loop is H212, and so is the opposite order."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = guarded(tmp_path, model, optimizer, loader=DATA)

    with pytest.raises(holdfast.BatchError) as raised:
        for batch in guard.batches(max_epochs=1):
            step_by_hand(model, optimizer, batch)
            guard.step(batch, square_of(model))

    assert raised.value.rule == "H212"


def test_another_optimizer_of_the_same_weights_is_refused(tmp_path):
    """An optimizer that the guard was not given, over parameters of the guarded model, is H212
    too.
    """
    model = nn.Linear(2, 1)

    with pytest.raises(holdfast.BatchError) as raised:
        train_by_hand(tmp_path, model, None, torch.optim.AdamW(model.parameters()))

    assert raised.value.rule == "H212"


@pytest.mark.parametrize("wrapped", [False, True])
def test_one_of_two_optimizers_stepped_by_hand_is_refused(tmp_path, wrapped):
    """A loop that gives the generator's step to the guard and keeps the discriminator's is H212
    at the latter.
    """
    models = {"generator": nn.Linear(2, 2), "discriminator": nn.Linear(2, 1)}
    optimizers: dict[str, Any] = {
        name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()
    }
    stepped = optimizers["discriminator"]
    if wrapped:
        optimizers["discriminator"] = Lookahead(stepped)
    guard = guarded(tmp_path, models, optimizers, loader=DATA)
    steps = 0

    with pytest.raises(holdfast.BatchError) as raised:
        for batch in guard.batches(max_epochs=1):
            guard.step(batch, square_of(models["generator"]), optimizer="generator")
            steps += 1
            step_by_hand(models["discriminator"], stepped, batch)

    assert raised.value.rule == "H212"
    assert steps == 1


def test_steps_of_the_guard_and_of_models_that_it_does_not_hold_are_free(tmp_path):
    """A wrapper of an optimizer, a model that the guard does not hold, and steps around the loop
    are no error.
    """
    model, critic = nn.Linear(2, 1), nn.Linear(2, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
    step_by_hand(model, inner, DATA[0])
    inner.zero_grad()
    guard = guarded(tmp_path, model, Lookahead(inner), loader=DATA)

    for batch in guard.batches(max_epochs=2):
        assert not guard.step(batch, square_of(model)).skipped
        step_by_hand(critic, of_critic, batch)

    assert guard.global_step == 6
    step_by_hand(model, inner, DATA[0])


def test_a_loop_that_was_not_closed_does_not_refuse_the_steps_of_another_guard(tmp_path):
    """Two guards over one model: while the loop of the first is suspended, the second steps."""
    model = nn.Linear(2, 1)
    first = guarded(tmp_path / "first", model, loader=DATA)
    suspended = first.batches(max_epochs=1)
    next(suspended)

    second = guarded(tmp_path / "second", model, loader=DATA)
    for batch in second.batches(max_epochs=1):
        second.step(batch, square_of(model))

    assert second.global_step == 3
