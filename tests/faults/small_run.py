"""A small guarded training that saves after every second step, for faults of files and
directories.
"""

from __future__ import annotations

from pathlib import Path

import torch

import holdfast


def guard_in(run_dir: Path, **fields: object) -> tuple[holdfast.Guard, torch.nn.Module]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)
    )
    guard = holdfast.Guard(
        run_dir,
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), 0.1),
        loader=holdfast.DataLoader(torch.randn(40, 3).unbind(), batch_size=4, shuffle=True),
        **{"save_interval_steps": 2, "async_save": False, **fields},
    )
    return guard, model


def train(run_dir: Path, steps: int, **fields: object) -> tuple[holdfast.Guard, torch.nn.Module]:
    guard, model = guard_in(run_dir, **fields)
    for batch in guard.batches(max_steps=steps):
        guard.step(batch, lambda x: model(x).square().mean())
    return guard, model


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)
