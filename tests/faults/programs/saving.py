"""Train with saves beside the training, and end in one of the ways in which programs end.

    python saving.py '{"run_dir": ..., "trace": ..., "end": "return" | "error" | "exit" | "break" |
    "never"}'

Appends a line of JSON for each step to the trace: the step, the newest step whose save was begun,
and the digest of the weights, before the save of it. It ends while a save is under way.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

import torch
from torch import nn

import holdfast

torch.set_num_threads(1)
request = json.loads(sys.argv[1])
kept = []  # until the interpreter ends: a loop that is dropped would be closed


def write(**line: Any) -> None:
    descriptor = os.open(request["trace"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, json.dumps(line).encode() + b"\n")
    os.close(descriptor)


def main() -> None:
    torch.manual_seed(0)
    side = request.get("side", 1024)
    model = nn.Linear(side, side, bias=False)
    guard = holdfast.Guard(
        request["run_dir"],
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loader=[torch.ones(2, side)] * 10_000,
        save_interval_steps=request.get("save_interval_steps", 4),
        spike_action="off",
        check_split=False,
    )

    def digest() -> str:
        return hashlib.sha256(model.weight.detach().numpy().data).hexdigest()

    start = guard.global_step
    write(start=start, digest=digest())
    last = start + request.get("steps", 5)
    kept.append(guard.batches(max_epochs=1))
    for batch in kept[0]:
        guard.step(batch, lambda x: model(x).square().mean())
        saving = guard._session.saving
        # Not before a thread has made the memory of the copies ready
        begun = saving._schedule._tried_at_step or 0
        write(step=guard.global_step, begun=begun, digest=digest())
        time.sleep(request.get("seconds_per_step", 0.0))
        if request["end"] == "never" or guard.global_step < last:
            continue
        if saving._thread._job is None or begun == start:
            continue
        write(saving=True)
        if request["end"] == "error":
            raise RuntimeError("the program has failed")
        if request["end"] == "exit":
            sys.exit(3)
        if request["end"] == "break":
            break
        return
    write(left=guard.global_step, stop_reason=guard.stop_reason)


main()
