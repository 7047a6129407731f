"""Will this GPT fit, and how: ``holdfast plan recipes/gpt/forecast.py:build --device T4``."""

from __future__ import annotations

from typing import Any

import torch

from recipes.gpt.model import GPT, next_token_loss


def build(
    micro_batch_size: int = 16, context: int = 1024, width: int = 768, depth: int = 12
) -> dict[str, Any]:
    """Return model, optimizer, loss function and a sample batch.

    By default of the sizes of GPT-2's smallest.

    Args:
        micro_batch_size: Windows in the sample batch.
        context: Tokens of a window.
        width: Of all layers.
        depth: Blocks.
    """
    model = GPT(50304, context=context, width=width, heads=width // 64, depth=depth, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
    tokens = torch.randint(0, 50304, (micro_batch_size, context))
    return {
        "model": model,
        "optimizer": optimizer,
        "loss_fn": lambda batch: next_token_loss(model(batch[0]), batch[1]),
        "batch": (tokens, tokens),
    }
