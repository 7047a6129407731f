"""A run that does not learn is explained by trials on a copy, driven through the guard as a user does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import holdfast


class _Reversed(torch.autograd.Function):
    """A backward pass written with the wrong sign."""

    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return value.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return -gradient


class Net(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 4)
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x * 0.0 if self.fault == "input lost" else x)
        scores: torch.Tensor = self.head(hidden)
        return _Reversed.apply(scores) if self.fault == "wrong sign" else scores


def _train(directory: Any, fault: str, lr: float) -> tuple[list[Any], list[torch.Tensor], holdfast.Guard]:
    torch.manual_seed(0)
    model = Net(fault)
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(512, 8, generator=drawn)
    y = (x @ torch.randn(8, 4, generator=drawn)).argmax(1)
    loader = holdfast.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    guard = holdfast.Guard(
        directory, model=model, optimizer=optimizer, loader=loader, max_grad_norm=5.0, spike_action="off"
    )
    for batch in guard.batches(max_steps=410):
        guard.step(batch, lambda pair: F.cross_entropy(model(pair[0]), pair[1]))
    return guard.events(), [p.detach().clone() for p in model.parameters()], guard


@pytest.mark.parametrize(("fault", "lr", "cause"), [("input lost", 0.1, "H830"), ("wrong sign", 1e-3, "H831")])
def test_what_only_a_trial_can_tell_is_reported(tmp_path, fault, lr, cause):
    """An input that does not reach the loss, and a backward pass with the wrong sign."""
    events, _, _ = _train(tmp_path, fault, lr)
    (search,) = [event for event in events if event.kind == "searched_cause"]
    told = {event.data["rule"] for event in events if event.kind == "finding"}
    assert cause in search.data["found"]
    assert cause in told
