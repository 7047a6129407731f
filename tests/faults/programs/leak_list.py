"""Train and keep the outputs of every step with their graphs.

Print each loss, and the random states at the end.

Usage: leak_list.py STEPS [MIB]: with a number of MiB, no more memory than that is to be had after a
few steps.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import time
from pathlib import Path

import torch
from torch import nn

STEPS = int(sys.argv[1])
ROOM = int(sys.argv[2]) * 2**20 if len(sys.argv) > 2 else 0
# A file that the fifth step waits for, if any.
GO_ON = Path(os.environ["GO_ON"]) if "GO_ON" in os.environ else None


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    torch.manual_seed(0)
    random.seed(0)
    width = 1024 if ROOM else 32
    model = nn.Sequential(nn.Linear(width, width), nn.Dropout(), nn.Linear(width, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    history = []
    for step in range(STEPS):
        outputs = model(torch.randn(128, width))
        loss = (outputs**2).mean() + random.random()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(outputs)
        print(loss.item().hex(), flush=True)
        while step == 3 and GO_ON and not GO_ON.exists():
            time.sleep(0.005)
        if ROOM and step == 8:
            limit_memory()
        time.sleep(0.005)
    print(random.random(), torch.randn(1).item())


main()
