"""The models, batches and memory limits of the out-of-memory benchmark, drawn at random from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody spells it

KINDS = ("mlp", "conv", "transformer", "lstm")
_CLASSES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training step that will not fit.

    Args:
        number: Of the case; its seed too.
        kind: One of `KINDS`.
        batch_size: Samples.
        sizes: Further sizes by name.
        share: Where the limit lies between the least that may be asked for (0) and the most (1).
    """

    number: int
    kind: str
    batch_size: int
    sizes: dict[str, int]
    share: float


def draw_case(number: int) -> Case:
    """Draw a case; the number decides everything."""
    chance = random.Random(number)
    kind = KINDS[number % len(KINDS)]
    batch_size, sizes = _DRAW[kind](chance)
    return Case(number=number, kind=kind, batch_size=batch_size, sizes=sizes, share=chance.random())


def _draw_mlp(chance: random.Random) -> tuple[int, dict[str, int]]:
    return chance.choice([8192, 12288, 16384]), {"width": chance.choice([192, 256]), "depth": chance.randint(3, 6)}


def _draw_conv(chance: random.Random) -> tuple[int, dict[str, int]]:
    return chance.choice([32, 48, 64]), {"width": chance.choice([8, 16]), "depth": chance.randint(3, 5), "side": 64}


def _draw_transformer(chance: random.Random) -> tuple[int, dict[str, int]]:
    return chance.choice([64, 96, 128]), {
        "width": 64,
        "depth": chance.randint(2, 4),
        "length": chance.choice([64, 96]),
    }


def _draw_lstm(chance: random.Random) -> tuple[int, dict[str, int]]:
    return chance.choice([128, 256]), {
        "width": chance.choice([128, 192]),
        "depth": 2,
        "length": chance.choice([24, 48]),
    }


_DRAW: dict[str, Callable[[random.Random], tuple[int, dict[str, int]]]] = {
    "mlp": _draw_mlp,
    "conv": _draw_conv,
    "transformer": _draw_transformer,
    "lstm": _draw_lstm,
}


class Recurrent(nn.Module):
    """An LSTM and a classifier of its last output. Takes ``(batch, length, width)``."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, depth, batch_first=True)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape ``(batch, 10)``."""
        logits: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
        return logits


class Attentive(nn.Module):
    """Transformer encoder layers and a classifier of their mean. Takes ``(batch, length, width)``."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape ``(batch, 10)``."""
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x.mean(dim=1))
        return logits


class Job:
    """Model, plain SGD, and two batches: a small one that warms up, and the one that will not fit."""

    def __init__(self, case: Case, device: str = "cpu") -> None:
        torch.manual_seed(case.number)
        self.model = _make_model(case).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
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
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]).cpu()


def _make_model(case: Case) -> nn.Module:
    width, depth = case.sizes["width"], case.sizes["depth"]
    if case.kind == "lstm":
        return Recurrent(width, depth)
    if case.kind == "transformer":
        return Attentive(width, depth)
    layers: list[nn.Module] = []
    if case.kind == "mlp":
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.GELU()]
        return nn.Sequential(*layers, nn.Linear(width, _CLASSES))
    channels = 3
    for _ in range(depth):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, _CLASSES))


def _make_batch(case: Case, size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(case.number)
    width = case.sizes["width"]
    shape = {
        "mlp": (size, width),
        "conv": (size, 3, case.sizes.get("side", 0), case.sizes.get("side", 0)),
    }.get(case.kind, (size, case.sizes.get("length", 0), width))
    inputs = torch.randn(*shape, generator=generator)
    return inputs.to(device), torch.randint(_CLASSES, (size,), generator=generator).to(device)
