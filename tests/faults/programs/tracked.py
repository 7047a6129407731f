"""A guarded training run that logs each step to W&B.

    python tracked.py '{"run_dir": ..., "hurt_at": 6, "signal": "SIGKILL"}'

Other keys:

- `steps`: how many steps are trained.
- `nan_at`: the step after which the loss is NaN until the guard rolls back.
- `marks`: a file to which each call of `Run.mark_preempting` is written, because W&B leaves no trace
  of it in offline mode. The call never returns.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import wandb

import holdfast

request: dict[str, Any] = json.loads(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(0)


def observe_preempting() -> None:
    original = wandb.Run.mark_preempting

    def mark_preempting(run: Any) -> None:
        original(run)
        Path(request["marks"]).write_text(run.id)
        threading.Event().wait()

    wandb.Run.mark_preempting = mark_preempting


def wait_for_wandb() -> None:
    """Wait until the row of the last evaluation is in W&B's file, which another process writes."""
    file = Path(run.dir).parent / f"run-{run.id}.wandb"
    while b"evaluated_at" not in file.read_bytes():
        time.sleep(0.01)


if "marks" in request:
    observe_preempting()
run = wandb.init(project="tests")
print("run", run.id, flush=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
guard = holdfast.Guard(
    request["run_dir"],
    model=model,
    optimizer=optimizer,
    loader=[torch.randn(2, 4) for _ in range(20)],
    save_interval_steps=4,
    snapshot_interval_steps=None,
    async_save=False,
    nonfinite_patience=1,
    stop_exit_code=85,
)
mark = Path(request["run_dir"], "was-hurt")
is_first = not mark.exists()
rollbacks = guard.statistics().rollbacks


def loss_of(batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    is_nan = guard.global_step == request.get("nan_at")
    if is_nan and guard.statistics().rollbacks == rollbacks:
        return loss * float("nan")
    return loss


for batch in guard.batches(max_steps=request.get("steps", 8)):
    before = guard.global_step
    guard.step(batch, loss_of)
    step = guard.global_step
    if step <= before:
        print("rolled_back", step, flush=True)
        continue
    run.log({"at": step})
    if step % 4 == 0:
        run.log({"evaluated_at": step})
    if is_first and step == request.get("hurt_at"):
        mark.touch()
        os.kill(os.getpid(), getattr(signal, request.get("signal", "SIGKILL")))
    if is_first and step == 5:
        wait_for_wandb()
run.finish()
