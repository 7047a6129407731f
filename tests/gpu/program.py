"""Programs that `test_programs` starts.

Each is a process of its own, with a CUDA context of its own.

python -m tests.gpu.program NAME FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import holdfast

DEVICE = os.environ.get("TEST_DEVICE", "cuda")
STEPS, FAILS_AT = 8, 5


def pieces(_: Path) -> None:
    """Make a step where memory is free only in pieces."""
    from tests.gpu.test_recovery import in_pieces

    in_pieces()


def dead_device(folder: Path) -> None:
    """Train with an index out of range in one batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 1)).to(DEVICE)
    data = [
        torch.randint(16, (32,), generator=torch.Generator().manual_seed(n)) for n in range(STEPS)
    ]
    if not (folder / "sound").exists():
        data[FAILS_AT][3] = 1000
    guard = holdfast.Guard(
        folder / "guarded",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        loader=data,
        save_interval_steps=2,
        async_save=False,
    )
    for batch in guard.batches(max_epochs=1):
        guard.step(batch.to(DEVICE), lambda x: model(x).square().mean())
    (folder / "ended").write_text(
        f"{guard.resumed_from and guard.resumed_from.name} {guard.global_step}"
    )


def ranks(folder: Path) -> None:
    """Train twice as ranks on one device, the second time with memory refused once on the second
    rank.
    """
    backend = os.environ["TEST_BACKEND"]
    distributed.init_process_group(backend)
    rank, ends = distributed.get_rank(), []
    for name in ("undisturbed", "disturbed"):
        torch.manual_seed(0)
        model = DistributedDataParallel(
            nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(DEVICE)
        )
        data = [
            torch.randn(16, 64, generator=torch.Generator().manual_seed(2 * n + rank))
            for n in range(STEPS)
        ]
        guard = holdfast.Guard(
            folder / backend / name,
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
            loader=data,
            save_interval_steps=4,
            max_grad_norm=1.0,
        )
        attempts, refused = [], []
        for step, batch in enumerate(guard.batches(max_epochs=1)):

            def loss_fn(
                x: torch.Tensor, fails: bool = (name, step, rank) == ("disturbed", 3, 1)
            ) -> Any:
                loss = model(x).square().mean()  # noqa: B023 - called in this round only
                if fails and not refused:  # noqa: B023
                    refused.append(0)  # noqa: B023
                    torch.empty(2**50, dtype=torch.uint8, device=DEVICE)
                return loss

            attempts.append(guard.step(batch.to(DEVICE), loss_fn).attempts)
        guard.close()
        ends.append([p.detach().cpu() for p in model.parameters()])
        assert len(refused) == (name == "disturbed" and rank == 1)
        assert attempts == [
            2 if name == "disturbed" and step == 3 else 1 for step in range(STEPS)
        ], attempts
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    mine = torch.cat([p.flatten() for p in ends[1]]).to(DEVICE)
    theirs = mine.clone()
    distributed.broadcast(theirs, 0)
    assert torch.equal(mine, theirs)
    distributed.destroy_process_group()
    (folder / backend / f"rank {rank} ended equal").touch()


def plain(folder: Path) -> None:
    """Train in a plain loop that reads no loss, and write down the losses and how often the host
    waited.
    """
    from tests.gpu.marks import waits

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    x, losses = torch.randn(256, 512, device=DEVICE), []

    def train() -> None:
        for _ in range(50):
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())

    train()  # the first steps load kernels
    counted = waits(train) if DEVICE == "cuda" else train() or 0
    found = {"waits": counted, "losses": [float(each).hex() for each in losses]}
    (folder / f"{os.environ['TEST_NAME']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    {"pieces": pieces, "dead_device": dead_device, "ranks": ranks, "plain": plain}[sys.argv[1]](
        Path(sys.argv[2])
    )
