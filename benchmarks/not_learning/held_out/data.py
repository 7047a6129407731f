"""The data of the held-out programs: scikit-learn's bundled tables, the library's own text, and made-up ones."""

from __future__ import annotations

import functools
import inspect
import textwrap

import numpy as np
import torch
from sklearn import datasets

Pair = tuple[torch.Tensor, torch.Tensor]
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@functools.cache
def _bundle(name: str) -> tuple[np.ndarray, np.ndarray]:
    return getattr(datasets, f"load_{name}")(return_X_y=True)


def table(name: str, seed: int, *, raw: bool = False) -> Four:
    """Return a shuffled (train x, train y, test x, test y) of a bundled table, 75 to 25; standardised unless raw."""
    features, targets = _bundle(name)
    order = np.random.default_rng(seed).permutation(len(features))
    x = torch.tensor(features[order], dtype=torch.float32)
    y = torch.tensor(targets[order])
    y = y.float() if y.is_floating_point() else y.long()
    cut = len(x) * 3 // 4
    if not raw:
        x = (x - x[:cut].mean(0)) / (x[:cut].std(0) + 1e-6)
    return x[:cut], y[:cut], x[cut:], y[cut:]


def digits(seed: int) -> Four:
    """Return digits as images ``(n, 1, 8, 8)`` in [0, 1] with their labels, split 75 to 25."""
    x, y, held_x, held_y = table("digits", seed, raw=True)
    return x.reshape(-1, 1, 8, 8) / 16, y, held_x.reshape(-1, 1, 8, 8) / 16, held_y


@functools.cache
def library_text() -> tuple[torch.Tensor, int]:
    """Return a module of the standard library as character ids ``(n,)``, and the size of the alphabet."""
    text = inspect.getsource(textwrap)
    alphabet = {char: index for index, char in enumerate(sorted(set(text)))}
    return torch.tensor([alphabet[char] for char in text]), len(alphabet)


def windows(text: torch.Tensor, count: int, length: int) -> Pair:
    """Return `count` random windows of a text and the same one character later, both ``(count, length)``."""
    starts = torch.randint(len(text) - length - 1, (count,))
    at = starts[:, None] + torch.arange(length)
    return text[at], text[at + 1]


def blobs(count: int, side: int = 16) -> Pair:
    """Return noisy images ``(count, 1, side, side)`` with one bright disc each, and the masks of the discs."""
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
    points = torch.stack([sign * angle.cos() + labels - 0.5, sign * angle.sin() + 0.5 * labels - 0.25], 1)
    return points + noise * torch.randn(count, 2), labels


def seasons(count: int, length: int) -> torch.Tensor:
    """Return series ``(count, length)``: a wave of random phase and a slower one, with noise."""
    time = torch.arange(length) + 50 * torch.rand(count, 1)
    return (0.5 * time).sin() + 0.5 * (0.13 * time).sin() + 0.1 * torch.randn(count, length)


def ratings(seed: int, users: int = 120, films: int = 80, count: int = 6000) -> tuple[torch.Tensor, ...]:
    """Return (user ids, film ids, ratings), each ``(count,)``, of a noisy product of three hidden tastes."""
    generator = torch.Generator().manual_seed(seed)
    taste = torch.randn(users, 3, generator=generator)
    film = torch.randn(films, 3, generator=generator)
    user_id = torch.randint(users, (count,), generator=generator)
    film_id = torch.randint(films, (count,), generator=generator)
    score = (taste[user_id] * film[film_id]).sum(1) + 3.5
    return user_id, film_id, score + 0.3 * torch.randn(count, generator=generator)


def community(seed: int, nodes: int = 180, groups: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a graph of communities: normalised adjacency ``(n, n)``, weak features ``(n, 16)``, labels ``(n,)``."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(nodes) % groups
    same = labels[:, None] == labels[None]
    edges = torch.rand(nodes, nodes, generator=generator) < torch.where(same, 0.12, 0.02)
    adjacency = ((edges | edges.T).float() + torch.eye(nodes)).clamp(max=1)
    degree = adjacency.sum(1).rsqrt()
    centre = torch.randn(groups, 16, generator=generator)
    features = 0.5 * centre[labels] + torch.randn(nodes, 16, generator=generator)
    return degree[:, None] * adjacency * degree[None], features, labels
