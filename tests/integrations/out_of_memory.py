"""A layer that runs out of memory.

An allocation that no machine has, refused by the real allocator.
"""

from __future__ import annotations

from typing import Any

import torch


class FailsAbove(torch.autograd.Function):
    """Passes its input on.

    In backward it asks for more memory than there is, for batches above a size.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, limit: int) -> torch.Tensor:
        ctx.fails = len(x) > limit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fails:
            torch.empty(2**50, dtype=torch.uint8)
        return gradient, None
