"""The models whose steps are timed, with batches sized so that one bare step takes a given time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody spells it

MAX_GRAD_NORM = 1.0
_CLASSES = 10
_BLOCKS, _STEPS_OF_A_BLOCK = 5, 4


class Job:
    """A model, AdamW, and one batch; the same for every call with the same arguments.

    Args:
        kind: "tiny", "mlp", "conv", or "wide_conv", which has large activations.
        batch_size: Samples.
        device: Where it lives.
    """

    def __init__(self, kind: str, batch_size: int, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.model = _MODELS[kind]().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        shape = {"tiny": (4,), "mlp": (256,), "conv": (3, 32, 32), "wide_conv": (3, 64, 64)}[kind]
        inputs, labels = torch.randn(batch_size, *shape), torch.randint(_CLASSES, (batch_size,))
        self.batch = inputs.to(device), labels.to(device)

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the mean cross-entropy, shape ``()``."""
        inputs, labels = batch
        return F.cross_entropy(self.model(inputs), labels)

    def bare_step(self, batch: Any) -> None:
        """Make one step as a plain PyTorch loop does, with clipping."""
        self.optimizer.zero_grad()
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()

    def mutable_buffer_bytes(self) -> int:
        """Return the bytes of the running statistics."""
        return sum(buffer.nbytes for buffer in self.model.buffers())


def _tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, _CLASSES))


def _mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, _CLASSES))


def _conv(width: int = 16) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for _ in range(4):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, _CLASSES))


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "tiny": _tiny,
    "mlp": _mlp,
    "conv": _conv,
    "wide_conv": _conv,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A batch size, and what one bare step with it takes.

    Args:
        batch_size: Samples.
        milliseconds: Time of one step.
    """

    batch_size: int
    milliseconds: float


def find_batch_size(
    kind: str, milliseconds: float, clock: Callable[[], float] = time.process_time, device: str = "cpu"
) -> Size:
    """Return the batch size with which one bare step takes about this long."""
    size, took = 16, 0.0
    for _ in range(6):
        job = Job(kind, size, device)
        took = _milliseconds_of_step(job, clock)
        if abs(took / milliseconds - 1) < 0.1:
            break
        size = max(2, round(size * milliseconds / took))
    return Size(batch_size=size, milliseconds=round(took, 2))


def _milliseconds_of_step(job: Job, clock: Callable[[], float]) -> float:
    """Return the time of a step in the fastest of some blocks, after a few to warm up."""
    blocks = []
    for _ in range(_BLOCKS):
        started = clock()
        for _ in range(_STEPS_OF_A_BLOCK):
            job.bare_step(job.batch)
        blocks.append((clock() - started) / _STEPS_OF_A_BLOCK * 1000)
    return min(blocks[1:])
