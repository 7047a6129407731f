"""Small data sets for the programs of the corpus, all drawn from a seed or bundled with scikit-learn or Python.

No model and no loop lives here: each program writes its own, as users do.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Iterator

import torch
from torch import Tensor


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1,400 training and 397 validation digits: pixels in [0, 1] of shape (n, 64), labels of shape (n,)."""
    x, y = _digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, rest = order[:1400], order[1400:]
    return x[train], y[train], x[rest], y[rest]


@functools.cache
def diabetes() -> tuple[Tensor, Tensor]:
    """Return 442 patients: 10 standardised inputs each, and the unscaled target of shape (442, 1), 25 to 346."""
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
    x = torch.tensor(bunch.data, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0), torch.tensor(bunch.target, dtype=torch.float32)[:, None]


@functools.cache
def text() -> tuple[Tensor, int]:
    """Return some 60,000 characters of Python's standard library as ids, and how many different ones there are."""
    source = inspect.getsource(textwrap) + inspect.getsource(functools) + inspect.getsource(inspect)[:20_000]
    characters = sorted(set(source))
    place = {character: number for number, character in enumerate(characters)}
    return torch.tensor([place[character] for character in source]), len(characters)


def windows(ids: Tensor, length: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return random inputs and the ids that follow them, both of shape (batch_size, length)."""
    starts = torch.randint(0, len(ids) - length - 1, (batch_size, 1)) + torch.arange(length)
    return ids[starts], ids[starts + 1]


def blobs(seed: int, samples: int = 2000, features: int = 20, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Return points around random centres that overlap somewhat, with the number of their centre."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=generator)
    y = torch.randint(0, classes, (samples,), generator=generator)
    return centres[y] + torch.randn(samples, features, generator=generator), y


def spirals(seed: int, samples: int = 1500) -> tuple[Tensor, Tensor]:
    """Return points of two interleaved spirals, shape (samples, 2), and which spiral they belong to."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(samples, generator=generator).sqrt() * 9
    y = torch.randint(0, 2, (samples,), generator=generator)
    turned = angle + y * torch.pi
    x = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 4
    return x + 0.05 * torch.randn(samples, 2, generator=generator), y


def curve(seed: int, samples: int = 1000, features: int = 8) -> tuple[Tensor, Tensor]:
    """Return standard normal inputs and a smooth nonlinear target of shape (samples, 1) with variance about 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, features, generator=generator)
    mixing = torch.randn(features, 1, generator=generator) / features**0.5
    noise = 0.1 * torch.randn(samples, 1, generator=generator)
    return x, torch.sin(2 * x @ mixing) + 0.5 * (x[:, :1] * x[:, 1:2]) + noise


def batches(x: Tensor, y: Tensor, batch_size: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield shuffled batches, epoch after epoch, until there were `steps` of them."""
    given = 0
    while True:
        for rows in torch.randperm(len(x)).split(batch_size):
            if given == steps:
                return
            if len(rows) == batch_size:
                given += 1
                yield x[rows], y[rows]
