"""One life of the demo's training, in a process of its own, with the faults that must be injected from inside.

    python -m holdfast.chaos.life '{"run_dir": ..., "trace": ..., "faults": {...}}'

After each step it appends step, loss and a digest of all weights and momenta to the trace, so that two runs can be
compared step by step, also when one of them was killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from holdfast.chaos.digits import Job, train, train_bare
from holdfast.checkpoint.store import Store
from holdfast.run.guard import Guard
from holdfast.testing import fill_disk, limit_memory

_FIRST_HEADROOM_BYTES = 96 * 2**20
_LESS_EACH_STEP_BYTES = 4 * 2**20
_SMALL_FILE_BYTES = 64 * 1024


def digest(job: Job) -> str:
    """Return a digest of every weight, buffer and optimizer state, bit for bit."""
    tensors = [*job.model.state_dict().values()]
    for state in job.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:16]


def shrinking_memory(from_step: int, until: str) -> Callable[[Guard], None]:
    """Return a fault: less memory after each step, until the guard has answered with the decision `until`."""

    def shrink(guard: Guard) -> None:
        steps = guard.global_step - from_step
        if steps >= 0 and all(event.kind != until for event in guard.events()):
            limit_memory(_FIRST_HEADROOM_BYTES - steps * _LESS_EACH_STEP_BYTES)

    return shrink


def full_disk(first_step: int, last_step: int, store: Store, filler: Path | None) -> Callable[[Guard], None]:
    """Return a fault: no file can be written from one step to another.

    Args:
        first_step: When the disk becomes full.
        last_step: When there is room again.
        store: Whose checkpoints must verify while the disk is full.
        filler: File that fills a small disk; None: the system refuses files above 64 KiB instead, where nobody
            may mount a small disk.
    """

    def fill(guard: Guard) -> None:
        if guard.global_step == first_step:
            if filler is None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (_SMALL_FILE_BYTES, resource.RLIM_INFINITY))
            else:
                fill_disk(filler, leave_bytes=_SMALL_FILE_BYTES)
        elif guard.global_step == last_step:
            for entry in store.entries():
                entry.verify()  # raises, and the life ends without a last line in its trace
            if filler is None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            else:
                filler.unlink()

    return fill


def main(request: dict[str, Any]) -> None:
    """Live one life."""
    torch.set_num_threads(1)  # the same number everywhere, or sums are rounded differently
    trace = os.open(request["trace"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(**facts: Any) -> None:
        os.write(trace, json.dumps(facts).encode() + b"\n")

    damaged, faults = request.get("damaged"), request.get("faults", {})
    if request.get("bare"):
        job, losses = train_bare(damaged=damaged, after_step=lambda job, step: write(step=step, digest=digest(job)))
        write(losses=losses)
    else:
        run_dir = Path(request["run_dir"])
        injected: list[Callable[[Guard], None]] = []
        if "memory" in faults:
            injected.append(shrinking_memory(**faults["memory"]))
        if "disk" in faults:
            filler = faults["disk"].pop("filler")
            store = Store(run_dir / "checkpoints")
            injected.append(full_disk(**faults["disk"], store=store, filler=Path(filler) if filler else None))

        def after_step(job: Job, guard: Guard) -> None:
            write(step=guard.global_step, digest=digest(job))
            for inject in injected:
                inject(guard)

        job = train(run_dir, damaged=damaged, after_step=after_step)
        limit_memory(None)
    save_file(dict(job.model.state_dict()), request["weights"])
    write(finished=True, accuracy=job.accuracy())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
