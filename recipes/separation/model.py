"""Conv-TasNet: waves to frames, a mask for each source by a temporal convolutional network,
frames to waves.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

_KERNEL = 3  # of the convolutions over time
_EPSILON = 1e-8


class Block(nn.Module):
    """A convolution over time, by channel and dilated, between two over channels.

    Added to what came in.

    Args:
        channels: Of input and output.
        hidden: Between the two.
        dilation: Frames from one tap to the next.
    """

    def __init__(self, channels: int, hidden: int, dilation: int) -> None:
        super().__init__()
        reach = dilation * (_KERNEL - 1) // 2
        self.layers = nn.Sequential(
            nn.Conv1d(channels, hidden, 1),
            nn.PReLU(),
            # The paper's global layer norm: over one sample, all channels
            nn.GroupNorm(1, hidden, eps=_EPSILON),
            nn.Conv1d(hidden, hidden, _KERNEL, dilation=dilation, padding=reach, groups=hidden),
            nn.PReLU(),
            nn.GroupNorm(1, hidden, eps=_EPSILON),
            nn.Conv1d(hidden, channels, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return frames of the shape that came in, ``(batch, channels, frames)``."""
        return x + self.layers(x)


class ConvTasNet(nn.Module):
    """Separates a mixture; no layer mixes samples of a batch.

    The names of the sizes are those of the paper.

    Args:
        filters: N, of encoder and decoder.
        length: L, samples of a filter; even.
        bottleneck: B, channels between blocks.
        hidden: H, channels inside a block.
        blocks: X, in a repeat; each with twice the dilation of the one before.
        repeats: R.
        sources: C.
    """

    def __init__(
        self,
        *,
        filters: int,
        length: int,
        bottleneck: int,
        hidden: int,
        blocks: int,
        repeats: int,
        sources: int = 2,
    ) -> None:
        super().__init__()
        self.stride, self.sources = length // 2, sources
        self.encoder = nn.Conv1d(1, filters, length, stride=self.stride, bias=False)
        self.norm = nn.GroupNorm(1, filters, eps=_EPSILON)
        self.narrow = nn.Conv1d(filters, bottleneck, 1)
        dilations = [2**number for _ in range(repeats) for number in range(blocks)]
        self.blocks = nn.ModuleList(Block(bottleneck, hidden, dilation) for dilation in dilations)
        self.masks = nn.Sequential(nn.PReLU(), nn.Conv1d(bottleneck, sources * filters, 1))
        self.decoder = nn.ConvTranspose1d(filters, 1, length, stride=self.stride, bias=False)

    def forward(self, mixture: torch.Tensor) -> torch.Tensor:
        """Return the sources, shape ``(batch, sources, samples)``, of mixtures ``(batch,
        samples)``.
        """
        samples = mixture.shape[1]
        rest = -samples % self.stride
        padded = functional.pad(mixture, (self.stride, self.stride + rest))
        frames = functional.relu(self.encoder(padded[:, None]))
        x = self.narrow(self.norm(frames))
        for block in self.blocks:
            x = block(x)
        masks = functional.relu(self.masks(x)).unflatten(1, (self.sources, -1))
        waves = self.decoder((masks * frames[:, None]).flatten(0, 1)).unflatten(
            0, (-1, self.sources)
        )
        found: torch.Tensor = waves[:, :, 0, self.stride : self.stride + samples]
        return found
