"""With several ranks, the first one copies whole checkpoints to the mirror, and fetches them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.ranks.harness import all_returned, run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast

pytestmark = pytest.mark.slow


def training(
    rank: int, run_dir: Path, mirror: str | None, kind: str, steps: int
) -> tuple[int, list[float]]:
    """Train up to some step; return the step at which this began, and the final weights."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model = fully_shard(model) if kind == "sharded" else DistributedDataParallel(model)
    loader = holdfast.DataLoader(torch.randn(64, 4), batch_size=4, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    guard = holdfast.Guard(
        run_dir,
        model=model,
        optimizer=optimizer,
        loader=loader,
        save_interval_steps=2,
        mirror=mirror,
    )
    began = guard.global_step
    for batch in guard.batches(max_steps=steps):
        guard.step(batch, lambda x: model(x).square().mean())
    weights = [
        getattr(weight, "full_tensor", lambda weight=weight: weight)()
        for weight in model.parameters()
    ]
    return began, torch.cat([weight.detach().flatten() for weight in weights]).tolist()


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_two_ranks_continue_on_another_machine(tmp_path: Path, kind: str) -> None:
    """The second machine has an empty disk, and ends with the weights of an undisturbed run."""
    mirror = str(tmp_path / "mirror")
    undisturbed = all_returned(run_ranks(training, 2, tmp_path / "undisturbed", None, kind, 10))
    all_returned(run_ranks(training, 2, tmp_path / "first", mirror, kind, 5))
    shutil.rmtree(tmp_path / "first")

    ends = all_returned(run_ranks(training, 2, tmp_path / "second", mirror, kind, 10))

    assert [began for began, _ in ends] == [5, 5]
    assert [weights for _, weights in ends] == [weights for _, weights in undisturbed]
