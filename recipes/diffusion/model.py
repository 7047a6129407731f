"""A small UNet that tells the noise in an image, and the schedule of that noise (DDPM, arXiv
2006.11239).
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name

LEVELS = 100  # of noise; a thousand in the paper, for larger images


class Residual(nn.Module):
    """Two convolutions that know the level of noise, added to what comes in.

    GroupNorm mixes no samples.
    """

    def __init__(self, given: int, channels: int, level: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = (
            nn.GroupNorm(math.gcd(8, given), given),
            nn.GroupNorm(8, channels),
        )
        self.first, self.second = (
            nn.Conv2d(given, channels, 3, padding=1),
            nn.Conv2d(channels, channels, 3, padding=1),
        )
        self.level = nn.Linear(level, channels)
        self.short = nn.Conv2d(given, channels, 1) if given != channels else nn.Identity()
        nn.init.zeros_(self.second.weight)

    def forward(self, x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        """Return features, shape ``(batch, channels, height, width)``."""
        out = self.first(F.silu(self.first_norm(x))) + self.level(level)[:, :, None, None]
        return self.short(x) + self.second(F.silu(self.second_norm(out)))


class UNet(nn.Module):
    """Three scales: down, in the middle, up, each with what was there on the way down.

    Args:
        width: Channels of the largest scale; a multiple of 8.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        level = 4 * width
        self.level = nn.Sequential(nn.Linear(width, level), nn.SiLU(), nn.Linear(level, level))
        sizes = (width, 2 * width, 2 * width)
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.ModuleList(
            Residual(given, size, level)
            for given, size in zip((width, *sizes), sizes, strict=False)
        )
        self.middle = Residual(sizes[-1], sizes[-1], level)
        given = (sizes[2] + sizes[2], sizes[2] + sizes[1], sizes[1] + sizes[0])
        self.up = nn.ModuleList(
            Residual(there, size, level) for there, size in zip(given, reversed(sizes), strict=True)
        )
        self.head = nn.Conv2d(width, 1, 3, padding=1)
        self._width = width

    def forward(self, images: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
        """Return the noise in images, shape ``(batch, 1, height, width)``, of levels, shape
        ``(batch,)``.
        """
        powers = torch.exp(
            -math.log(10000.0)
            * torch.arange(self._width // 2, device=images.device)
            / self._width
            * 2
        )
        angles = levels[:, None] * powers
        level = self.level(torch.cat([angles.sin(), angles.cos()], dim=1))
        x, seen = self.stem(images), []
        for number, block in enumerate(self.down):
            x = block(x if number == 0 else F.avg_pool2d(x, 2), level)
            seen.append(x)
        x = self.middle(x, level)
        for block in self.up:
            there = seen.pop()
            x = block(torch.cat([F.interpolate(x, size=there.shape[-2:]), there], dim=1), level)
        return self.head(F.silu(x))


def kept(device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the share of an image's power that each level leaves, shape ``(LEVELS,)`` (cosine,
    arXiv 2102.09672).
    """
    place = torch.linspace(0, 1, LEVELS + 1, device=device)[1:]
    return torch.cos((place + 0.008) / 1.008 * math.pi / 2).square().clamp(1e-3, 0.9999)


def noised(images: torch.Tensor, noise: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return images of some levels, shape ``(batch, 1, height, width)``, as their noise."""
    share = kept(images.device)[levels].view(-1, 1, 1, 1)
    return share.sqrt() * images + (1 - share).sqrt() * noise


@torch.no_grad()
def drawn(
    model: nn.Module, count: int, size: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Return new images, shape ``(count, 1, *size)``, mean 0, from noise and level by level
    (DDPM's sampler).
    """
    shares = kept(device)
    x = torch.randn(count, 1, *size, device=device)
    for level in range(LEVELS - 1, -1, -1):
        share, before = shares[level], shares[level - 1] if level else torch.ones((), device=device)
        noise = model(x, torch.full((count,), level, device=device))
        image = ((x - (1 - share).sqrt() * noise) / share.sqrt()).clamp(-3, 3)
        step = share / before
        mean = (before.sqrt() * (1 - step) * image + step.sqrt() * (1 - before) * x) / (1 - share)
        spread = ((1 - before) / (1 - share) * (1 - step)).sqrt()
        x = mean + spread * torch.randn_like(x)
    return x
