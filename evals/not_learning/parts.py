"""Small networks that several programs share; no program."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers of these sizes with an activation between each two."""
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [nn.Linear(wide, narrow), act()]
    return nn.Sequential(*layers[:-1])


def conv_block(channels: int, out: int) -> nn.Sequential:
    """Return convolution, batch norm and a rectifier."""
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


def small_cnn(classes: int = 10, width: int = 12) -> nn.Sequential:
    """Return a network for digits ``(n, 1, 8, 8)``."""
    return nn.Sequential(
        conv_block(1, width),
        nn.MaxPool2d(2),
        conv_block(width, 2 * width),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )


class Wired(nn.Module):
    """A module of named parts, wired by a function of the module and its inputs."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._wiring = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        """Return what the function makes of the inputs."""
        return self._wiring(self, *inputs)
