"""A guarded training script on several ranks, which is told to stop.

    torchrun --nproc-per-node 2 stopped_ranks.py '{"run_dir": ..., "policy": {}}'

Each rank prints its pid, its steps and how its loop ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import holdfast

request: dict[str, Any] = json.loads(sys.argv[1])


def say(text: str) -> None:
    """Print a line at once and whole, whatever the other rank prints at that moment."""
    os.write(1, f"{text}\n".encode())


torch.set_num_threads(1)
distributed.init_process_group("gloo")
torch.manual_seed(0)
layer = nn.Linear(4, 1)
layer.register_buffer("memory", torch.zeros(request.get("buffer", 1)))  # takes its time to be saved
model = DistributedDataParallel(layer, broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = holdfast.DataLoader(
    TensorDataset(torch.randn(4000, 4)), batch_size=4, shuffle=True, seed=1
)
guard = holdfast.Guard(
    request["run_dir"],
    model=model,
    optimizer=optimizer,
    loader=loader,
    save_interval_steps=1000,
    **request.get("policy", {}),
)
rank = distributed.get_rank()
say(f"rank {rank} pid {os.getpid()} starts at {guard.global_step}")
for batch in guard.batches(max_steps=guard.global_step + request.get("steps", 400)):
    guard.step(batch, lambda batch: model(batch[0]).square().mean())
    say(f"rank {rank} step {guard.global_step}")
    time.sleep(0.02)
say(f"rank {rank} ended at {guard.global_step}: {guard.stop_reason}")
distributed.destroy_process_group()
