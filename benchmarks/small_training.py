"""A small training that uses everything a resume must bring back.

The subject of the kills and of the flipped bits.

BatchNorm, dropout, AdamW, a learning-rate schedule, a shuffled loader, and augmentation by the
random numbers of python, numpy and torch.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody spells it

from holdfast import DataLoader, Guard

STEPS = 80
SAVE_INTERVAL_STEPS = 7
BATCH_SIZE = 16
_SAMPLES = 192
_SIDE = 16


class Augmented(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Random images in 4 classes, augmented by three libraries' random numbers.

    Item: ``(1, 16, 16)``, label.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self._images = torch.randn(_SAMPLES, 1, _SIDE, _SIDE, generator=generator)
        self._labels = torch.randint(4, (_SAMPLES,), generator=generator).tolist()

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self._images[index]
        if random.random() < 0.5:
            image = image.flip(-1)
        image = torch.roll(image, int(np.random.randint(-2, 3)), dims=-2)
        return image + 0.1 * torch.randn_like(image), self._labels[index]


class Training:
    """Model, optimizer and schedule, the same at every start."""

    def __init__(self, channels: int = 16) -> None:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        blocks = [
            layer
            for width in (1, channels)
            for layer in (
                nn.Conv2d(width, channels, 3, padding=1),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
            )
        ]
        head = [nn.Linear(16 * channels, 64), nn.ReLU(), nn.Linear(64, 4)]
        self.model = nn.Sequential(
            *blocks, nn.Dropout(0.2), nn.AdaptiveAvgPool2d(4), nn.Flatten(), *head
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=STEPS)

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the mean cross-entropy, shape ``()``."""
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def bare_step(self, batch: Any) -> None:
        """Make one step as a plain PyTorch loop does."""
        self.optimizer.zero_grad()
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.scheduler.step()

    def digest(self) -> str:
        """Return a digest of all weights, buffers, moments and of the schedule, bit for bit."""
        tensors = list(self.model.state_dict().values())
        for state in self.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        numbers = [group["lr"] for group in self.optimizer.param_groups] + [
            self.scheduler.last_epoch
        ]
        return digest_tensors(tensors, json.dumps(numbers))

    def plain_state(self) -> dict[str, Any]:
        """Return what most scripts save."""
        return {
            name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler")
        }

    def load_plain_state(self, saved: dict[str, Any]) -> None:
        """Put back what `plain_state` returned."""
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(saved[name])

    def guard(self, run_dir: Path, num_workers: int = 0, **settings: Any) -> Guard:
        """Return a guard over all of it, resumed if there is a checkpoint."""
        return Guard(
            run_dir,
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            loader=DataLoader(
                Augmented(), batch_size=BATCH_SIZE, shuffle=True, seed=5, num_workers=num_workers
            ),
            save_interval_steps=SAVE_INTERVAL_STEPS,
            **settings,
        )


def train_guarded(
    run_dir: Path,
    num_workers: int,
    after_step: Callable[[int, Training], None],
    max_steps: int = STEPS,
) -> Training:
    """Train under a guard from wherever the run stands.

    `after_step` is called with the steps made, after each.
    """
    training = Training()
    guard = training.guard(run_dir, num_workers)
    for batch in guard.batches(max_steps=max_steps):
        guard.step(batch, training.loss)
        after_step(guard.global_step, training)
    return training


def digest_tensors(tensors: list[torch.Tensor], text: str = "") -> str:
    """Return a digest of tensors on the host, bit for bit."""
    found = hashlib.sha256(text.encode())
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]
