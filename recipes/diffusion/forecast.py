"""Will this UNet fit, and how: ``holdfast plan recipes/diffusion/forecast.py:build --device T4``.

Does not: train, nor count the average of the weights, which is as large as the weights.
"""

from __future__ import annotations

from typing import Any

import torch

from recipes.diffusion.model import LEVELS, UNet
from recipes.diffusion.train import noise_loss


def build(micro_batch_size: int = 64, size: int = 32, width: int = 128) -> dict[str, Any]:
    """Return model, optimizer, loss function and a sample batch.

    Wider than the recipe, of larger images.

    Args:
        micro_batch_size: Images in the sample batch.
        size: Height and width of an image, pixels.
        width: Channels of the largest scale; a multiple of 8.
    """
    model = UNet(width)
    images = torch.randn(micro_batch_size, 1, size, size)
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=2e-3),
        "loss_fn": lambda batch: noise_loss(model, batch),
        "batch": (images, torch.randn_like(images), torch.randint(LEVELS, (micro_batch_size,))),
    }
