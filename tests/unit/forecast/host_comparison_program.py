"""Peaks of two whole training steps on the real CPU, by its allocator's events, and on the fake one, as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.unit.memory.allocations import FakeAllocations, real_allocations

from holdfast.forecast.fake.device import forecast_device

Job = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.skip = nn.Conv2d(channels, out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.skip(x))


def residual_net() -> Job:
    layers = [nn.Conv2d(3, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.ReLU(), Residual(32, 32), Residual(32, 64, 2)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    return model, lambda m: functional.cross_entropy(m(torch.randn(8, 3, 32, 32)), torch.randint(10, (8,)))


def generator() -> Job:
    model = nn.Sequential(
        nn.ConvTranspose2d(50, 128, 4, 1, 0, bias=False),
        nn.BatchNorm2d(128),
        nn.ReLU(),
        nn.ConvTranspose2d(128, 64, 4, 2, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
        nn.Conv2d(3, 64, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(64, 1, 8, 1, 0, bias=False),
    )
    return model, lambda m: functional.binary_cross_entropy_with_logits(
        m(torch.randn(16, 50, 1, 1)).flatten(), torch.ones(16)
    )


class Speech(nn.Module):
    """An encoder of convolutions and a bidirectional LSTM, and a decoder of cells that attends by location."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 128)
        self.convolution = nn.Sequential(
            nn.Conv1d(128, 128, 5, padding=2), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.5)
        )
        self.encoder = nn.LSTM(128, 64, batch_first=True, bidirectional=True)
        self.cell = nn.LSTMCell(128 + 80, 128)
        self.location = nn.Conv1d(2, 16, 31, padding=15, bias=False)
        self.score = nn.Linear(16, 1)
        self.out = nn.Linear(128, 80)

    def forward(self, text: torch.Tensor, frames: torch.Tensor) -> torch.Tensor:
        x = self.convolution(self.embedding(text).transpose(1, 2))
        memory, _ = self.encoder(x.transpose(1, 2))
        batch, length = text.shape
        hidden = cell = context = memory.new_zeros(batch, 128)
        weights = total = memory.new_zeros(batch, length)
        frame = memory.new_zeros(batch, 80)
        outputs = []
        for step in range(frames.shape[1]):
            hidden, cell = self.cell(torch.cat([frame, context], 1), (hidden, cell))
            places = self.location(torch.stack([weights, total], 1)).transpose(1, 2)
            weights = functional.softmax(self.score(torch.tanh(places)).squeeze(-1), -1)
            total = total + weights
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            outputs.append(self.out(hidden))
            frame = frames[:, step]
        return torch.stack(outputs, 1)


def speech() -> Job:
    def loss(model: nn.Module) -> torch.Tensor:
        frames = torch.randn(8, 20, 80)
        return functional.l1_loss(model(torch.randint(40, (8, 40)), frames), frames)

    return Speech(), loss


def lstm() -> Job:
    layers = nn.LSTM(64, 96, 2, bidirectional=True, dropout=0.1)
    return layers, lambda m: m(torch.randn(50, 8, 64))[0].square().mean()


def separable() -> Job:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 4, 4),
        nn.Conv2d(32, 32, 7, padding=3, groups=32),
        nn.GroupNorm(4, 32),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(32, 8, 3, padding=1),
    )
    return model, lambda m: m(torch.randn(4, 3, 64, 64)).square().mean()


def transformer() -> Job:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2), lambda m: m(torch.randn(8, 128, 64)).square().mean()


JOBS = (residual_net, generator, speech, lstm, separable, transformer)


def train(job: Callable[[], Job]) -> Any:
    model, loss_of = job()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
    return model, optimizer, loss


def main() -> None:
    torch.set_num_threads(1)
    peaks: dict[str, tuple[int, int]] = {}
    for job in JOBS:
        real, _ = real_allocations(lambda job=job: train(job))
        with forecast_device("cpu", as_cuda=False), FakeAllocations("cpu") as watch:
            train(job)
        peaks[job.__name__] = (real, watch.peak)
    print(json.dumps(peaks), flush=True)  # noqa: T201
    os._exit(0)  # as the forecast's own child ends: threads of a device that is none do not hold it up


if __name__ == "__main__":
    main()
