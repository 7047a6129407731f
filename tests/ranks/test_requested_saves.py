"""`guard.save()` on several ranks: one checkpoint of all ranks, or an error that names the rank."""

from __future__ import annotations

import torch
from tests.ranks.harness import all_returned, run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.checkpoint.store import Store

SAVED_STEP = 2


def saving(rank, run, callers):
    """Let some ranks ask for a save after a step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    guard = holdfast.Guard(
        run,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loader=[torch.randn(4, 3) for _ in range(6)],
        save_interval_steps=1000,
    )
    for batch in guard.batches(max_epochs=1):
        guard.step(batch, lambda inputs: model(inputs).square().mean())
        if guard.global_step == SAVED_STEP and rank in callers:
            guard.save()


def saved_steps(run):
    return sorted(entry.global_step for entry in Store(run / "checkpoints").entries())


def test_all_ranks_save_the_same_step(tmp_path):
    """The checkpoint is that of the batch in which all of them have called `guard.save`."""
    all_returned(run_ranks(saving, 2, tmp_path, (0, 1)))

    assert saved_steps(tmp_path) == [0, SAVED_STEP, 6]


def test_a_save_on_one_rank_alone_is_an_error(tmp_path):
    """No rank waits forever, and no checkpoint holds the state of one rank only."""
    ends = run_ranks(saving, 2, tmp_path, (1,))

    assert all("H116" in (end.raised or "") for end in ends), ends
    assert saved_steps(tmp_path) == [0]
