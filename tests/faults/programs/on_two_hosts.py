"""A training on several hosts, one rank each.

What it is called with says which attempt of which host fails.
"""

import os
import time

import torch
from torch import distributed, nn

from holdfast import DataLoader, Guard

distributed.init_process_group("gloo")
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(
    nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
)
guard = Guard(
    "trained",
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
    loader=DataLoader(torch.randn(96, 16), batch_size=8, shuffle=True),
    save_interval_steps=2,
)
for batch in guard.batches(max_epochs=6):
    guard.step(batch, lambda values: (model(values).squeeze(1) - values.sum(1)).square().mean())
    if (
        distributed.get_rank() == 1
        and guard.global_step == 24
        and os.environ["ATTEMPT_BY_HOLDFAST"] == "0"
    ):
        os.kill(os.getpid(), 9)
    time.sleep(0.01)
print(
    f"ended after {guard.global_step} steps with"
    f" {sum(p.double().sum().item() for p in model.parameters())!r}"
)
distributed.destroy_process_group()
