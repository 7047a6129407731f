"""Which loss functions count as the same one, on their own and through the guard."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast.guard.splitting.loss_functions import Identities, description_of
from holdfast.guard.splitting.two_pass import TwoPass


def loss(batch: Any, model: nn.Module, reduction: str) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction=reduction)


class Criterion(nn.Module):
    def __init__(self, model: nn.Module, reduction: str) -> None:
        super().__init__()
        self.model, self.reduction = [model], reduction

    def forward(self, batch: Any) -> torch.Tensor:
        return loss(batch, self.model[0], self.reduction)


def made(model: nn.Module, reduction: str) -> Callable[[Any], torch.Tensor]:
    return lambda batch: loss(batch, model, reduction)


PAIRS: list[Callable[[nn.Module, str], Any]] = [
    lambda model, reduction: functools.partial(loss, model=model, reduction=reduction),
    Criterion,
    made,
    lambda model, reduction: Criterion(model, reduction).forward,
]


@pytest.mark.parametrize("kind", PAIRS)
def test_two_losses_of_one_code_are_weighted_each_by_its_own(tmp_path, kind):
    """A mean and a sum made by the same code: split into parts, both steps have the gradient of the whole batch."""
    torch.manual_seed(0)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    losses = [kind(model, reduction) for reduction in ("mean", "sum")]
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, micro_batch_size=4)
    for number in range(8):
        batch = torch.randn(16, 10), torch.randn(16, 1)
        fn = losses[number // 2 % 2]
        (expected,) = torch.autograd.grad(fn(batch), [model.weight])
        before = model.weight.detach().clone()
        guard.step(batch, fn)
        torch.testing.assert_close((before - model.weight.detach()) / 1e-4, expected, rtol=1e-2, atol=1e-3)


def test_a_lambda_in_a_loop_is_one_function_and_changing_numbers_do_not_make_new_ones():
    """Neither a new object, nor a step, a weight or a tensor that it holds."""
    identities = Identities()
    keys = {identities.key(lambda batch, n=number: batch * n) for number in range(50)}
    tensors = [torch.tensor(float(number)) for number in range(50)]
    more = {identities.key(functools.partial(torch.add, other=tensor)) for tensor in tensors}
    assert (len(keys), len(more)) == (1, 1)


def test_lambdas_in_one_line_are_two():
    """What they compute tells them apart."""
    first, second = (lambda batch: batch.sum()), (lambda batch: batch.mean())
    assert description_of(first) != description_of(second)
    assert description_of(TwoPass(first, second)) != description_of(TwoPass(second, first))


def test_fresh_objects_in_each_step_are_one_function_after_a_while():
    """Methods of objects that are made anew would be tried out for ever."""
    identities = Identities()
    kept = [Criterion(nn.Linear(2, 2), "mean") for _ in range(600)]
    assert len({identities.key(each.forward) for each in kept}) <= 17


def test_a_description_is_the_same_in_the_next_life():
    """It names no address."""
    model = nn.Linear(2, 2)
    for kind in PAIRS:
        assert description_of(kind(model, "mean")) == description_of(kind(nn.Linear(2, 2), "mean"))
        assert "0x" not in description_of(kind(model, "mean"))
