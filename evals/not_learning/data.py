"""Small data sets, drawn from a seed or bundled with scikit-learn or Python, and ways to batch
them.
"""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

Pair = tuple[Tensor, Tensor]


class Split(NamedTuple):
    """A data set with a half to train on and one that is held out."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor


def batches(data: tuple[Tensor, ...], size: int, steps: int) -> Iterator[Pair]:
    """Yield whole shuffled batches of inputs and targets, epoch after epoch, until there were
    `steps` of them.
    """
    (x, y), given = data[:2], 0
    while True:
        for rows in torch.randperm(len(x)).split(size):
            if given == steps:
                return
            if len(rows) == size:
                given += 1
                yield x[rows], y[rows]


def draws(data: Tensor | tuple[Tensor, ...], size: int, steps: int) -> Iterator[Any]:
    """Yield batches of rows that are drawn at random.

    Of a data set that is split, from its first half.
    """
    for _ in range(steps):
        yield _rows(data, torch.randint(len(_first(data)), (size,)))


def epochs(data: Tensor | tuple[Tensor, ...], size: int, count: int) -> Iterator[Any]:
    """Yield shuffled batches of some epochs, the last one of each as small as it is."""
    for _ in range(count):
        for rows in torch.randperm(len(_first(data))).split(size):
            yield _rows(data, rows)


def _first(data: Tensor | tuple[Tensor, ...]) -> Tensor:
    return data if isinstance(data, Tensor) else data[0]


def _rows(data: Tensor | tuple[Tensor, ...], rows: Tensor) -> Any:
    return data[rows] if isinstance(data, Tensor) else tuple(each[rows] for each in _training(data))


def _training(data: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return data[:2] if isinstance(data, Split) else data


def loader(
    *tensors: Tensor, size: int = 32, shuffle: bool = True, drop_last: bool = False
) -> DataLoader[Any]:
    """Return a loader over tensors of one length."""
    return DataLoader(
        TensorDataset(*tensors), batch_size=size, shuffle=shuffle, drop_last=drop_last
    )


def endless(batches: Iterable[Any], steps: int) -> Iterator[Any]:
    """Yield `steps` batches, starting over as often as needed."""
    done = 0
    while done < steps:
        for batch in batches:
            yield batch
            done += 1
            if done == steps:
                return


def stream(data: tuple[Tensor, ...], size: int, steps: int, **options: bool) -> Iterator[Any]:
    """Yield `steps` batches of a loader over tensors."""
    return endless(loader(*_training(data), size=size, **options), steps)


@functools.cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return torch.tensor(bunch.data, dtype=torch.float32) / 16, torch.tensor(bunch.target)


def digits(seed: int) -> Split:
    """Return 1,400 training and 397 validation digits.

    Pixels in [0, 1] of shape (n, 64), labels of shape (n,).
    """
    x, y = _digits()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, rest = order[:1400], order[1400:]
    return Split(x[train], y[train], x[rest], y[rest])


@functools.cache
def diabetes() -> tuple[Tensor, Tensor]:
    """Return 442 patients.

    10 standardised inputs each, and the unscaled target of shape (442, 1), 25 to 346.
    """
    from sklearn.datasets import load_diabetes

    bunch = load_diabetes(scaled=False)
    x = torch.tensor(bunch.data, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0), torch.tensor(bunch.target, dtype=torch.float32)[:, None]


@functools.cache
def text() -> tuple[Tensor, int]:
    """Return some 60,000 characters of Python's standard library as ids, and how many different
    ones there are.
    """
    source = (
        inspect.getsource(textwrap)
        + inspect.getsource(functools)
        + inspect.getsource(inspect)[:20_000]
    )
    characters = sorted(set(source))
    place = {character: number for number, character in enumerate(characters)}
    return torch.tensor([place[character] for character in source]), len(characters)


def windows(ids: Tensor, length: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return random inputs and the ids that follow them, both of shape (batch_size, length)."""
    starts = torch.randint(0, len(ids) - length - 1, (batch_size, 1)) + torch.arange(length)
    return ids[starts], ids[starts + 1]


def blobs(
    seed: int, samples: int = 2000, features: int = 20, classes: int = 5
) -> tuple[Tensor, Tensor]:
    """Return points around random centres that overlap somewhat, with the number of their
    centre.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=generator)
    y = torch.randint(0, classes, (samples,), generator=generator)
    return centres[y] + torch.randn(samples, features, generator=generator), y


def spirals(seed: int, samples: int = 1500) -> tuple[Tensor, Tensor]:
    """Return points of two interleaved spirals, shape (samples, 2), and which spiral they belong
    to.
    """
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(samples, generator=generator).sqrt() * 9
    y = torch.randint(0, 2, (samples,), generator=generator)
    turned = angle + y * torch.pi
    x = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 4
    return x + 0.05 * torch.randn(samples, 2, generator=generator), y


def curve(seed: int, samples: int = 1000, features: int = 8) -> tuple[Tensor, Tensor]:
    """Return standard normal inputs and a smooth nonlinear target of shape (samples, 1) with
    variance about 1.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, features, generator=generator)
    mixing = torch.randn(features, 1, generator=generator) / features**0.5
    noise = 0.1 * torch.randn(samples, 1, generator=generator)
    return x, torch.sin(2 * x @ mixing) + 0.5 * (x[:, :1] * x[:, 1:2]) + noise


@functools.cache
def _bundle(name: str) -> tuple[np.ndarray, np.ndarray]:
    from sklearn import datasets

    return getattr(datasets, f"load_{name}")(return_X_y=True)


def table(name: str, seed: int, *, raw: bool = False) -> Split:
    """Return a shuffled (train x, train y, test x, test y) of a bundled table, 75 to 25.

    Standardised unless raw.
    """
    features, targets = _bundle(name)
    order = np.random.default_rng(seed).permutation(len(features))
    x = torch.tensor(features[order], dtype=torch.float32)
    y = torch.tensor(targets[order])
    y = y.float() if y.is_floating_point() else y.long()
    cut = len(x) * 3 // 4
    if not raw:
        x = (x - x[:cut].mean(0)) / (x[:cut].std(0) + 1e-6)
    return Split(x[:cut], y[:cut], x[cut:], y[cut:])


def digit_images(seed: int) -> Split:
    """Return digits as images ``(n, 1, 8, 8)`` in [0, 1] with their labels, split 75 to 25."""
    x, y, held_x, held_y = table("digits", seed, raw=True)
    return Split(x.reshape(-1, 1, 8, 8) / 16, y, held_x.reshape(-1, 1, 8, 8) / 16, held_y)


@functools.cache
def library_text() -> tuple[Tensor, int]:
    """Return a module of the standard library as character ids ``(n,)``, and the size of the
    alphabet.
    """
    text = inspect.getsource(textwrap)
    alphabet = {char: index for index, char in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[char] for char in text]), len(alphabet)


def text_windows(text: Tensor, count: int, length: int) -> Pair:
    """Return `count` random windows of a text and the same one character later, both ``(count,
    length)``.
    """
    starts = torch.randint(len(text) - length - 1, (count,))
    at = starts[:, None] + torch.arange(length)
    return text[at], text[at + 1]


def discs(count: int, side: int = 16) -> Pair:
    """Return noisy images ``(count, 1, side, side)`` with one bright disc each, and the masks of
    the discs.
    """
    grid = torch.arange(side, dtype=torch.float32)
    centre = torch.rand(count, 2, 1, 1) * (side - 6) + 3
    radius = torch.rand(count, 1, 1) * 2 + 2
    distance = ((grid[:, None] - centre[:, 0]) ** 2 + (grid[None, :] - centre[:, 1]) ** 2).sqrt()
    mask = (distance < radius).float()[:, None]
    return mask + 0.5 * torch.randn(count, 1, side, side), mask


def moons(count: int, noise: float = 0.08) -> Pair:
    """Return two interleaved half circles: points ``(count, 2)`` and their labels ``(count,)``."""
    labels = torch.randint(2, (count,))
    angle = torch.rand(count) * torch.pi
    sign = 1 - 2 * labels
    points = torch.stack(
        [sign * angle.cos() + labels - 0.5, sign * angle.sin() + 0.5 * labels - 0.25], 1
    )
    return points + noise * torch.randn(count, 2), labels


def seasons(count: int, length: int) -> Tensor:
    """Return series ``(count, length)``: a wave of random phase and a slower one, with noise."""
    time = torch.arange(length) + 50 * torch.rand(count, 1)
    return (0.5 * time).sin() + 0.5 * (0.13 * time).sin() + 0.1 * torch.randn(count, length)


def ratings(seed: int, users: int = 120, films: int = 80, count: int = 6000) -> tuple[Tensor, ...]:
    """Return (user ids, film ids, ratings), each ``(count,)``, of a noisy product of three
    hidden tastes.
    """
    generator = torch.Generator().manual_seed(seed)
    taste = torch.randn(users, 3, generator=generator)
    film = torch.randn(films, 3, generator=generator)
    user_id = torch.randint(users, (count,), generator=generator)
    film_id = torch.randint(films, (count,), generator=generator)
    score = (taste[user_id] * film[film_id]).sum(1) + 3.5
    return user_id, film_id, score + 0.3 * torch.randn(count, generator=generator)


def community(seed: int, nodes: int = 180, groups: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """Return a graph of communities.

    Normalised adjacency ``(n, n)``, weak features ``(n, 16)``, labels ``(n,)``.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(nodes) % groups
    same = labels[:, None] == labels[None]
    edges = torch.rand(nodes, nodes, generator=generator) < torch.where(same, 0.12, 0.02)
    adjacency = ((edges | edges.T).float() + torch.eye(nodes)).clamp(max=1)
    degree = adjacency.sum(1).rsqrt()
    centre = torch.randn(groups, 16, generator=generator)
    features = 0.5 * centre[labels] + torch.randn(nodes, 16, generator=generator)
    return degree[:, None] * adjacency * degree[None], features, labels


def picked(count: int, size: int) -> Tensor:
    """Return `size` random row numbers out of `count`."""
    return torch.randint(count, (size,))


def friedman(count: int, noise: float = 0.3) -> Pair:
    """Return ten uniform features ``(count, 10)`` and Friedman's first function of five of them,
    standardised.
    """
    x = torch.rand(count, 10)
    y = (
        10 * (torch.pi * x[:, 0] * x[:, 1]).sin()
        + 20 * (x[:, 2] - 0.5) ** 2
        + 10 * x[:, 3]
        + 5 * x[:, 4]
    )
    return 2 * x - 1, (y - 14.4) / 4.9 + noise * torch.randn(count)


def scaled_diabetes(seed: int) -> Split:
    """Return the diabetes table with standardised targets."""
    x, y, held_x, held_y = table("diabetes", seed)
    return Split(x, (y - y.mean()) / y.std(), held_x, (held_y - y.mean()) / y.std())


def keyword_texts(count: int, length: int = 16, words: int = 40) -> Pair:
    """Return sentences ``(count, length)`` padded by 0, and which of three keywords (1, 2, 3)
    occurs in each.
    """
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
