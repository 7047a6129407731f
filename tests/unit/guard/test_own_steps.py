"""A loop over ``guard.batches`` that keeps an ``optimizer.step()`` of its own is refused before
a weight moves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import events, guarded, square_of
from torch import nn

import holdfast

DATA = [torch.randn(8, 2) for _ in range(3)]


class Lookahead(torch.optim.Optimizer):
    """A wrapper that steps the optimizer inside it, and holds its parameter groups."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def step_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    square_of(model)(batch).backward()
    optimizer.step()


def train_by_hand(
    run_dir: Any, model: nn.Module, optimizer: Any, stepped: torch.optim.Optimizer, **kept: Any
) -> None:
    guard = guarded(run_dir, model, optimizer, loader=DATA, **kept)
    for batch in guard.batches(max_epochs=2):
        step_by_hand(model, stepped, batch)


def test_a_step_of_the_loop_is_refused_before_it_moves_a_weight(tmp_path):
    """The first ``optimizer.step()`` of a loop over ``guard.batches`` is H212, recorded, and
    moves nothing.
    """
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(holdfast.BatchError) as raised:
        train_by_hand(tmp_path, model, optimizer, optimizer)

    assert raised.value.rule == "H212"
    assert torch.equal(model.weight, before)
    (left,) = events(guarded(tmp_path, model, optimizer), "left_by_exception")
    assert left.data["rule"] == "H212"


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
