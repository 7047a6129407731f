"""A loss that differentiates by itself, such as R1 or WGAN-GP, is tried out, counted and split like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import holdfast


def penalised(model: nn.Module, *, declared: bool) -> Any:
    def loss_fn(batch: torch.Tensor) -> Any:
        x = batch.detach().requires_grad_()
        scores = model(x)
        (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        penalty = slope.square().sum(dim=1).mean()
        if declared:
            return [holdfast.Loss(scores.mean(), len(x)), holdfast.Loss(penalty, len(x))]
        return scores.mean() + penalty

    return loss_fn


@pytest.mark.parametrize("declared", [False, True])
def test_a_penalty_on_a_gradient_is_split_exactly(tmp_path, declared):
    """The split is found to be possible, of one term and of several, and the update is that of the whole batch."""
    found = []
    for micro_batch_size in ("auto", 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        run_dir = tmp_path / str(micro_batch_size)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with holdfast.Guard(
            run_dir, model=model, optimizer=optimizer, micro_batch_size=micro_batch_size, save_interval_steps=None
        ) as guard:
            result = guard.step(torch.randn(8, 4).double(), penalised(model, declared=declared))
            (said,) = [event.data for event in guard.events() if event.kind == "promises"]
        assert said["split"] == "possible"
        assert result.micro_batch_size == (8 if micro_batch_size == "auto" else 3)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*found, rtol=1e-12, atol=0)
