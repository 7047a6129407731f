"""Training jobs whose peak on a GPU somebody has published, as factories for a forecast."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class VisionTransformer(nn.Module):
    """ViT-L/16 for images of 224 by 224 (Dosovitskiy et al. 2021), 304 million parameters, as torchvision has it."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 1024, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, 1024))
        self.positions = nn.Parameter(torch.zeros(1, 197, 1024))
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 24, nn.LayerNorm(1024), enable_nested_tensor=False)
        self.head = nn.Linear(1024, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, shape ``(samples, 1000)``."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], 1)
        logits: torch.Tensor = self.head(self.encoder(tokens + self.positions)[:, 0])
        return logits


def _job(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    def loss_fn(images: torch.Tensor) -> torch.Tensor:
        return model(images).sum()

    return {"model": model, "optimizer": optimizer, "loss_fn": loss_fn, "batch": torch.zeros(1, 3, 224, 224)}


def vit_large() -> dict[str, Any]:
    """Adam after backward."""
    model = VisionTransformer()
    return _job(model, torch.optim.Adam(model.parameters()))


def vit_large_in_backward() -> dict[str, Any]:
    """Adam for each parameter as soon as its gradient is there."""
    model = VisionTransformer()
    optimizers = {parameter: torch.optim.Adam([parameter], foreach=False) for parameter in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return _job(model, {name: optimizers[parameter] for name, parameter in model.named_parameters()})
