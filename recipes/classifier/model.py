"""A plain convolutional network for small grey images."""

from __future__ import annotations

import torch
from torch import nn

_ACTIVATIONS = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid}


class Block(nn.Module):
    """A convolution and its activation, shape ``(batch, channels, height, width)``."""

    def __init__(self, channels: int, activation: str) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, padding=1)
        self.activation = _ACTIVATIONS[activation]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the features of the next layer."""
        out: torch.Tensor = self.activation(self.convolution(x))
        return out


class Classifier(nn.Module):
    """A convolution, some blocks, a pooling to 4 x 4, and a linear layer.

    Args:
        classes: Number of classes.
        width: Channels.
        depth: Blocks.
        activation: ``"relu"``, or ``"sigmoid"``, in which gradients vanish with depth.
        init_scale: Standard deviation of the first weights, relative to He's.
        detached: Whether the first layer is cut off from the gradient.
    """

    def __init__(
        self,
        classes: int,
        *,
        width: int,
        depth: int,
        activation: str,
        init_scale: float,
        detached: bool,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(width, activation) for _ in range(depth)))
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.head = nn.Linear(16 * width, classes)
        self._detached = detached
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
                with torch.no_grad():
                    module.weight.mul_(init_scale)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes, shape ``(batch, classes)``."""
        features = torch.relu(self.stem(images))
        if self._detached:
            features = features.detach()
        scores: torch.Tensor = self.head(self.pool(self.blocks(features)).flatten(1))
        return scores
