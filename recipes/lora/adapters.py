"""Low-rank adapters (LoRA, arXiv 2106.09685).

A product of two thin matrices is learnt beside a frozen layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name


class Adapted(nn.Module):
    """A linear layer that stays as it is, and what is learnt beside it.

    ``scale * B @ A``, which begins as 0.

    Args:
        inner: The layer.
        rank: Of the product.
        scale: Of the product.
        dropout: Probability, of what goes into the product.
    """

    def __init__(self, inner: nn.Linear, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        self.inner, self.scale, self.dropout = inner, scale, dropout
        like = {"device": inner.weight.device, "dtype": inner.weight.dtype}
        self.a = nn.Parameter(torch.empty(rank, inner.in_features, **like))
        self.b = nn.Parameter(torch.zeros(inner.out_features, rank, **like))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the layer and the product give, added."""
        thin = F.linear(F.dropout(x, self.dropout, self.training), self.a)
        return self.inner(x) + self.scale * F.linear(thin, self.b)


def adapt(
    model: nn.Module, names: Sequence[str], *, rank: int, alpha: float, dropout: float
) -> list[str]:
    """Freeze a model, and put adapters around the linear layers of some names.

    Args:
        model: Changed in place.
        names: Last parts of names, such as ``q_proj``.
        rank: Of each adapter.
        alpha: Scale of each, times its rank.
        dropout: Probability.

    Returns:
        The whole names of the layers.
    """
    model.requires_grad_(requires_grad=False)
    found = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in names
    ]
    for name in found:
        parent, _, last = name.rpartition(".")
        inner = model.get_submodule(name)
        assert isinstance(inner, nn.Linear)
        setattr(model.get_submodule(parent), last, Adapted(inner, rank, alpha / rank, dropout))
    return found


def adapter_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of the adapters alone, by name."""
    return {
        name: value.detach().cpu()
        for name, value in model.named_parameters()
        if value.requires_grad
    }


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Add each product to the weights of its layer, and leave the plain model."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Adapted):
            module.inner.weight += module.scale * module.b @ module.a
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, module.inner)
    model.requires_grad_(requires_grad=True)
