"""What several programs of this folder share: small networks, loaders, made-up data, and scores; no program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.not_learning.held_out.data import Four, Pair, table
from benchmarks.not_learning.held_out.entry import error_score, squared_score


def mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers of these sizes with an activation between each two."""
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [nn.Linear(wide, narrow), act()]
    return nn.Sequential(*layers[:-1])


def conv_block(channels: int, out: int) -> nn.Sequential:
    """Return convolution, batch norm and a rectifier."""
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


def small_cnn(classes: int = 10, width: int = 12) -> nn.Sequential:
    """Return a network for digits ``(n, 1, 8, 8)``."""
    return nn.Sequential(
        conv_block(1, width),
        nn.MaxPool2d(2),
        conv_block(width, 2 * width),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )


def loader(*tensors: Tensor, size: int = 32, shuffle: bool = True, drop_last: bool = False) -> DataLoader[Any]:
    """Return a loader over tensors of one length."""
    return DataLoader(TensorDataset(*tensors), batch_size=size, shuffle=shuffle, drop_last=drop_last)


def endless(batches: DataLoader[Any], steps: int) -> Iterator[Any]:
    """Yield `steps` batches, starting over as often as needed."""
    done = 0
    while done < steps:
        for batch in batches:
            yield batch
            done += 1
            if done == steps:
                return


def picked(count: int, size: int) -> Tensor:
    """Return `size` random row numbers out of `count`."""
    return torch.randint(count, (size,))


@torch.no_grad()
def class_score(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the error of a classifier in evaluation mode, relative to the majority class."""
    model.eval()
    return error_score(model(x).float(), y)


@torch.no_grad()
def fit_score(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the squared error of a regression in evaluation mode, relative to the mean."""
    model.eval()
    return squared_score(model(x).float().reshape(y.shape), y)


def friedman(count: int, noise: float = 0.3) -> Pair:
    """Return ten uniform features ``(count, 10)`` and Friedman's first function of five of them, standardised."""
    x = torch.rand(count, 10)
    y = 10 * (torch.pi * x[:, 0] * x[:, 1]).sin() + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return 2 * x - 1, (y - 14.4) / 4.9 + noise * torch.randn(count)


def diabetes(seed: int) -> Four:
    """Return the diabetes table with standardised targets."""
    x, y, held_x, held_y = table("diabetes", seed)
    return x, (y - y.mean()) / y.std(), held_x, (held_y - y.mean()) / y.std()


def keyword_texts(count: int, length: int = 16, words: int = 40) -> Pair:
    """Return sentences ``(count, length)`` padded by 0, and which of three keywords (1, 2, 3) occurs in each."""
    labels = torch.randint(3, (count,))
    texts = torch.randint(4, words, (count, length))
    lengths = torch.randint(5, length + 1, (count,))
    texts[torch.arange(count), (torch.rand(count) * lengths).long()] = labels + 1
    texts[torch.arange(length) >= lengths[:, None]] = 0
    return texts, labels


def rings(count: int) -> Pair:
    """Return points ``(count, 2)`` on three noisy circles and the number of each one's circle."""
    labels = torch.randint(3, (count,))
    angle = 2 * torch.pi * torch.rand(count)
    radius = 0.6 * (labels + 1) + 0.08 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), labels
