"""The models, batches and memory limits of the out-of-memory benchmark, drawn at random from a
seed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody spells it

KINDS = ("mlp", "conv", "transformer", "lstm")
_CLASSES = 10
_RANGES: dict[str, dict[str, tuple[int, ...]]] = {
    "mlp": {"batch_size": (8192, 12288, 16384), "width": (192, 256), "depth": (3, 4, 5, 6)},
    "conv": {"batch_size": (32, 48, 64), "width": (8, 16), "depth": (3, 4, 5)},
    "transformer": {
        "batch_size": (64, 96, 128),
        "width": (64,),
        "depth": (2, 3, 4),
        "length": (64, 96),
    },
    "lstm": {"batch_size": (128, 256), "width": (128, 192), "depth": (2,), "length": (24, 48)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training step that will not fit."""

    number: int  # its seed too
    kind: str  # one of `KINDS`
    batch_size: int
    sizes: dict[str, int]
    # Where the limit lies between the least that may be asked for (0) and the most (1)
    share: float


def draw_case(number: int) -> Case:
    """Draw a case; the number decides everything."""
    chance, kind = random.Random(number), KINDS[number % len(KINDS)]
    sizes = {name: chance.choice(values) for name, values in _RANGES[kind].items()}
    return Case(
        number=number,
        kind=kind,
        batch_size=sizes.pop("batch_size"),
        sizes=sizes,
        share=chance.random(),
    )


class Sequential(nn.Module):
    """An LSTM, or transformer encoder layers, and a classifier of the mean.

    Takes ``(batch, length, width)``.
    """

    def __init__(self, kind: str, width: int, depth: int) -> None:
        super().__init__()
        self.body: nn.Module = nn.LSTM(width, width, depth, batch_first=True)
        if kind == "transformer":
            layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
            self.body = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape ``(batch, 10)``."""
        found = self.body(x)
        logits: torch.Tensor = self.head(
            (found[0] if isinstance(found, tuple) else found).mean(dim=1)
        )
        return logits


class Job:
    """Model, plain SGD or AdamW, and two batches.

    A small one that warms up, and the one that will not fit.
    """

    def __init__(self, case: Case, device: str = "cpu", *, adamw: bool = False) -> None:
        torch.manual_seed(case.number)
        with torch.device(device):
            self.model = _make_model(case)
        kind = torch.optim.AdamW if adamw else torch.optim.SGD
        self.optimizer: torch.optim.Optimizer = kind(self.model.parameters(), lr=0.01)
        self.small = _make_batch(case, 4, device)
        self.batch = _make_batch(case, case.batch_size, device)

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the mean cross-entropy, shape ``()``."""
        inputs, labels = batch
        return F.cross_entropy(self.model(inputs), labels)

    def bare_step(self, batch: Any) -> None:
        """Make one step as a plain PyTorch loop does."""
        self.optimizer.zero_grad()
        self.loss(batch).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def gradient(self) -> torch.Tensor:
        """Return all gradients as one vector, on the host."""
        return torch.cat(
            [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        ).cpu()


def _make_model(case: Case) -> nn.Module:
    width, depth = case.sizes["width"], case.sizes["depth"]
    if case.kind in ("transformer", "lstm"):
        return Sequential(case.kind, width, depth)
    if case.kind == "mlp":
        layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
        return nn.Sequential(*layers, nn.Linear(width, _CLASSES))
    channels = [3, *[width] * depth]
    layers = [
        layer
        for n in range(depth)
        for layer in (nn.Conv2d(channels[n], width, 3, padding=1), nn.ReLU())
    ]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, _CLASSES)
    )


def _make_batch(case: Case, size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(case.number)
    width = case.sizes["width"]
    shapes = {"mlp": (size, width), "conv": (size, 3, 64, 64)}
    shape = shapes.get(case.kind, (size, case.sizes.get("length", 0), width))
    inputs = torch.randn(*shape, generator=generator, device=device)
    return inputs, torch.randint(_CLASSES, (size,), generator=generator, device=device)
