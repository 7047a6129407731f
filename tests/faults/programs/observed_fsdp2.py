"""Two ranks under FSDP2 that save the optimizer's state before and between steps.

Prints each loss and norm.
"""

from __future__ import annotations

import atexit
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
# It has no state, so that torch makes it anew each time.
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(3):
    get_optimizer_state_dict(model, optimizer)
    inputs = torch.randn(4, 8)
    loss = nn.functional.mse_loss(model(inputs), inputs[:, :4])
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(loss.item().hex(), norm.full_tensor().item().hex(), flush=True)  # type: ignore[attr-defined]
    else:
        norm.full_tensor()  # type: ignore[attr-defined]
dist.destroy_process_group()
# The threads of gloo live on, and one that drops its last work while the interpreter is taken down
# aborts the process. So it ends before that, after what is registered for its end.
atexit._run_exitfuncs()
os._exit(0)
