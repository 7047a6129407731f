"""The training script that `benchmarks.preemptions` submits to Slurm.

    python -m benchmarks.preemptions_train FOLDER SECONDS_PER_STEP

A small network with dropout, BatchNorm and AdamW, on a shuffled loader with augmentation. With
several tasks (`srun -n 2`), they train together by DDP on gloo. Each start appends lines to
``FOLDER/trace.jsonl``: the step it resumes from, each step that it has completed, why it stopped
and, at the end, the digest of everything that was trained.

In its third start it no longer waits in its steps, so that it ends before Slurm's next signal.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from benchmarks.small_training import digest_tensors

STEPS = 2500
# Far more than a run may lose: a save that is missing at a stop is seen as hundreds of steps.
SAVE_INTERVAL_STEPS = 500
# Starts that wait in each step.
SLOW_STARTS = 2


class Noisy(torch.utils.data.Dataset[torch.Tensor]):
    """256 samples of 16 numbers, to which each access adds random noise."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.linspace(-1, 1, 16) * (index % 7) + 0.1 * torch.randn(16)


class Trace:
    """The lines of all starts of one rank.

    Args:
        file: Where they are. Each line is written by one system call, so a kill loses none.
    """

    def __init__(self, file: Path) -> None:
        self.starts = 0
        if file.exists():
            self.starts = file.read_text().count('"start"')
        self._descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, **facts: Any) -> None:
        """Append a line."""
        os.write(self._descriptor, json.dumps(facts).encode() + b"\n")


def main(folder: Path, seconds_per_step: float) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, ranks = join_ranks()
    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 1)
    )
    trained: nn.Module = model
    if ranks > 1:
        trained = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trace = Trace(folder / f"trace{rank}.jsonl")
    if trace.starts >= SLOW_STARTS:
        seconds_per_step = 0.0

    guard = holdfast.Guard(
        folder / "run",
        model=trained,
        optimizer=optimizer,
        loader=holdfast.DataLoader(Noisy(), batch_size=8, shuffle=True, seed=1),
        save_interval_steps=SAVE_INTERVAL_STEPS,
    )
    trace.write(start=guard.global_step)
    for batch in guard.batches(max_steps=STEPS):
        guard.step(batch, lambda x: trained(x).square().mean())
        trace.write(step=guard.global_step)
        time.sleep(seconds_per_step)
    tensors = list(model.state_dict().values())
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    trace.write(end=guard.global_step, digest=digest_tensors(tensors))


def join_ranks() -> tuple[int, int]:
    """Join the other tasks of the job step, and return this task's rank and their number."""
    rank = int(os.environ.get("SLURM_PROCID", "0"))
    ranks = int(os.environ.get("SLURM_NTASKS", "1"))
    if ranks > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1")
        # Jobs on the same node need different ports.
        os.environ["MASTER_PORT"] = str(20000 + int(os.environ["SLURM_JOB_ID"]))
        torch.distributed.init_process_group("gloo")
    return rank, ranks


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
