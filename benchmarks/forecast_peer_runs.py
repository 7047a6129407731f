"""One estimate of a peer's for one job of `forecast_models`, in a process of its own, as its documentation says.

    python -m benchmarks.forecast_peer_runs {memtracker,kitsune} NAME MICRO_BATCH_SIZE FOLDER

One JSON line is printed: bytes and the seconds of the estimate alone, or why there is none.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from benchmarks.forecast_models import MODELS, Model, modules_of, optimizers_of, train_step
from benchmarks.results_file import without_paths

_STEPS = 2


def ask_memtracker(model: Model, size: int, _: Path) -> int:
    """Return the peak that torch's MemTracker sees in two steps on fake CPU tensors."""
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode(allow_non_fake_inputs=True):  # without it, it fails on more of the jobs
        job = model.build(size)
        batch = [leaf for leaf in tree_leaves(job["batch"]) if isinstance(leaf, torch.Tensor)]
        tracker = MemTracker()
        tracker.track_external(*modules_of(job), *optimizers_of(job), *batch)
        with tracker:
            for number in range(_STEPS):
                if number:
                    tracker.reset_mod_stats()
                train_step(model, job, job["batch"])
        return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


def ask_kitsune(model: Model, size: int, folder: Path) -> int:
    """Return what torch-kitsune estimates for training, without the 15 % that it adds for the allocator.

    Raises:
        TypeError: The job has two networks, which it cannot be told.
    """
    sys.path.append(str(folder))
    predict_memory = importlib.import_module("kitsune.predict").predict_memory
    job = model.build(size)
    if isinstance(job["model"], dict):
        raise TypeError("it takes one model")
    inputs = next(leaf for leaf in tree_leaves(job["batch"]) if isinstance(leaf, torch.Tensor))
    optimizer = type(job["optimizer"]).__name__.lower()
    found = predict_memory(job["model"], tuple(inputs.shape[1:]), size, optimizer=optimizer, training=True)
    return int(found.total_bytes - found.overhead_bytes)


_PEERS: dict[str, Callable[[Model, int, Path], int]] = {"memtracker": ask_memtracker, "kitsune": ask_kitsune}


def main() -> None:
    """Make the estimate that the command line names."""
    peer, name, size, folder = sys.argv[1:]
    model = next(model for model in MODELS if model.name == name)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # the first optimizer imports half of torch
    started = time.perf_counter()
    told: dict[str, Any]
    try:
        told = {"bytes": _PEERS[peer](model, int(size), Path(folder))}
    except Exception as error:  # noqa: BLE001 - that it fails, and how, is a result
        told = {"failed": without_paths(f"{type(error).__name__}: {error}".splitlines()[0])}
    print(json.dumps({**told, "seconds": round(time.perf_counter() - started, 3)}))


if __name__ == "__main__":
    main()
