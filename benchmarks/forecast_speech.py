"""A network as Tacotron 2 is: text to mel spectrograms, with a decoder that makes one frame after another."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody spells it

MELS = 80


def convolutions(channels: list[int], activation: type[nn.Module]) -> nn.Sequential:
    """Return normalised convolutions of width 5 with dropout, one for each step between the numbers of channels."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(channels):
        layers += [nn.Conv1d(inputs, outputs, 5, padding=2), nn.BatchNorm1d(outputs), activation(), nn.Dropout(0.5)]
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
        """Return what is read, ``(batch, memory)``, and the weights, ``(batch, length)``.

        Args:
            query: Shape ``(batch, queries)``.
            memory: Shape ``(batch, length, memory)``.
            keys: `self.memory` of it.
            weights: The last and the summed weights, shape ``(batch, 2, length)``.
        """
        located = self.located(self.location(weights).transpose(1, 2))
        energies = self.energy(torch.tanh(self.query(query).unsqueeze(1) + keys + located)).squeeze(-1)
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
            nn.Linear(MELS, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.5)
        )
        self.attention_cell = nn.LSTMCell(2 * width, cell)
        self.attention = LocationAttention(cell, width)
        self.decoder_cell = nn.LSTMCell(cell + width, cell)
        self.frame, self.stop = nn.Linear(cell + width, MELS), nn.Linear(cell + width, 1)
        self.postnet = convolutions([MELS, width, width, MELS], nn.Tanh)

    def forward(self, text: torch.Tensor, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return frames before and after the post-net, ``(batch, frames, 80)``, and stop logits."""
        memory, _ = self.recurrent(self.convolutions(self.embed(text).transpose(1, 2)).transpose(1, 2))
        made, stops = self._decode(memory, frames)
        return made, made + self.postnet(made.transpose(1, 2)).transpose(1, 2), stops

    def _decode(self, memory: torch.Tensor, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length, width = memory.shape
        keys = self.attention.memory(memory)
        inputs = self.prenet(F.pad(frames[:, :-1], (0, 0, 1, 0)))
        query = query_cell = hidden = hidden_cell = memory.new_zeros(batch, self.cell)
        read, weights, total = memory.new_zeros(batch, width), *memory.new_zeros(2, batch, length).unbind(0)
        made, stops = [], []
        for step in range(frames.shape[1]):
            query, query_cell = self.attention_cell(torch.cat([inputs[:, step], read], -1), (query, query_cell))
            query = F.dropout(query, 0.1, self.training)
            read, weights = self.attention(query, memory, keys, torch.stack([weights, total], 1))
            total = total + weights
            hidden, hidden_cell = self.decoder_cell(torch.cat([query, read], -1), (hidden, hidden_cell))
            hidden = F.dropout(hidden, 0.1, self.training)
            both = torch.cat([hidden, read], -1)
            made.append(self.frame(both))
            stops.append(self.stop(both))
        return torch.stack(made, 1), torch.cat(stops, 1)
