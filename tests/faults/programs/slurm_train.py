"""The `train.py` that the job scripts of `docs/how-to/slurm.md` start, with a trace of its steps.

    python train.py [NAME]

After each step it appends a line to ``NAME.jsonl``, and at the end the sum of the weights. The
number of steps, and the seconds that each of them takes, are environment variables.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

import holdfast

name = "0"
if len(sys.argv) > 1:
    name = sys.argv[1]
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loader = holdfast.DataLoader(torch.eye(8).unbind(), batch_size=2, shuffle=True)
trace = os.open(f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def write(**facts: object) -> None:
    os.write(trace, json.dumps(facts).encode() + b"\n")


guard = holdfast.Guard(
    f"guarded/{name}", model=model, optimizer=optimizer, loader=loader, save_interval_steps=10**6
)
write(start=guard.global_step)
for batch in guard.batches(max_steps=int(os.environ["STEPS"])):
    guard.step(batch, lambda x: model(x).square().mean())
    write(step=guard.global_step)
    time.sleep(float(os.environ["STEP_SECONDS"]))
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
write(end=guard.global_step, weights=weights.tolist())
