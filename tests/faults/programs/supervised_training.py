"""A training script that knows nothing of holdfast, to be supervised and hurt.

    python supervised_training.py '{"steps": 40, "workers": 2, ...}'

Keys: ``steps``, ``workers``, ``step_seconds``; ``fail_at``: a mistake of the user's at that step;
``leave_at``, ``interrupt_at``: it ends itself by ``sys.exit`` or as by Ctrl-C; ``kill_at`` and
``hang_at``: SIGKILL to itself, or sleep, at that step, while the attempt is below ``kills``;
``stop_worker``: stop the first worker; ``pids``: file to write the process numbers to;
``steps_file``: file that gets a byte at each step.
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
from torch import nn

request: dict[str, Any] = json.loads(sys.argv[1])


class Samples(torch.utils.data.Dataset):
    """Small samples without end."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index % 7))


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = torch.utils.data.DataLoader(
        Samples(), batch_size=8, num_workers=request.get("workers", 0)
    )
    attempt = sum(
        int(os.environ.get(each, 0))
        for each in ("TORCHELASTIC_RESTART_COUNT", "ATTEMPT_BY_HOLDFAST")
    )
    batches = iter(loader)
    steps = (
        os.open(request["steps_file"], os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        if "steps_file" in request
        else None
    )
    for step, batch in enumerate(batches):
        if step == 1:
            if request.get("stop_worker"):
                os.kill(batches._workers[0].pid, signal.SIGSTOP)
            workers = [worker.pid for worker in getattr(batches, "_workers", [])]
            if "pids" in request:
                temporary = Path(request["pids"] + ".tmp")
                temporary.write_text(json.dumps({"trainer": os.getpid(), "workers": workers}))
                temporary.rename(request["pids"])
        if step == request.get("steps", 40):
            break
        if step == request.get("fail_at"):
            model.no_such_attribute  # noqa: B018 - the mistake
        if step == request.get("leave_at"):
            sys.exit(3)
        if step == request.get("interrupt_at"):
            raise KeyboardInterrupt
        if step == request.get("kill_at") and attempt < request.get("kills", 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if step == request.get("hang_at") and attempt < request.get("kills", 1):
            time.sleep(600)
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
        if steps is not None:
            os.write(steps, b".")
        time.sleep(request.get("step_seconds", 0))


if __name__ == "__main__":
    main()
