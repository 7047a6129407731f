"""The training of the soak: FOLDER RUN SEED.

With a number of steps the bare loop that it must equal.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.small_training import BATCH_SIZE, Augmented, Training
from torch.utils.data import ConcatDataset, default_collate

from holdfast import DataLoader, Guard
from holdfast.testing import limit_memory, memory_limited


def batch_of(samples: list[Any]) -> Any:
    """Return a batch; one of some hundred is NaN."""
    images, labels = default_collate(samples)
    return (images * float("nan") if images[0, 0, 0, 0] > 2.6 else images), labels


def make_loader(seed: int, workers: int) -> DataLoader:
    """Return a loader over 3840 augmented images."""
    data = ConcatDataset([Augmented()] * 20)
    return DataLoader(
        data, BATCH_SIZE, shuffle=True, seed=seed, num_workers=workers, collate_fn=batch_of
    )


def train_bare(seed: int, steps: int) -> str:
    """Train as a plain loop that leaves out batches that are not finite, and return the digest."""
    training, loader, made = Training(), make_loader(seed, 0), 0
    while made < steps:
        for batch in loader:
            if made < steps and torch.isfinite(batch[0]).all():
                training.bare_step(batch)
                made += 1
    return training.digest()


def train(folder: Path, run: Path, seed: int) -> None:
    """Train from wherever the run stands until FOLDER/stop is there.

    FOLDER/refuse has an allocation refused.
    """
    limit_memory(2**45)  # never met, but malloc is then set as under a limit from the beginning
    training, images = Training(), torch.ones(64, 1, 16, 16)
    guard = Guard(
        run,
        model=training.model,
        optimizer=training.optimizer,
        scheduler=training.scheduler,
        loader=make_loader(seed, 2),
        save_interval_steps=50,
    )
    status, ask, stop = (
        os.open(folder / "status", os.O_CREAT | os.O_RDWR),
        folder / "refuse",
        folder / "stop",
    )

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
        print(
            f"step {guard.global_step}: loss {result.loss} of a batch of {BATCH_SIZE} images",
            flush=True,
        )
        if guard.global_step % 100 == 0:
            with guard.evaluate():
                sureness = float(training.model(images).softmax(-1).amax(-1).mean())
            guard.validated(sureness, name="sureness", mode="max", keep=2)
            guard.log(sureness=sureness, split="validation")
        if stop.exists():
            guard.request_stop("stop")
        time.sleep(0.1 if guard.global_step > int(os.environ.get("QUICK_STEPS", "0")) else 0.0)
    if guard.stop_reason == "stop":
        kinds = collections.Counter(each.kind for each in guard.events())
        final = {"steps": guard.global_step, "digest": training.digest(), "events": kinds}
        (folder / "final.json").write_text(json.dumps(final))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[4:]:
        print(train_bare(int(sys.argv[3]), int(sys.argv[4])))
    else:
        train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
