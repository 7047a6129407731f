"""The main job of the demo.

A convolutional classifier on the 1,797 real handwritten digits of scikit-learn.

`train` is a user's own loop under a guard; `train_bare` is the same loop in plain PyTorch, the
reference that every promise is held against.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.utils.data import Dataset

from holdfast.guard.guard import Guard
from holdfast.guard.result import StepResult
from holdfast.loader.loader import DataLoader

EPOCHS = 30
# Two batches an epoch, whose activations are large enough to run out of memory with
BATCH_SIZE = 719
_CHANNELS = 24
_TEST_SAMPLES = 360


class Digits(Dataset[Any]):
    """Images of 8 x 8 pixels from 0 to 1 with their labels.

    1,437, shifted at random by up to one pixel, to train.

    The last 360, which are not shifted, are for the test.
    """

    def __init__(self, *, train: bool) -> None:
        found = load_digits()
        images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16.0
        labels = torch.tensor(found.target)
        part = slice(None, -_TEST_SAMPLES) if train else slice(-_TEST_SAMPLES, None)
        self.images, self.labels, self._shift = images[part].clone(), labels[part], train

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        if self._shift:
            down, right = torch.randint(-1, 2, (2,)).tolist()
            image = image.roll((down, right), dims=(1, 2))
        return image, self.labels[index]


class Block(nn.Module):
    """Two convolutions around a residual connection, shape ``(batch, channels, 8, 8)``."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.GroupNorm(4, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input with its residual added."""
        hidden: torch.Tensor = self.second(F.relu(self.norm(self.first(x))))
        return x + hidden


@dataclass(slots=True)
class Job:
    """Data, model, optimizer and learning-rate schedule, the same at every start."""

    data: Digits = field(init=False)
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    scheduler: torch.optim.lr_scheduler.LRScheduler = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.data = Digits(train=True)
        self.model = nn.Sequential(
            nn.Conv2d(1, _CHANNELS, 3, padding=1),
            Block(_CHANNELS),
            Block(_CHANNELS),
            Block(_CHANNELS),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(4 * _CHANNELS, 10),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, T_max=2 * EPOCHS
        )

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the mean cross-entropy of images and labels, shape ``()``."""
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def accuracy(self) -> float:
        """Return the share of the 360 test images that are classified right."""
        test = Digits(train=False)
        with torch.no_grad():
            right = self.model(test.images).argmax(dim=1) == test.labels
        return float(right.float().mean())


def train(
    run_dir: Path,
    after_step: Callable[[Job, Guard, StepResult], None],
    wrap: Callable[[Any], Any] = lambda samples: samples,
    **loading: Any,
) -> Job:
    """Train under a guard, from wherever the run directory stands.

    `after_step` may look, and inject faults.

    `wrap` puts something around the dataset, and the loader gets further arguments.
    """
    job = Job()
    guard = Guard(
        run_dir,
        model=job.model,
        optimizer=job.optimizer,
        scheduler=job.scheduler,
        loader=DataLoader(wrap(job.data), batch_size=BATCH_SIZE, shuffle=True, seed=0, **loading),
        max_grad_norm=1.0,
        save_interval_steps=10,
    )
    for batch in guard.batches(max_epochs=EPOCHS):
        result = guard.step(batch, job.loss)
        after_step(job, guard, result)
    return job


def train_bare(after_step: Callable[[Job, int, bool], None]) -> tuple[Job, int]:
    """Train without a guard; batches that hold NaN are passed over. Returns the job, and its steps.

    `after_step` gets the number of steps, and whether this batch was passed over.
    """
    job, steps = Job(), 0
    loader = DataLoader(job.data, batch_size=BATCH_SIZE, shuffle=True, seed=0)
    for _ in range(EPOCHS):
        for batch in loader:
            sound = not batch[0].isnan().any()
            if sound:
                job.optimizer.zero_grad()
                job.loss(batch).backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
                job.optimizer.step()
                job.scheduler.step()
                steps += 1
            after_step(job, steps, not sound)
    return job, steps
