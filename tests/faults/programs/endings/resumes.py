"""A training run that is killed when it has almost converged, and goes on from its own
checkpoint.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
inputs = torch.randn(512, 8)
targets = inputs @ torch.randn(8, 1) + torch.randn(512, 1)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
checkpoint = Path(sys.argv[1])
first = 0
if checkpoint.exists():
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"]

for step in range(first, 300):
    batch = torch.randint(0, 512, (64,))
    loss = F.mse_loss(model(inputs[batch]), targets[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 199 and first == 0:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 200},
            checkpoint,
        )
        os.kill(os.getpid(), signal.SIGKILL)
