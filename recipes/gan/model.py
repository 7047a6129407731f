"""The two networks: blocks that double the size of an image, and blocks that halve it.

As in DCGAN (arXiv 1511.06434) a strided convolution changes the size; a second one follows in each
block. With a ``norm`` of "group" no sample touches another, so that a batch may be split exactly;
"batch" is DCGAN's own.

Does not: know losses or optimizers (see ``players``).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Literal

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

Norm = Literal["group", "batch"]
SMALLEST = 2  # pixels a side where the generator begins and the discriminator ends
_MOST_WIDENING = 8
_DCGAN_STD = 0.02  # of convolutions that a BatchNorm follows, which undoes any scale


def _norm(kind: Norm, channels: int) -> nn.Module:
    return (
        nn.BatchNorm2d(channels)
        if kind == "batch"
        else nn.GroupNorm(math.gcd(8, channels), channels)
    )


def _widths(size: int, width: int) -> list[int]:
    """Return the channels at each size, from the whole image down to the smallest."""
    doublings = (size // SMALLEST).bit_length() - 1
    return [width * min(2**level, _MOST_WIDENING) for level in range(doublings + 1)]


class Up(nn.Module):
    """Double the size."""

    def __init__(self, inward: int, outward: int, norm: Norm) -> None:
        super().__init__()
        self.grow = nn.ConvTranspose2d(inward, outward, 4, stride=2, padding=1)
        self.grown = _norm(norm, outward)
        self.shape = nn.Conv2d(outward, outward, 3, padding=1)
        self.shaped = _norm(norm, outward)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of twice the size, shape ``(batch, outward, 2 h, 2 w)``."""
        x = torch.relu(self.grown(self.grow(x)))
        return torch.relu(self.shaped(self.shape(x)))


class Down(nn.Module):
    """Halve the size."""

    def __init__(self, inward: int, outward: int, *, spectral: bool) -> None:
        super().__init__()
        self.look = nn.Conv2d(inward, inward, 3, padding=1)
        self.shrink = nn.Conv2d(inward, outward, 4, stride=2, padding=1)
        if spectral:
            self.look, self.shrink = spectral_norm(self.look), spectral_norm(self.shrink)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features of half the size, shape ``(batch, outward, h / 2, w / 2)``."""
        x = nn.functional.leaky_relu(self.look(x), 0.2)
        return nn.functional.leaky_relu(self.shrink(x), 0.2)


class Generator(nn.Module):
    """From noise, shape ``(batch, latent)``, to images from -1 to 1, shape ``(batch, 1, size,
    size)``.

    Args:
        latent: Numbers that an image is made from.
        size: Pixels a side, a power of two.
        width: Channels at full size.
        norm: What follows each convolution.
    """

    def __init__(self, *, latent: int, size: int, width: int, norm: Norm = "group") -> None:
        super().__init__()
        widths = _widths(size, width)[::-1]
        self.project = nn.Linear(latent, widths[0] * SMALLEST**2)
        self.blocks = nn.Sequential(*(Up(a, b, norm) for a, b in pairwise(widths)))
        self.draw = nn.Conv2d(widths[-1], 1, 3, padding=1)
        if norm == "batch":
            for part in self.modules():
                if isinstance(part, (nn.Conv2d, nn.ConvTranspose2d)):
                    nn.init.normal_(part.weight, std=_DCGAN_STD)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """Return images."""
        x = self.project(noise).unflatten(1, (-1, SMALLEST, SMALLEST))
        return torch.tanh(self.draw(self.blocks(x)))


class Discriminator(nn.Module):
    """From images, shape ``(batch, 1, size, size)``, to a logit that each is real, shape
    ``(batch,)``.

    Args:
        size: Pixels a side, a power of two.
        width: Channels at full size.
        spectral: Whether every weight is divided by its largest singular value (arXiv 1802.05957).
    """

    def __init__(self, *, size: int, width: int, spectral: bool = False) -> None:
        super().__init__()
        widths = _widths(size, width)
        wrap = spectral_norm if spectral else nn.Identity()
        self.enter = wrap(nn.Conv2d(1, widths[0], 3, padding=1))
        self.blocks = nn.Sequential(*(Down(a, b, spectral=spectral) for a, b in pairwise(widths)))
        self.judge = wrap(nn.Linear(widths[-1] * SMALLEST**2, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = nn.functional.leaky_relu(self.enter(images), 0.2)
        return self.judge(self.blocks(x).flatten(1)).squeeze(1)
