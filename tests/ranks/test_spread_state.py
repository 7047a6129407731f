"""Optimizers that keep the state of each parameter on one rank only.

A checkpoint would hold a share of it.
"""

from __future__ import annotations

from typing import Any

import torch
from tests.ranks.harness import run_ranks
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import holdfast


class Spread(torch.optim.Optimizer):
    """As the distributed Muon: each rank moves some parameters, and sends them to the others."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        ranks = distributed.get_world_size()
        for position, parameter in enumerate(self.param_groups[0]["params"]):
            if position % ranks == distributed.get_rank():
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.sub_(momentum, alpha=0.01)
            distributed.broadcast(parameter, position % ranks)


def zero(parameters: Any) -> torch.optim.Optimizer:
    # Its module warns when it is imported, so only the ranks do.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.01)


def spread(parameters: Any) -> torch.optim.Optimizer:
    return Spread(parameters, lr=0.01)


def training(rank, run, kind):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(6, 4))
    optimizer = kind(model.parameters())
    data = [torch.randn(8, 6) for _ in range(6)]
    try:
        guard = holdfast.Guard(
            run, model=model, optimizer=optimizer, loader=data, save_interval_steps=2
        )
    except holdfast.PolicyError as error:
        return "when the guard is made", error.rule
    try:
        for batch in guard.batches(max_epochs=1):
            guard.step(batch, lambda part: model(part).square().mean())
    except holdfast.PolicyError as error:
        return guard.global_step, error.rule
    return "trained"


def test_zero_redundancy_is_refused_when_the_guard_is_made(tmp_path):
    """ZeroRedundancyOptimizer, whose state_dict needs a collective first: H108 on each rank."""
    ends = run_ranks(training, 2, tmp_path / "run", zero)
    assert [end.returned for end in ends] == [("when the guard is made", "H108")] * 2
    assert not (tmp_path / "run").exists()


def test_an_optimizer_of_unknown_kind_that_spreads_its_state_ends_at_the_first_save_of_it(tmp_path):
    """Nothing tells it before it has stepped.

    Then H108 on all ranks, and no checkpoint holds half of the moments.
    """
    ends = run_ranks(training, 2, tmp_path, spread)
    assert [end.returned for end in ends] == [(2, "H108")] * 2
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["000001-step00000000"]
