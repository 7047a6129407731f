"""The training of the soak: under a guard with everything switched on, or the bare loop that it must equal.

    python -m evals.soak.training FOLDER RUN SEED           # until FOLDER/stop is there; then FOLDER/final.json
    python -m evals.soak.training FOLDER RUN SEED --steps N # the bare loop, N steps; prints its digest

FOLDER gets the step and process after each step, and the process of each worker; ``refuse`` in it has the next step's
allocation refused.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.small_training import BATCH_SIZE, Augmented, Training

from holdfast import DataLoader, Guard
from holdfast.testing import limit_memory, memory_limited

_EPOCH, _BAD = 3840, 1234  # samples, and the one that is NaN
_PAUSE_SECONDS = 0.02


class Samples(Augmented):
    """The augmented images again and again, with one in `_EPOCH` of NaN; each worker writes down who it is."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self._folder, self._known = folder, 0

    def __len__(self) -> int:
        return _EPOCH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        worker = torch.utils.data.get_worker_info()
        if worker is not None and self._folder is not None and self._known != os.getpid():
            self._known = os.getpid()
            (self._folder / f"worker{worker.id}").write_text(str(self._known))
        image, label = super().__getitem__(index % super().__len__())
        return (image * float("nan") if index == _BAD else image), label


def train_bare(seed: int, steps: int) -> str:
    """Train as a plain loop that leaves out batches that are not finite, and return the digest."""
    training, loader, made = Training(), DataLoader(Samples(None), batch_size=BATCH_SIZE, shuffle=True, seed=seed), 0
    while made < steps:
        for batch in loader:
            if made == steps:
                break
            if torch.isfinite(batch[0]).all():
                training.bare_step(batch)
                made += 1
    return training.digest()


def train(folder: Path, run: Path, seed: int) -> None:
    """Train until asked to stop, from wherever the run stands."""
    limit_memory(2**45)  # never met, but malloc is then set as under a limit from the beginning
    training = Training()
    loader = DataLoader(Samples(folder), batch_size=BATCH_SIZE, shuffle=True, seed=seed, num_workers=2)
    guard = Guard(
        run, model=training.model, optimizer=training.optimizer, scheduler=training.scheduler, loader=loader,
        save_interval_steps=50, precision="fp32",
    )  # fmt: skip
    images = torch.randn(64, 1, 16, 16, generator=torch.Generator().manual_seed(1))
    status, ask, stop = os.open(folder / "status", os.O_CREAT | os.O_RDWR), folder / "refuse", folder / "stop"

    def loss(batch: Any) -> torch.Tensor:
        found = training.loss(batch)  # which has moved BatchNorm and random state
        if ask.exists():
            ask.unlink()
            with memory_limited(32 << 20):
                torch.empty(512 << 20, dtype=torch.uint8)
        return found

    for batch in guard.batches(max_steps=10**9):
        result = guard.step(batch, loss)
        os.pwrite(status, b"%12d %12d" % (guard.global_step, os.getpid()), 0)
        print(f"step {guard.global_step}: loss {result.loss} of a batch of {BATCH_SIZE} images", flush=True)
        if guard.global_step % 100 == 0:
            with guard.evaluate():
                spread = training.model(images).softmax(-1).amax(-1).mean()
            guard.validated(float(spread), name="sureness", mode="max", keep=2)
            guard.log(sureness=spread, split="validation")
        if stop.exists():
            guard.request_stop("stop")
        time.sleep(_PAUSE_SECONDS)
    if guard.stop_reason == "stop":
        kinds = collections.Counter(each.kind for each in guard.events())
        final = {"step": guard.global_step, "digest": training.digest(), "events": dict(kinds)}
        (folder / "final.json").write_text(json.dumps(final))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("run", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("--steps", type=int)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.steps is None:
        train(given.folder, given.run, given.seed)
    else:
        print(train_bare(given.seed, given.steps))


if __name__ == "__main__":
    main()
