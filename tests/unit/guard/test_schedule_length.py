"""A run that is trained for longer follows the schedule in the script, or is refused at once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import events, the_event
from torch import nn
from torch.optim import lr_scheduler

import holdfast
from holdfast.core.errors import CheckpointError, PolicyError

pytestmark = pytest.mark.usefixtures("unchecked_splits")

RATE = 0.1


def cosine_function(steps: int) -> Any:
    return lambda step: 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))


def warm_up_and(decay: Any) -> Any:
    """Return a SequentialLR whose second schedule takes the rest of the steps."""

    def build(optimizer: Any, steps: int) -> Any:
        warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        return lr_scheduler.SequentialLR(optimizer, [warm_up, decay(optimizer, steps - 2)], [2])

    return build


SCHEDULES = {
    "OneCycleLR": lambda optimizer, steps: lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=steps
    ),
    "LinearLR": lambda optimizer, steps: lr_scheduler.LinearLR(
        optimizer, 1.0, 0.01, total_iters=steps
    ),
    "CosineAnnealingLR": lr_scheduler.CosineAnnealingLR,
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "LambdaLR": lambda optimizer, steps: lr_scheduler.LambdaLR(optimizer, cosine_function(steps)),
    "MultiStepLR": lambda optimizer, steps: lr_scheduler.MultiStepLR(
        optimizer, [steps // 2, steps * 3 // 4]
    ),
    "warm-up, cosine": warm_up_and(lr_scheduler.CosineAnnealingLR),
    "warm-up, LambdaLR": warm_up_and(
        lambda optimizer, steps: lr_scheduler.LambdaLR(optimizer, cosine_function(steps))
    ),
    "milestone": lambda optimizer, steps: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.ConstantLR(optimizer, 1.0, 1),
            lr_scheduler.CosineAnnealingLR(optimizer, steps),
        ],
        [steps // 2],
    ),
}


def make(schedule: Any, length: int, momentum: float = 0.9) -> dict[str, Any]:
    """Return the objects of a run with a schedule of a length."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=momentum)
    return {"model": model, "optimizer": optimizer, "scheduler": schedule(optimizer, length)}


def train(
    run_dir: Path, parts: dict[str, Any], steps: int, **settings: Any
) -> tuple[list[tuple[float, float]], holdfast.Guard]:
    """Train up to a number of steps; return the rate and the momentum of each, and the guard."""
    data = torch.randn(8, 4, 2, generator=torch.Generator().manual_seed(1))
    guard = holdfast.Guard(run_dir, loader=list(data), **parts, **settings)
    (group,) = parts["optimizer"].param_groups
    values = []
    for batch in guard.batches(max_steps=steps):
        values.append((float(group["lr"]), group["momentum"]))
        guard.step(batch, lambda x: parts["model"](x).square().mean())
    return values, guard


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("first", [5, 8])
def test_a_longer_schedule_continues_as_if_it_had_always_been_so_long(tmp_path, kind, first):
    """The rates after the resume are those that a run with the new length has at these steps."""
    train(tmp_path / "longer", make(SCHEDULES[kind], 8), first)
    rates, guard = train(tmp_path / "longer", make(SCHEDULES[kind], 16), 16)
    expected, _ = train(tmp_path / "whole", make(SCHEDULES[kind], 16), 16)

    assert len(rates) == 16 - first
    for values, expected_values in zip(rates, expected[first:], strict=True):
        assert values == pytest.approx(expected_values, rel=1e-9, abs=1e-12)
    event = the_event(guard, "schedule_length_changed")
    assert event.global_step == first
    assert event.data["rate_now"] == pytest.approx(expected[first][0], rel=1e-9)
    assert not events(guard, "settings_kept")


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_of_the_same_length_is_not_touched(tmp_path, kind):
    """A resume with the same length has the rates of an undisturbed run, bit for bit."""
    first, _ = train(tmp_path / "resumed", make(SCHEDULES[kind], 16), 5)
    rest, guard = train(tmp_path / "resumed", make(SCHEDULES[kind], 16), 16)
    expected, _ = train(tmp_path / "whole", make(SCHEDULES[kind], 16), 16)

    assert first + rest == expected
    assert not events(guard, "schedule_length_changed")


def test_a_second_resume_of_the_longer_run_is_exact(tmp_path):
    """The change is reported once, and the new length is then that of the run."""
    schedule = SCHEDULES["CosineAnnealingLR"]
    train(tmp_path, make(schedule, 8), 8)
    train(tmp_path, make(schedule, 16), 12)
    _, guard = train(tmp_path, make(schedule, 16), 16)

    # The events of all attempts.
    assert the_event(guard, "schedule_length_changed").global_step == 8
    assert not events(guard, "settings_kept")


def test_a_base_rate_stays_that_of_the_run_when_the_length_changes(tmp_path):
    """Only the length comes from the script: at the middle of the cosine the rate is half."""
    train(tmp_path, make(lr_scheduler.CosineAnnealingLR, 8), 8)

    def with_other_rate(optimizer: Any, steps: int) -> Any:
        optimizer.param_groups[0]["lr"] = 7.0
        return lr_scheduler.CosineAnnealingLR(optimizer, steps)

    rates, guard = train(tmp_path, make(with_other_rate, 16), 9)

    assert rates[0][0] == pytest.approx(RATE / 2)
    assert events(guard, "settings_kept")


def test_a_length_that_the_script_sets_after_the_guard_is_kept(tmp_path):
    """A script that lengthens the loaded schedule itself still resumes with that length."""
    first = make(SCHEDULES["CosineAnnealingLR"], 8)
    guard = holdfast.Guard(tmp_path, loader=[torch.ones(4, 2)] * 8, **first)
    first["scheduler"].T_max = 16
    for batch in guard.batches(max_steps=4):
        guard.step(batch, lambda x: first["model"](x).square().mean())

    again = make(SCHEDULES["CosineAnnealingLR"], 8)
    with holdfast.Guard(tmp_path, loader=[torch.ones(4, 2)] * 8, **again) as guard:
        assert again["scheduler"].T_max == 16
        assert not events(guard, "schedule_length_changed")


def test_a_rate_that_the_script_has_set_itself_is_no_change_of_the_function(tmp_path):
    """A rate set by hand between the steps is restored, since the function is the same."""
    first = make(SCHEDULES["LambdaLR"], 16)
    train(tmp_path, first, 4)
    parts = make(SCHEDULES["LambdaLR"], 16)
    with holdfast.Guard(tmp_path, loader=[torch.ones(4, 2)] * 8, **parts):
        parts["optimizer"].param_groups[0]["lr"] = 0.033

    again = make(SCHEDULES["LambdaLR"], 16)
    with holdfast.Guard(tmp_path, loader=[torch.ones(4, 2)] * 8, **again) as guard:
        assert again["optimizer"].param_groups[0]["lr"] == 0.033
        assert not events(guard, "schedule_length_changed")


def chained(optimizer: Any, steps: int) -> Any:
    return lr_scheduler.ChainedScheduler(
        [
            lr_scheduler.ExponentialLR(optimizer, 0.9),
            lr_scheduler.CosineAnnealingLR(optimizer, steps),
        ]
    )


def with_restarts(optimizer: Any, steps: int) -> Any:
    restarts = lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)
    warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=steps)
    return lr_scheduler.SequentialLR(optimizer, [warm_up, restarts], [steps])


def two(optimizer: Any, steps: int) -> Any:
    return {
        "warm_up": lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
        "decay": lr_scheduler.CosineAnnealingLR(optimizer, steps),
    }


@pytest.mark.parametrize("schedule", [chained, with_restarts, two])
def test_a_change_of_length_without_a_defined_rate_is_refused(tmp_path, schedule):
    """Where the rate depends on its own past, the guard raises H313 before the first step."""
    train(tmp_path, make(schedule, 8), 8)

    with pytest.raises(CheckpointError) as error:
        train(tmp_path, make(schedule, 16), 16)

    assert error.value.rule == "H313"
    _, guard = train(tmp_path, make(schedule, 8), 9)
    assert guard.global_step == 9


def test_a_schedule_that_ends_before_the_resumed_step_is_refused(tmp_path):
    """A OneCycleLR shorter than the steps made is H313, and the run can still continue."""
    schedule = SCHEDULES["OneCycleLR"]
    train(tmp_path, make(schedule, 8), 8)

    with pytest.raises(CheckpointError) as error:
        train(tmp_path, make(schedule, 6), 9)

    assert error.value.rule == "H313"
    assert train(tmp_path, make(schedule, 9), 9)[1].global_step == 9


# --- a schedule that is too short for the run


def test_a_schedule_shorter_than_the_run_is_refused_before_the_first_step(tmp_path):
    """With max_steps, H105 comes before any weight has changed."""
    parts = make(SCHEDULES["OneCycleLR"], 8)

    with pytest.raises(PolicyError) as error:
        train(tmp_path, parts, 9)

    assert error.value.rule == "H105"
    assert parts["scheduler"].last_epoch == 0
    assert torch.equal(parts["model"].weight, make(SCHEDULES["OneCycleLR"], 8)["model"].weight)


def run_epochs(
    run_dir: Path, parts: dict[str, Any], epochs: int, **settings: Any
) -> holdfast.Guard:
    guard = holdfast.Guard(run_dir, loader=[torch.ones(4, 2)] * 4, **parts, **settings)
    for batch in guard.batches(max_epochs=epochs):
        guard.step(batch, lambda x: parts["model"](x).square().mean())
    return guard


def test_a_finished_run_with_more_epochs_and_the_old_schedule_is_refused_at_once(tmp_path):
    """No step is made, and the finished run itself may be started again."""
    schedule = SCHEDULES["OneCycleLR"]
    run_epochs(tmp_path, make(schedule, 8), 2)
    parts = make(schedule, 8)

    with pytest.raises(PolicyError) as error:
        run_epochs(tmp_path, parts, 3)

    assert error.value.rule == "H105"
    assert parts["scheduler"].last_epoch == 8
    assert run_epochs(tmp_path, make(schedule, 8), 2).global_step == 8
    assert run_epochs(tmp_path, make(schedule, 12), 3).global_step == 12


def test_a_schedule_that_ends_within_an_epoch_raises_no_value_error_of_torch(tmp_path):
    """If the number of steps was not known before, H105 names the scheduler in the middle."""
    with pytest.raises(PolicyError) as error:
        run_epochs(tmp_path, make(SCHEDULES["OneCycleLR"], 6), 2)

    assert error.value.rule == "H105"
    resumed = run_epochs(tmp_path, make(SCHEDULES["OneCycleLR"], 8), 2)
    assert resumed.global_step == 8


def test_a_schedule_of_epochs_is_compared_with_the_epochs_of_the_run(tmp_path):
    """With scheduler_interval="epoch", a cycle of 2 epochs is refused for 3 and runs for 2."""
    settings = {"scheduler_interval": "epoch"}

    with pytest.raises(PolicyError):
        run_epochs(tmp_path / "short", make(SCHEDULES["OneCycleLR"], 2), 3, **settings)

    guard = run_epochs(tmp_path / "long", make(SCHEDULES["OneCycleLR"], 2), 2, **settings)
    assert guard.global_step == 8


def test_a_schedule_that_the_script_advances_is_left_to_it(tmp_path):
    """A loop that calls optimizer.step() itself may have more steps than its schedule of epochs."""
    parts = make(SCHEDULES["OneCycleLR"], 2)
    guard = holdfast.Guard(tmp_path, loader=[torch.ones(4, 2)] * 4, **parts)
    for number, batch in enumerate(guard.batches(max_steps=8)):
        parts["optimizer"].zero_grad()
        parts["model"](batch).square().mean().backward()
        parts["optimizer"].step()
        if number % 4 == 3:
            parts["scheduler"].step()

    assert guard.global_step == 8
    assert parts["scheduler"].last_epoch == 2
