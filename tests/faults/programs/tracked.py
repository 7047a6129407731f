"""A guarded training that logs each step to a tracker, and is killed once.

python tracked.py '{"run_dir": ..., "tracker": "wandb", "kill_at": 6, "terminate_at": null}'
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import holdfast

request: dict[str, Any] = json.loads(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
guard = holdfast.Guard(
    request["run_dir"],
    model=model,
    optimizer=optimizer,
    loader=[torch.randn(2, 4) for _ in range(10)],
    save_interval_steps=4,
    async_save=False,
    stop_exit_code=85,
)


def start_wandb() -> Any:
    import wandb

    if "preempting" in request:
        # The call reaches W&B's own process, which leaves no trace of it in offline mode.
        original = wandb.sdk.wandb_run.Run.mark_preempting

        def mark_preempting(run: Any) -> None:
            original(run)
            Path(request["preempting"]).write_text(run.id)

        wandb.sdk.wandb_run.Run.mark_preempting = mark_preempting
    run = wandb.init(project="tests", **request.get("init", {}))
    print("run", run.id, flush=True)
    if "second" in request:
        # A second run in the same process, as in a cross-validation.
        run.finish()
        run = wandb.init(project="tests")
        print("second", run.id, flush=True)
    return run


tracker = start_wandb()
mark = Path(request["run_dir"], "was-hurt")
is_first = not mark.exists()
for batch in guard.batches(max_steps=request.get("steps", 8)):
    guard.step(batch, lambda x: model(x).square().mean())
    values = {"at": guard.global_step}
    if request.get("gives_step"):
        tracker.log(values, step=guard.global_step)
    else:
        tracker.log(values)
    if is_first and guard.global_step == request.get("hurt_at"):
        mark.touch()
        # W&B receives what was logged in a process of its own.
        time.sleep(2.0)
        os.kill(os.getpid(), getattr(signal, request.get("signal", "SIGKILL")))
tracker.finish()
