"""Networks of our own that make images: the two of DCGAN, and a variational autoencoder."""

from __future__ import annotations

import torch
from torch import nn


class Generator(nn.Sequential):
    """Noise to images by transposed convolutions, as DCGAN; takes ``(batch, noise, 1, 1)``."""

    def __init__(self, noise: int = 64, width: int = 32) -> None:
        super().__init__(
            nn.ConvTranspose2d(noise, 4 * width, 4, bias=False), nn.BatchNorm2d(4 * width), nn.ReLU(inplace=True),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False), nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh(),
        )  # fmt: skip


class Discriminator(nn.Sequential):
    """Images to logits by strided convolutions; takes ``(batch, 3, 32, 32)``.

    Args:
        width: Channels of the first layer.
        normalised: With BatchNorm, as DCGAN; a gradient penalty goes without.
    """

    def __init__(self, width: int = 32, *, normalised: bool = True) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for factor in (1, 2):
            layers.append(nn.Conv2d(factor * width, 2 * factor * width, 4, 2, 1))
            layers += [nn.BatchNorm2d(2 * factor * width)] if normalised else []
            layers.append(nn.LeakyReLU(0.2))
        super().__init__(*layers, nn.Conv2d(4 * width, 1, 4), nn.Flatten(0))


class VariationalAutoencoder(nn.Module):
    """Perceptrons around a sampled code; takes ``(batch, inputs)``."""

    def __init__(self, inputs: int = 784, width: int = 512, code: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.mean, self.log_variance = nn.Linear(width, code), nn.Linear(width, code)
        self.decoder = nn.Sequential(
            nn.Linear(code, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, inputs)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return logits, means and logarithms of variances."""
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(code), mean, log_variance
