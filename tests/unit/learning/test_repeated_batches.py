"""H845, always the same batch, in a loop of one's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from holdfast.learning.watch import watch

DATA = [
    (x, int(x.sum() > 0))
    for x in torch.randn(200 * 16, 4, generator=torch.Generator().manual_seed(1))
]


def watched(steps: int, *, anew: bool) -> list[str]:
    """Make so many steps with each of 200 batches, which come from a loader that is begun anew
    for each or is not.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer) as watching:
        for batch in DataLoader(DATA, batch_size=16):
            x, y = next(iter(DataLoader(DATA, batch_size=16))) if anew else batch
            for _ in range(steps):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    return [finding.rule for finding in watching.findings() if finding.severity != "note"]


def test_one_batch_for_ever_is_found_and_several_steps_with_each_are_not() -> None:
    """``next(iter(loader))`` in the loop is advice.

    A batch that the loop uses for several steps is no fault.
    """
    assert "H845" in watched(1, anew=True)
    assert "H845" not in watched(1, anew=False)
    assert "H845" not in watched(4, anew=False)
