"""A loss function that does the guard's work is an error before anything has moved."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import holdfast


def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def loss_of(given: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = given["model"](x).square().mean()
    return loss


def backward(given: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    loss = loss_of(given, x)
    loss.backward()
    return loss


def backward_of_a_copy(given: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    (0.5 * loss_of(given, x)).backward()
    return loss_of(given, x)


def whole_loop(given: dict[str, Any], x: torch.Tensor) -> float:
    given["optimizer"].zero_grad()
    loss = loss_of(given, x)
    loss.backward()
    given["optimizer"].step()
    return loss.item()


def step(given: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
    given["optimizer"].step()
    return loss_of(given, x)


CASES = {"backward": backward, "backward ran": backward_of_a_copy, "step of a whole loop": whole_loop, "step": step}


@pytest.mark.parametrize("micro_batch_size", [None, "auto", 2])
@pytest.mark.parametrize("case", CASES)
def test_a_loop_that_was_moved_into_the_loss_function_is_named(tmp_path, case, micro_batch_size):
    """Backward and step inside the loss function are H209, and no weight or moment has moved."""
    given = parts()
    guard = holdfast.Guard(tmp_path, save_interval_steps=None, micro_batch_size=micro_batch_size, **given)
    before = {name: value.clone() for name, value in given["model"].state_dict().items()}
    with pytest.raises(holdfast.BatchError, match=case.split()[0]) as caught:
        guard.step(torch.randn(8, 3), lambda x: CASES[case](given, x))
    assert caught.value.rule == "H209"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in given["model"].state_dict().items())
    assert all(not state.get("step", 0) for state in given["optimizer"].state.values())
    assert all(p.grad is None for p in given["model"].parameters())
    assert not guard.step(torch.randn(8, 3), lambda x: loss_of(given, x)).skipped
    guard.close()
    given["optimizer"].step()
    given["optimizer"].zero_grad()


def test_gradients_with_respect_to_inputs_are_free(tmp_path):
    """An adversarial step or a penalty inside the loss function, which reaches no parameter, is no error."""
    given = parts()
    guard = holdfast.Guard(tmp_path, save_interval_steps=None, **given)

    def loss(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        loss_of(given, x).backward(inputs=[x])
        (slope,) = torch.autograd.grad(loss_of(given, x), x, create_graph=True)
        return loss_of(given, x + 0.1 * x.grad.sign()) + slope.square().sum()

    for _ in range(3):
        assert not guard.step(torch.randn(8, 3), loss).skipped
    guard.close()


def test_gradients_that_were_filled_before_the_first_step_are_not_lost_in_silence(tmp_path):
    """A backward outside before the first step is H210; what an earlier run has left is no error."""
    given = parts()
    guard = holdfast.Guard(tmp_path / "a", save_interval_steps=None, **given)
    loss_of(given, torch.randn(8, 3)).backward()
    with pytest.raises(holdfast.BatchError, match="loss_a \\+ loss_b") as caught:
        guard.step(torch.randn(8, 3), lambda x: loss_of(given, x))
    assert caught.value.rule == "H210"
    guard.step(torch.randn(8, 3), lambda x: loss_of(given, x))
    guard.close()
    again = holdfast.Guard(tmp_path / "b", save_interval_steps=None, **given)
    again.step(torch.randn(8, 3), lambda x: loss_of(given, x))
    again.close()


def test_hooks_that_step_in_backward_are_named_and_others_are_free(tmp_path):
    """An optimizer that a hook steps cannot be taken back: H211 in the first step. A hook that only looks is free."""
    given = parts()
    seen: list[float] = []
    for parameter in given["model"].parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.norm())))
    guard = holdfast.Guard(tmp_path / "a", save_interval_steps=None, **given)
    assert not guard.step(torch.randn(8, 3), lambda x: loss_of(given, x)).skipped
    guard.close()
    assert seen
    weight = next(given["model"].parameters())
    of_hook = torch.optim.SGD([weight], lr=0.1)
    weight.register_post_accumulate_grad_hook(lambda _: of_hook.step())
    guard = holdfast.Guard(tmp_path / "b", save_interval_steps=None, **given)
    with pytest.raises(holdfast.BatchError, match="moved 1 parameter") as caught:
        guard.step(torch.randn(8, 3), lambda x: loss_of(given, x))
    assert caught.value.rule == "H211"
    guard.close()
