"""Will training a Conv-TasNet of the paper's size fit, and how.

A forecast, without a GPU and without data.

    holdfast plan recipes/separation/forecast.py:build --device T4 --global-batch-size 32

Does not: train, see ``train``.
"""

from __future__ import annotations

from typing import Any

import torch

from recipes.separation.model import ConvTasNet
from recipes.separation.si_snr import separation_loss

# Luo and Mesgarani, arXiv 1809.07454: the best non-causal system, on segments of 4 s at 8 kHz.
SAMPLES = 32000


def build(micro_batch_size: int = 2, length: int = SAMPLES) -> dict[str, Any]:
    """Return model, optimizer, loss function and a sample batch.

    Args:
        micro_batch_size: Mixtures in the sample batch.
        length: Samples of each.
    """
    model = ConvTasNet(filters=512, length=16, bottleneck=128, hidden=512, blocks=8, repeats=3)
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=1e-3),
        "loss_fn": lambda batch: separation_loss(model, batch, threshold=-30.0),
        "batch": (torch.randn(micro_batch_size, length), torch.randn(micro_batch_size, 2, length)),
    }
