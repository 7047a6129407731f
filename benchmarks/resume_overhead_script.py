"""A training script that does not import holdfast, and prints the CPU time of its steps.

Started by ``resume_overhead``.

    python resume_overhead_script.py MILLISECONDS STEPS

The batch is sized so that a step takes about this time. Prints the CPU milliseconds of each of the
last three quarters of the steps, and the batch size.
"""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

milliseconds, steps = float(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU(),
    torch.nn.Linear(256, 10),
)  # fmt: skip
# One sample takes about 8 microseconds forward and backward; AdamW adds about 1.5 ms to a step.
batch_size = max(int((milliseconds - 1.5) / 0.008), 4)
inputs = torch.randn(batch_size * 8, 256)
labels = torch.randint(0, 10, (len(inputs),))
loader = DataLoader(TensorDataset(inputs, labels), batch_size=batch_size, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters())


def train() -> list[float]:
    """Train for the given number of steps, and return the CPU time of each in milliseconds."""
    times = []
    previous = time.process_time()
    while len(times) < steps:
        for batch, target in loader:
            loss = torch.nn.functional.cross_entropy(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            now = time.process_time()
            times.append(1000 * (now - previous))
            previous = now
    return times


taken = train()
warm = sorted(taken[len(taken) // 4 :])
print("STEP", warm[len(warm) // 2], sum(warm) / len(warm), batch_size)
