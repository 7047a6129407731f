"""A training script as a user writes it, in a process of its own, so that it can be hurt from
outside.

    python train.py '{"run_dir": ..., "trace": ..., "workers": 0, "epochs": 4, ...}'

After each step it appends a line to the trace, and at the end the digest of everything that was
trained.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import holdfast
from holdfast.guard import stop

torch.set_num_threads(1)
request: dict[str, Any] = json.loads(sys.argv[1])
# Whoever starts the tests in the background or under `nohup` has these ignored, and so would this
# program.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
for name in request.get("ignored", ()):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
# A test that is held up between two signals must not make two requests of one.
stop._ONE_REQUEST_SECONDS = request.get("one_request_seconds", stop._ONE_REQUEST_SECONDS)
trace = os.open(request["trace"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def write(**facts: Any) -> None:
    os.write(trace, json.dumps(facts).encode() + b"\n")


class Augmented(torch.utils.data.Dataset):
    """64 samples with noise from python, numpy and torch."""

    read = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read += 1
        if index == request.get("slow_sample") or self.read == request.get("slow_read"):
            write(waiting=True)
            time.sleep(600)
        base = torch.linspace(0, 1, 8) * (index % 7)
        if index == request.get("bad_sample"):
            base = base * float("nan")
        noise = 0.1 * torch.randn(8) + 0.05 * random.random() + 0.05 * float(np.random.rand())
        return base + noise, torch.tensor(index % 7)


def stand_still(guard: holdfast.Guard) -> None:
    """Wait until a stop was asked for, and then where no Python runs.

    For a mutex that is held already.
    """
    write(waits=True)
    while guard.stop_reason is None:
        time.sleep(0.01)
    lock, libc = ctypes.create_string_buffer(256), ctypes.CDLL(None)
    write(stuck=True)
    libc.pthread_mutex_lock(lock)
    libc.pthread_mutex_lock(lock)


def wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def main() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    width = request.get("width", 16)
    model = nn.Sequential(
        nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 7)
    )
    # The average is updated by the script, so a run with it decides each step at once.
    has_average = not request.get("fused", False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=not has_average)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    kind, own = holdfast.DataLoader, {"seed": 4}
    if request.get("loader") == "torch":
        kind, own = torch.utils.data.DataLoader, {}
    own["multiprocessing_context"] = request.get("context")
    loader = kind(
        Augmented(), batch_size=8, shuffle=True, num_workers=request.get("workers", 0), **own
    )
    guard = holdfast.Guard(
        request["run_dir"],
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        state={"average": average} if has_average else None,
        save_interval_steps=request.get("save_interval_steps", 5),
        async_save=request.get("async_save", True),
        max_grad_norm=1.0,
        **request.get("policy", {}),
    )
    write(
        start=guard.global_step,
        resumed_from=None if guard.resumed_from is None else guard.resumed_from.name,
    )

    def loss(batch: Any) -> torch.Tensor:
        if guard.global_step == request.get("stuck_at"):
            stand_still(guard)
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    for batch in guard.batches(max_epochs=request.get("epochs", 4)):
        guard.step(batch, loss)
        if has_average:
            average.update_parameters(model)
        write(step=guard.global_step)
        if guard.global_step == request.get("evaluate_at"):
            with guard.evaluate():
                write(evaluating=True)
                time.sleep(600)
        if guard.global_step == request.get("fill_at"):
            from holdfast.testing import fill_disk

            fill_disk(Path(request["filler"]), leave_bytes=request.get("leave_bytes", 4096))
        if guard.global_step == request.get("free_at"):
            Path(request["filler"]).unlink()
        if guard.global_step == request.get("die_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if guard.global_step == request.get("terminate_at"):
            os.kill(os.getpid(), signal.SIGTERM)
        if guard.global_step == request.get("long_step"):
            wait_for_file(Path(request["ends_long_step"]))
        time.sleep(request.get("seconds_per_step", 0.0))
    if request.get("fails_after_loop"):
        raise ValueError("in the evaluation after training")
    tensors = [*model.state_dict().values(), *average.state_dict().values()]
    for state in optimizer.state.values():
        tensors += list(state.values())
    digest = hashlib.sha256(repr(scheduler.get_last_lr()).encode())
    for tensor in tensors:
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    write(
        end=guard.global_step,
        digest=digest.hexdigest(),
        stop_reason=guard.stop_reason,
        events=[[event.kind, event.global_step, dict(event.data)] for event in guard.events()],
    )


if __name__ == "__main__":  # a worker that is spawned imports this file
    main()
