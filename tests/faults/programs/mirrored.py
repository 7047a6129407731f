"""A training that copies its checkpoints to a mirror: mirrored.py RUN_DIR STEPS.

It prints each step with a digest of the weights. The mirror is in HOLDFAST_MIRROR.
"""

from __future__ import annotations

import hashlib
import sys

import torch

import holdfast

SIDE = 1024


def digest(model: torch.nn.Module) -> str:
    sha256 = hashlib.sha256()
    for tensor in model.state_dict().values():
        sha256.update(tensor.numpy().tobytes())
    return sha256.hexdigest()[:16]


def main() -> None:
    run_dir, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(SIDE, SIDE), torch.nn.Dropout(0.1), torch.nn.Linear(SIDE, 1)
    )
    guard = holdfast.Guard(
        run_dir,
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), 1e-3),
        loader=holdfast.DataLoader(torch.randn(64, SIDE).unbind(), batch_size=4, shuffle=True),
        save_interval_steps=2,
        spike_action="off",
    )
    print("begins", guard.global_step, digest(model), flush=True)
    for batch in guard.batches(max_steps=steps):
        guard.step(batch, lambda x: (model(x) - x.sum(1, keepdim=True)).square().mean())
        print("step", guard.global_step, digest(model), flush=True)


main()
