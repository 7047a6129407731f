"""Will this classifier fit, and how.

``holdfast plan recipes/classifier/forecast.py:build --device T4``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - its usual name

from recipes.classifier.model import Classifier


def build(
    micro_batch_size: int = 32, pixels: int = 28, width: int = 24, depth: int = 2
) -> dict[str, Any]:
    """Return model, optimizer, loss function and a sample batch.

    Args:
        micro_batch_size: Images in the sample batch.
        pixels: Height and width of an image; 28 is MNIST's.
        width: Channels.
        depth: Convolutions after the first.
    """
    model = Classifier(
        10, width=width, depth=depth, activation="relu", init_scale=1.0, detached=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def loss_fn(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    images = torch.randn(micro_batch_size, 1, pixels, pixels)
    batch = images, torch.randint(0, 10, (micro_batch_size,))
    return {"model": model, "optimizer": optimizer, "loss_fn": loss_fn, "batch": batch}
