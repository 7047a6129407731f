"""The networks of our own that the forecast is measured on.

Small, but built as their large relatives are.
"""

# ruff: noqa: D102 - the class says what its forward takes

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody spells it
from torch.utils.checkpoint import checkpoint

MELS = 80


class Perceptron(nn.Module):
    """Residual-free layers of ``Linear, LayerNorm, GELU, Dropout``; takes ``(batch, inputs)``."""

    def __init__(
        self, inputs: int, width: int, depth: int, outputs: int, dropout: float = 0.1
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number in range(depth):
            layers += [
                nn.Linear(width if number else inputs, width),
                nn.LayerNorm(width),
                nn.GELU(),
            ]
            layers += [nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(width, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut, as in ResNet-18.

    Takes ``(batch, channels, height, width)``.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first_norm(self.first(x)), inplace=True)
        hidden = self.second_norm(self.second(hidden))
        hidden += self.shortcut(x)
        return F.relu(hidden, inplace=True)


class ResNet(nn.Module):
    """Eight residual blocks of growing width, as ResNet-18 has.

    Takes ``(batch, 3, height, width)``.
    """

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        blocks, channels = [], width
        for number, outputs in enumerate(
            (width, width, 2 * width, 2 * width, 4 * width, 4 * width)
        ):
            blocks.append(ResidualBlock(channels, outputs, 2 if number in (2, 4) else 1))
            channels = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(self.stem(x))
        found: torch.Tensor = self.head(hidden.mean(dim=(2, 3)))
        return found


class DoubleConvolution(nn.Sequential):
    """Two convolutions, each normalised."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Down and up again with concatenated skips.

    Takes ``(batch, 1, height, width)``, sides divisible by 8.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        inputs = [1, *widths]
        self.down = nn.ModuleList(
            DoubleConvolution(a, b) for a, b in zip(inputs[:-1], widths, strict=True)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * a, a, 2, stride=2) for a in reversed(widths[:-1])
        )
        self.merge = nn.ModuleList(DoubleConvolution(2 * a, a) for a in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for number, down in enumerate(self.down):
            x = down(x if number == 0 else F.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), skips.pop()], dim=1))
        found: torch.Tensor = self.head(x)
        return found


class Encoder(nn.Module):
    """torch's own encoder layers and a classifier of their mean.

    Takes ``(batch, length, width)``.
    """

    def __init__(self, width: int = 256, depth: int = 4, *, recomputed: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)
        self.recomputed = recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.recomputed:
            x = self.encoder(x)
        else:
            for layer in self.encoder.layers:
                x = checkpoint(layer, x, use_reentrant=False)
        found: torch.Tensor = self.head(x.mean(dim=1))
        return found


class Adapted(nn.Module):
    """A frozen linear layer beside a trainable product of two narrow ones (LoRA)."""

    def __init__(self, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.frozen = nn.Linear(inputs, outputs).requires_grad_(requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / rank)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.frozen(x) + F.linear(F.linear(x, self.down), self.up)
        return found


class AttentionBlock(nn.Module):
    """Attention and a perceptron, each normalised before and added after.

    Takes ``(batch, length, width)``.
    """

    def __init__(
        self, width: int, heads: int, linear: type[nn.Module] = nn.Linear, *, causal: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.widen, self.narrow = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(
            batch, length, 3, self.heads, width // self.heads
        )
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        found: torch.Tensor = x + self.narrow(F.gelu(self.widen(self.perceptron_norm(x))))
        return found


class AdaptedLanguageModel(nn.Module):
    """A causal language model of which only adapters learn.

    Takes token ids, ``(batch, length)``.
    """

    def __init__(self, vocabulary: int = 2000, width: int = 256, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width).requires_grad_(requires_grad=False)
        self.blocks = nn.ModuleList(
            AttentionBlock(width, 4, Adapted, causal=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary, bias=False).requires_grad_(requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for block in self.blocks:
            hidden = block(hidden)
        found: torch.Tensor = self.head(hidden)
        return found


class VisionTransformer(nn.Module):
    """Patches, a class token, learnt positions, attention blocks.

    Takes ``(batch, 3, side, side)``.
    """

    def __init__(self, side: int = 64, patch: int = 8, width: int = 192, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (side // patch) ** 2, width))
        self.blocks = nn.ModuleList(AttentionBlock(width, 3) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.token.expand(len(images), -1, -1), hidden], dim=1) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        found: torch.Tensor = self.head(self.norm(hidden[:, 0]))
        return found


class RecurrentClassifier(nn.Module):
    """Embedded tokens, two recurrent layers both ways, a classifier.

    Takes token ids, ``(batch, length)``.
    """

    def __init__(
        self, kind: type[nn.LSTM | nn.GRU], vocabulary: int = 4000, width: int = 128
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.recurrent = kind(width, width, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.embed(ids))
        found: torch.Tensor = self.head(hidden.mean(dim=1))
        return found


class Generator(nn.Sequential):
    """Noise to images by transposed convolutions, as DCGAN; takes ``(batch, noise, 1, 1)``."""

    def __init__(self, noise: int = 64, width: int = 32) -> None:
        super().__init__(
            nn.ConvTranspose2d(noise, 4 * width, 4, bias=False),
            nn.BatchNorm2d(4 * width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )


class Discriminator(nn.Sequential):
    """Images to logits by strided convolutions, ``(batch, 3, 32, 32)``.

    A gradient penalty goes without BatchNorm.
    """

    def __init__(self, width: int = 32, *, normalised: bool = True) -> None:
        layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2)]
        for factor in (1, 2):
            layers.append(nn.Conv2d(factor * width, 2 * factor * width, 4, 2, 1))
            layers += [nn.BatchNorm2d(2 * factor * width)] if normalised else []
            layers.append(nn.LeakyReLU(0.2))
        super().__init__(*layers, nn.Conv2d(4 * width, 1, 4), nn.Flatten(0))


class VariationalAutoencoder(nn.Module):
    """Perceptrons around a sampled code; takes ``(batch, inputs)``."""

    def __init__(self, inputs: int = 784, width: int = 512, code: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.mean, self.log_variance = nn.Linear(width, code), nn.Linear(width, code)
        self.decoder = nn.Sequential(
            nn.Linear(code, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, inputs),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.encoder(x)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decoder(code), mean, log_variance


def convolutions(channels: list[int], activation: type[nn.Module]) -> nn.Sequential:
    """Return normalised convolutions of width 5 with dropout, one for each step between the
    numbers of channels.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(channels):
        layers += [
            nn.Conv1d(inputs, outputs, 5, padding=2),
            nn.BatchNorm1d(outputs),
            activation(),
            nn.Dropout(0.5),
        ]
    return nn.Sequential(*layers)


class LocationAttention(nn.Module):
    """Where the decoder reads, given what it has read (Chorowski et al., 2015)."""

    def __init__(self, queries: int, memory: int, width: int = 64, filters: int = 16) -> None:
        super().__init__()
        self.query = nn.Linear(queries, width, bias=False)
        self.memory = nn.Linear(memory, width, bias=False)
        self.location = nn.Conv1d(2, filters, 31, padding=15, bias=False)
        self.located = nn.Linear(filters, width, bias=False)
        self.energy = nn.Linear(width, 1, bias=False)

    def forward(
        self, query: torch.Tensor, memory: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        located = self.located(self.location(weights).transpose(1, 2))
        energies = self.energy(torch.tanh(self.query(query).unsqueeze(1) + keys + located)).squeeze(
            -1
        )
        found = torch.softmax(energies, dim=1)
        return torch.bmm(found.unsqueeze(1), memory).squeeze(1), found


class Tacotron(nn.Module):
    """Convolutions and a BiLSTM over text, an attentive decoder of two LSTM cells, a post-net.

    Takes token ids ``(batch, characters)`` and the true frames ``(batch, frames, 80)``.
    """

    def __init__(self, characters: int = 64, width: int = 128, cell: int = 256) -> None:
        super().__init__()
        self.cell = cell
        self.embed = nn.Embedding(characters, width)
        self.convolutions = convolutions([width] * 4, nn.ReLU)
        self.recurrent = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.prenet = nn.Sequential(
            nn.Linear(MELS, width),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(0.5),
        )
        self.attention_cell = nn.LSTMCell(2 * width, cell)
        self.attention = LocationAttention(cell, width)
        self.decoder_cell = nn.LSTMCell(cell + width, cell)
        self.frame, self.stop = nn.Linear(cell + width, MELS), nn.Linear(cell + width, 1)
        self.postnet = convolutions([MELS, width, width, MELS], nn.Tanh)

    def forward(
        self, text: torch.Tensor, frames: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        memory, _ = self.recurrent(
            self.convolutions(self.embed(text).transpose(1, 2)).transpose(1, 2)
        )
        made, stops = self._decode(memory, frames)
        return made, made + self.postnet(made.transpose(1, 2)).transpose(1, 2), stops

    def _decode(
        self, memory: torch.Tensor, frames: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length, width = memory.shape
        keys = self.attention.memory(memory)
        inputs = self.prenet(F.pad(frames[:, :-1], (0, 0, 1, 0)))
        query = query_cell = hidden = hidden_cell = memory.new_zeros(batch, self.cell)
        read, weights, total = (
            memory.new_zeros(batch, width),
            *memory.new_zeros(2, batch, length).unbind(0),
        )
        made, stops = [], []
        for step in range(frames.shape[1]):
            query, query_cell = self.attention_cell(
                torch.cat([inputs[:, step], read], -1), (query, query_cell)
            )
            query = F.dropout(query, 0.1, self.training)
            read, weights = self.attention(query, memory, keys, torch.stack([weights, total], 1))
            total = total + weights
            hidden, hidden_cell = self.decoder_cell(
                torch.cat([query, read], -1), (hidden, hidden_cell)
            )
            hidden = F.dropout(hidden, 0.1, self.training)
            both = torch.cat([hidden, read], -1)
            made.append(self.frame(both))
            stops.append(self.stop(both))
        return torch.stack(made, 1), torch.cat(stops, 1)
