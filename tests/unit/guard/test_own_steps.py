"""A loop over ``guard.batches`` that keeps its own ``optimizer.step()``: its steps are counted,
recorded, saved and resumed. Steps that no checkpoint could hold are refused before a weight moves.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import FailsHalfWay, events, guarded, kinds_of, square_of
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


def test_a_requested_save_is_not_made_in_the_middle_of_an_accumulation(tmp_path):
    """A loop that is left there, after ``guard.save()``, resumes exactly from an earlier save."""
    undisturbed = OwnLoop(tmp_path / "undisturbed", accumulate=4).train()
    left = OwnLoop(tmp_path / "run", accumulate=4)

    for number, (x, y) in enumerate(left.guard.batches(max_epochs=3), start=1):
        ((left.model(x) - y).square().mean() / 4).backward()
        if number == 4:
            left.optimizer.step()
            left.scheduler.step()
            left.optimizer.zero_grad()
        if number == 6:
            left.guard.save()
            break
    resumed = OwnLoop(tmp_path / "run", accumulate=4).train()

    assert resumed.state() == undisturbed.state()


def train_in_one_loop_per_epoch(
    run_dir: Path, *, stop_after: int | None = None, epochs: int = 3
) -> OwnLoop:
    """Enter the guard's loop for each epoch, and step the scheduler between two of them.

    Args:
        run_dir: Run directory.
        stop_after: After how many steps of this process a stop is requested.
        epochs: The epoch after which the script ends, as if it were killed there.
    """
    script = OwnLoop(run_dir)
    steps = 0
    for epoch in range(epochs):
        for x, y in script.guard.batches(max_epochs=epoch + 1):
            script.optimizer.zero_grad()
            (script.model(x) - y).square().mean().backward()
            script.optimizer.step()
            steps += 1
            if steps == stop_after:
                script.guard.request_stop()
        if script.guard.stop_reason is not None:
            break
        script.scheduler.step()
        torch.randn(epoch + 1)
    return script


@pytest.mark.parametrize("disturbance", [{"stop_after": 20}, {"stop_after": 3}, {"epochs": 2}])
def test_code_between_loops_that_a_resume_repeats_takes_effect_once(tmp_path, disturbance):
    """A script with a loop for each epoch steps its scheduler and draws numbers as often as without
    the interruption, although it goes through its finished epochs again.
    """
    undisturbed = train_in_one_loop_per_epoch(tmp_path / "undisturbed")

    train_in_one_loop_per_epoch(tmp_path / "run", **disturbance)
    resumed = train_in_one_loop_per_epoch(tmp_path / "run")

    assert resumed.guard.global_step == undisturbed.guard.global_step == 24
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


# --- steps that fail, are skipped, or are nested


class CallsSuper(torch.optim.SGD):
    """An optimizer that torch hooks twice: in its own ``step``, and in the one that it calls."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_a_step_that_calls_super_is_counted_once_and_saved(tmp_path):
    """A subclass's ``step`` that calls ``super().step()`` is one step, and the run can save it."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)  # torch hooks a class on first use.
    model = nn.Linear(2, 1)
    optimizer = CallsSuper(model.parameters(), lr=0.1)

    guard = train_by_hand(tmp_path, model, optimizer, optimizer, save_interval_steps=1000)

    assert guard.global_step == 6
    assert guarded(tmp_path, model, CallsSuper(model.parameters(), lr=0.1)).global_step == 6


def train_and_catch(run_dir: Path, fail_at: int | None) -> tuple[holdfast.Guard, nn.Module]:
    """Train with an optimizer that fails in the middle of one step, an error the script catches."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = FailsHalfWay(model.parameters(), lr=0.1, fail_at=fail_at or -1)
    guard = guarded(run_dir, model, optimizer, loader=DATA, save_interval_steps=2, async_save=False)
    for batch in guard.batches(max_epochs=3):
        with contextlib.suppress(RuntimeError):
            step_by_hand(model, optimizer, batch)
    return guard, model


def test_a_failed_step_that_the_script_catches_is_undone(tmp_path):
    """The run returns to its newest checkpoint and repeats the steps since then."""
    undisturbed, expected = train_and_catch(tmp_path / "undisturbed", fail_at=None)
    guard, model = train_and_catch(tmp_path / "run", fail_at=4)

    assert kinds_of(guard, "roll_back") == ["roll_back"]
    assert guard.global_step == undisturbed.global_step == 9
    assert torch.equal(model.weight, expected.weight)


def test_a_step_that_keeps_failing_ends_the_run(tmp_path):
    """An optimizer that fails again at the same step is H213, instead of a run without saves."""
    model = nn.Linear(2, 1)
    optimizer = FailsHalfWay(model.parameters(), lr=0.1)
    guard = guarded(tmp_path, model, optimizer, loader=DATA, save_interval_steps=2)

    with pytest.raises(holdfast.BatchError) as raised:
        for batch in guard.batches(max_epochs=2):
            with contextlib.suppress(RuntimeError):
                step_by_hand(model, optimizer, batch)

    assert raised.value.rule == "H213"


def test_the_loss_of_a_step_that_the_script_skips_is_not_recorded(tmp_path):
    """A script that discards gradients with NaN, as `GradScaler` does, is not accused of NaN."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = guarded(tmp_path, model, optimizer, loader=[DATA[0] * math.nan, DATA[0]])

    for batch in guard.batches(max_epochs=1):
        optimizer.zero_grad()
        loss = square_of(model)(batch)
        loss.backward()
        if loss.isfinite():
            optimizer.step()

    (step,) = read_steps(tmp_path / "recorder" / "rank0")
    assert step.loss == pytest.approx(loss.item())
    assert not kinds_of(guard, "nonfinite_step_taken")


@pytest.mark.parametrize("fetches_ahead", [False, True])
def test_a_loop_that_fetches_ahead_is_reported(tmp_path, fetches_ahead):
    """A loop that holds a batch it has not trained on is reported once, at its first step."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = guarded(tmp_path, model, optimizer, loader=DATA)

    previous = None
    for batch in guard.batches(max_epochs=2):
        if not fetches_ahead:
            step_by_hand(model, optimizer, batch)
        elif previous is not None:
            step_by_hand(model, optimizer, previous)
        previous = batch

    reports = [event.data["why"] for event in events(guard, "resume_may_differ")]
    assert sum("second batch" in why for why in reports) == fetches_ahead


def test_a_norm_that_exceeds_fp16_is_no_inf(tmp_path):
    """The norm of fp16 gradients is computed in fp32, so finite gradients have a finite norm."""
    model = nn.Linear(400, 1, bias=False, dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = guarded(tmp_path, model, optimizer, loader=DATA[:1])

    for _ in guard.batches(max_epochs=1):
        (model.weight * 6e4).sum().backward()
        optimizer.step()

    (step,) = read_steps(tmp_path / "recorder" / "rank0")
    assert step.grad_norm == pytest.approx(20 * 6e4, rel=1e-3)
    assert not kinds_of(guard, "nonfinite_step_taken")


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_changes_neither_loss_nor_norm(tmp_path, fused):
    """The recorded loss and gradient norm do not contain the scale of a ``GradScaler``."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    guard = guarded(tmp_path, model, optimizer, loader=DATA[:2], state={"scaler": scaler})

    for _ in guard.batches(max_epochs=1):
        loss = square_of(model)(DATA[0])
        if guard.global_step == 0:
            # The scaler has no scale before its first use.
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    plain, scaled = read_steps(tmp_path / "recorder" / "rank0")
    assert scaled.loss == pytest.approx(plain.loss)
    assert scaled.grad_norm == pytest.approx(plain.grad_norm)


def test_a_stop_waits_for_each_optimizer_that_accumulates(tmp_path):
    """A generator that steps every third batch is in no checkpoint in the middle of its step."""
    models = {"generator": nn.Linear(2, 2), "discriminator": nn.Linear(2, 1)}
    optimizers = {
        name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()
    }
    guard = guarded(tmp_path, models, optimizers, loader=DATA)

    for number, batch in enumerate(guard.batches(max_epochs=9), start=1):
        step_by_hand(models["discriminator"], optimizers["discriminator"], batch)
        square_of(models["generator"])(batch).backward()
        if number % 3 == 0:
            optimizers["generator"].step()
            optimizers["generator"].zero_grad()
        if number == 4:
            guard.request_stop()

    assert guard.global_step == 6 + 2


# --- accumulation over the end of an epoch


def test_an_epoch_without_a_step_does_not_advance_the_scheduler(tmp_path):
    """The end of an epoch before the first step is in an accumulation, so nothing is advanced."""
    loop = OwnLoop(tmp_path, accumulate=12, scheduler_interval="epoch").train()
    assert loop.scheduler.last_epoch == loop.guard.global_step == 2


def test_an_accumulation_may_be_longer_than_an_epoch(tmp_path):
    """``max_steps`` is reached although there are epochs without a step."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = guarded(tmp_path, model, optimizer, loader=DATA)

    for number, batch in enumerate(guard.batches(max_steps=2), start=1):
        square_of(model)(batch).backward()
        if number % 5 == 0:
            optimizer.step()
            optimizer.zero_grad()

    assert guard.global_step == 2


# --- what the guard sees


def test_weights_that_change_without_a_visible_step_are_reported(tmp_path):
    """A loop that updates the weights by hand is told that no step is counted, and can stop."""
    model = nn.Linear(2, 1)
    guard = guarded(tmp_path, model, loader=DATA, save_interval_steps=1)
    batches = 0

    for batch in guard.batches(max_epochs=2):
        batches += 1
        model.zero_grad()
        square_of(model)(batch).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        guard.request_stop()

    assert batches == 1
    assert kinds_of(guard, "steps_not_seen") == ["steps_not_seen"]


def test_interleaved_loops_leave_torch_as_it_was(tmp_path):
    """``torch.autograd.backward`` is the original again, in whichever order two loops end."""
    original = torch.autograd.backward
    models = [nn.Linear(2, 1), nn.Linear(2, 1)]
    guards = [
        guarded(tmp_path / name, model, loader=DATA)
        for name, model in zip("ab", models, strict=True)
    ]
    loops = [guard.batches(max_epochs=1) for guard in guards]
    for loop in loops:
        next(loop)
    wrapped = torch.autograd.backward

    for loop in loops:
        loop.close()

    assert wrapped is not original
    assert torch.autograd.backward is original


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


@pytest.mark.parametrize(
    "setting",
    [
        {"max_grad_norm": 1.0},
        {"precision": "bf16"},
        {"micro_batch_size": 4},
        {"drop_nonfinite_samples": True},
        {"repeat_step_interval": 5},
        {"spike_action": "skip"},
    ],
)
def test_a_setting_without_effect_is_refused(tmp_path, setting):
    """A setting that only ``guard.step`` applies is H212 before the first step of the loop moves a
    weight, and it is named.
    """
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()

    with pytest.raises(holdfast.BatchError, match=next(iter(setting))) as raised:
        train_by_hand(tmp_path, model, optimizer, optimizer, **setting)

    assert raised.value.rule == "H212"
    assert torch.equal(model.weight, before)


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
