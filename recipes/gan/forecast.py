"""Will the two players fit, and how: a forecast of one step of each, without a GPU.

    holdfast plan recipes/gan/forecast.py:build --device T4

Does not: train, or read data; images have the size of DCGAN's faces, 64 x 64.
"""

from __future__ import annotations

from typing import Any

import torch

from recipes.gan.players import Players, play

_LATENT = 100  # DCGAN's


def build(micro_batch_size: int = 16, size: int = 64, width: int = 64) -> dict[str, Any]:
    """Return models, optimizers, a step and a sample batch.

    Args:
        micro_batch_size: Images in the sample batch.
        size: Pixels a side.
        width: Channels at full size.
    """
    players = Players(size=size, device=torch.device("cpu"), latent=_LATENT, width=width)
    batch = (
        torch.zeros(micro_batch_size, 1, size, size),
        *torch.randn(2, micro_batch_size, _LATENT),
    )

    def step(guard: Any, batch: Any) -> None:
        play(guard, players, batch)

    return {"model": players.models, "optimizer": players.optimizers, "step": step, "batch": batch}
