"""The models whose steps are timed, with batches sized so that one bare step takes a given time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody spells it

MAX_GRAD_NORM = 1.0
_CLASSES = 10
_WIDTHS = {"tiny": 4, "mlp": 256, "mlp512": 512, "mlp2048": 2048}
_BLOCKS, _STEPS_OF_A_BLOCK = 5, 4
# A step on a GPU takes the host's time at least, so its length says little while batches are small.
_MOST_TRIALS = 12

Implementation: TypeAlias = Literal["default", "fused", "foreach"]
"""How AdamW updates the weights: the implementation that torch chooses, or one by name."""

_ARGUMENTS: dict[Implementation, dict[str, bool]] = {
    "default": {},
    "fused": {"fused": True},
    "foreach": {"foreach": True},
}


class Job:
    """A model, AdamW, and one batch; the same for every call with the same arguments.

    Args:
        kind: "tiny", "mlp", "mlp512", "mlp2048", "conv", or "wide_conv", which has large
            activations.
        batch_size: Samples.
        device: Where it lies.
        implementation: Of AdamW.
    """

    def __init__(
        self,
        kind: str,
        batch_size: int,
        device: str = "cpu",
        implementation: Implementation = "default",
    ) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = _make_model(kind).to(device)
        # It learns: of a run that does not, the guard searches the cause, which is no cost of a
        # step.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=1e-2 if kind == "tiny" else 1e-3,
            **_ARGUMENTS[implementation],
        )
        shape = (
            (_WIDTHS[kind],) if kind in _WIDTHS else (3, 32, 32) if kind == "conv" else (3, 64, 64)
        )
        inputs = torch.randn(batch_size, *shape, device=device)
        seen = inputs.flatten(1)[:, : 2 * _CLASSES]
        labels = (seen @ torch.randn(seen.shape[1], _CLASSES, device=device)).argmax(1)
        self.batch = inputs, labels

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


def _make_model(kind: str) -> nn.Module:
    if kind == "tiny":
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, _CLASSES))
    layers: list[nn.Module] = []
    if kind.startswith("mlp"):
        width = _WIDTHS[kind]
        for _ in range(4):
            layers += [nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, _CLASSES))
    for channels in (3, 16, 16, 16):
        layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, _CLASSES))


class Size(NamedTuple):
    """A batch size, and what one bare step with it takes."""

    batch_size: int
    milliseconds: float


def find_batch_size(
    kind: str,
    milliseconds: float,
    clock: Callable[[], float] = time.process_time,
    device: str = "cpu",
) -> Size:
    """Return the batch size with which one bare step takes about this long."""
    size, took = 16, 0.0
    for _ in range(_MOST_TRIALS):
        job, blocks = Job(kind, size, device), []
        for _ in range(_BLOCKS):
            started = clock()
            for _ in range(_STEPS_OF_A_BLOCK):
                job.bare_step(job.batch)
            blocks.append((clock() - started) / _STEPS_OF_A_BLOCK * 1000)
        took = min(blocks[1:])  # after one to warm up
        if abs(took / milliseconds - 1) < 0.1:
            break
        size = max(2, round(size * milliseconds / took))
    return Size(size, round(took, 2))
