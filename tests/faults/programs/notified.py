"""A guarded training about which messages are sent.

    python notified.py '{"run_dir": ..., "nan_at": [2], "steps": 6, "end": "killed"}'

Other keys: `fill` is a file with which the disk is nearly filled before the first step, `hang_at` is
the step after which the training stands still, and `raise_at` is that of an exception.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import holdfast

torch.set_num_threads(1)
request: dict[str, Any] = json.loads(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.Adam(model.parameters())
batches = [torch.randn(4, 64) for _ in range(8)]
for number in request.get("nan_at", ()):
    batches[number][0, 0] = float("nan")
fields: dict[str, Any] = {}
if "NOTIFY_OF_PROGRAM" in os.environ:
    # A variable is not recorded, but the command line is.
    fields["notify"] = os.environ["NOTIFY_OF_PROGRAM"]
guard = holdfast.Guard(
    request["run_dir"],
    model=model,
    optimizer=optimizer,
    loader=batches,
    save_interval_steps=4,
    async_save=False,
    **fields,
)
if "fill" in request:
    # A checkpoint takes 50 KiB, and needs 1 MiB to spare. There is room for one, but not for two.
    file = Path(request["fill"])
    free = shutil.disk_usage(file.parent).free
    file.write_bytes(bytes(free - (1536 << 10)))
mark = Path(request["run_dir"], "was-hurt")
is_first = not mark.exists()
for batch in guard.batches(max_steps=request.get("steps", 6)):
    guard.step(batch, lambda x: model(x).square().mean())
    if guard.global_step == request.get("hang_at") and is_first:
        mark.touch()
        time.sleep(1000)
    if guard.global_step == request.get("raise_at"):
        raise ValueError("a message with a S3cret")
    if guard.global_step == 5 and is_first and request.get("end") == "killed":
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
