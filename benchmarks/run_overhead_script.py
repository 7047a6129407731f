"""A training loop on torch's loader, observed and not in turns.

Started by ``run_overhead`` in an observed process.

    python -m benchmarks.run_overhead_script KIND MILLISECONDS PAIRS

The loop does not change: what the observer has put around torch's functions is taken away and put
back between blocks of steps. Prints a line of JSON: the batch size, and for each pair the CPU
seconds of a plain and an observed step.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader, IterableDataset, dataloader

from benchmarks.step_models import Job, find_batch_size

_BLOCK_MILLISECONDS = 200
_TINY_BATCH = 4
_TINY_STEPS = 400
_WRAPPED = (
    (torch.autograd, "backward"),
    (torch.nn.utils, "clip_grad_norm_"),
    (dataloader._BaseDataLoaderIter, "__next__"),
)
_HOOKS = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)


class Repeated(IterableDataset[Any]):
    """The same batch for ever."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._batch


class Observation:
    """What the observer has put into torch, to be taken away and put back."""

    def __init__(self) -> None:
        self._ours = [(owner, name, vars(owner)[name]) for owner, name in _WRAPPED]
        self._theirs = [(owner, name, wrapper.__wrapped__) for owner, name, wrapper in self._ours]
        self._hooks = [dict(hooks) for hooks in _HOOKS]
        assert all(self._hooks), "this process is not observed"

    def switch(self, *, on: bool) -> None:
        """Let the next steps be observed, or not."""
        for owner, name, function in self._ours if on else self._theirs:
            setattr(owner, name, function)
        for hooks, ours in zip(_HOOKS, self._hooks, strict=True):
            hooks.clear()
            if on:
                hooks.update(ours)


def run(job: Job, batches: Iterator[Any], steps: int) -> float:
    """Make steps and return the CPU seconds of one."""
    started = time.process_time()
    for _ in range(steps):
        job.bare_step(next(batches))
    return (time.process_time() - started) / steps


def compare(job: Job, steps: int, pairs: int) -> list[tuple[float, float]]:
    """Return the CPU seconds of a plain and of an observed step, for each pair of blocks."""
    batches = iter(DataLoader(Repeated(job.batch), batch_size=None))
    observation = Observation()
    chance = random.Random(0)
    found = []
    for pair in range(pairs + 2):
        took = {}
        for on in (True, False) if chance.random() < 0.5 else (False, True):
            observation.switch(on=on)
            took[on] = run(job, batches, steps)
        if pair >= 2:  # the first to warm up
            found.append((took[False], took[True]))
    return found


def main() -> None:
    torch.set_num_threads(1)
    kind, milliseconds, pairs = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    if kind == "tiny":
        size, steps = _TINY_BATCH, _TINY_STEPS
    else:
        size, steps = (
            find_batch_size(kind, milliseconds).batch_size,
            max(4, round(_BLOCK_MILLISECONDS / milliseconds)),
        )
    print(json.dumps({"batch_size": size, "pairs": compare(Job(kind, size), steps, pairs)}))


if __name__ == "__main__":
    main()
