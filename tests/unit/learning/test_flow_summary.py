"""The summary of a model's gradients: what a guarded run records of it."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

import holdfast


def test_a_run_records_how_its_gradients_flow(tmp_path: Any) -> None:
    """Norms, the profile of the matrices, the smallest and largest relative step, and dead units are right."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    first: Any = model[0]
    with torch.no_grad():
        first.bias[:4] = -100.0  # half of the units never fire
    optimizer = torch.optim.SGD(
        [{"params": first.parameters(), "lr": 1e-4}, {"params": model[2].parameters(), "lr": 0.1}]
    )
    batches = [torch.randn(16, 4) for _ in range(64)]
    guard = holdfast.Guard(tmp_path, model=model, optimizer=optimizer, loader=batches)
    norms = [
        guard.step(batch, lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean()).grad_norm
        for batch in guard.batches(max_epochs=1)
    ]
    (event,) = [event for event in guard.events() if event.kind == "gradient_flow"]
    said = dict(event.data)
    assert json.loads(json.dumps(said)) == said
    assert list(said["profile"]) == ["0.weight", "2.weight"]
    assert said["dead_units"] == {"1": 0.5}
    smallest, largest = said["update_to_weight"]
    assert smallest.startswith("0.")
    assert largest.startswith("2.")
    whole = sorted(sum(norm**2 for norm in each.values()) ** 0.5 for each in norms)
    assert whole[0] <= said["gradient_norm"]["optimizer"] <= whole[-1]
