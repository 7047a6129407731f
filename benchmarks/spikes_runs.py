"""Small trainings whose losses and gradient norms are rough although they are healthy.

All are cheap, with batches of 1 to 4 samples. `DESIGN` was looked at while the detector's
thresholds were chosen, `HELD_OUT` only afterwards. No GPU, no downloads: text is the standard
library's own source.
"""

from __future__ import annotations

import argparse
import inspect
import json.decoder
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from evals.not_learning.parts import mlp
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody spells it

Batch = tuple[torch.Tensor, torch.Tensor]


def _unchanged(_: int) -> float:
    return 1.0


@dataclass(slots=True, kw_only=True)
class Training:
    """One training from its beginning."""

    model: nn.Module
    # Stepped in this order
    players: dict[str, tuple[torch.optim.Optimizer, Callable[[Any], torch.Tensor]]]
    batch: Callable[[int], Any]  # by its number
    # What a broken pipeline makes of a batch: inputs or targets of a wrong scale
    spoil: Callable[[Any], Any]
    lr_factor: Callable[[int], float] = _unchanged  # by step


def _of(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + number)


def _inputs_times_1000(batch: Batch) -> Batch:
    return batch[0] * 1000, batch[1]


def _single(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any], torch.Tensor],
    batch: Callable[[int], Any],
    spoil: Callable[[Any], Any] = _inputs_times_1000,
    lr_factor: Callable[[int], float] = _unchanged,
) -> Training:
    return Training(
        model=model,
        players={"all": (optimizer, loss)},
        batch=batch,
        spoil=spoil,
        lr_factor=lr_factor,
    )


def _targets_times_1000(batch: Batch) -> Batch:
    return batch[0], batch[1] * 1000


def _other_alphabet(batch: Batch) -> Batch:
    """Shift input and target tokens differently, as a tokenizer of another version does."""
    return (batch[0] + 31) % 96, (batch[1] + 57) % 96


def _text(module: Any) -> torch.Tensor:
    """Return the source of a module as tokens below 96."""
    return torch.tensor([min(max(ord(letter) - 32, 0), 95) for letter in inspect.getsource(module)])


class _CharacterModel(nn.Module):
    def __init__(self, cell: type[nn.GRU | nn.LSTM], hidden: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 24)
        self.cell = cell(24, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 96)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(self.embed(tokens))[0])


def _pieces(text: torch.Tensor, seed: int, size: int, longest: int) -> Callable[[int], Batch]:
    """Return batches of random pieces of a text, the length of a batch being random too."""

    def batch(number: int) -> Batch:
        chance = _of(seed, number)
        length = int(torch.randint(4, longest + 1, (), generator=chance))
        starts = torch.randint(len(text) - length - 1, (size, 1), generator=chance)
        places = starts + torch.arange(length + 1)
        tokens = text[places]
        return tokens[:, :-1], tokens[:, 1:]

    return batch


def _token_loss(model: nn.Module) -> Callable[[Batch], torch.Tensor]:
    return lambda batch: F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def char_gru(seed: int) -> Training:
    """Characters, batches of 2 pieces of 4 to 32; Adam."""
    model = _CharacterModel(nn.GRU)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    batch = _pieces(_text(argparse), seed, 2, 32)
    return _single(model, optimizer, _token_loss(model), batch, _other_alphabet)


class _Transformer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, width)
        self.place = nn.Parameter(torch.randn(64, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, 96)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = torch.triu(torch.full((length, length), -math.inf), 1)
        hidden = self.embed(tokens) + self.place[:length]
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        return self.head(hidden)


def transformer(seed: int) -> Training:
    """Characters, batches of 4 pieces of 4 to 24; AdamW with 300 steps of warm-up."""
    model = _Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    batch = _pieces(_text(inspect), seed, 4, 24)
    warm = lambda step: min(1.0, (step + 1) / 300)  # noqa: E731
    return _single(model, optimizer, _token_loss(model), batch, _other_alphabet, warm)


class _Adder(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.cell = nn.RNN(2, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(rows)[0][:, -1])[:, 0]


def adding_rnn(seed: int) -> Training:
    """The adding problem, 12 steps, a plain RNN, batches of 4.

    SGD with momentum: gradients explode now and then.
    """
    model = _Adder()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def batch(number: int) -> Batch:
        chance = _of(seed, number)
        rows = torch.zeros(4, 12, 2)
        rows[..., 0] = torch.rand(4, 12, generator=chance)
        marks = torch.rand(4, 12, generator=chance).topk(2).indices
        rows[..., 1].scatter_(1, marks, 1.0)
        return rows, (rows[..., 0] * rows[..., 1]).sum(1)

    return _single(
        model, optimizer, lambda b: F.mse_loss(model(b[0]), b[1]), batch, _targets_times_1000
    )


def _blobs(
    seed: int, size: int, classes: int, wrong: float, width: int = 20
) -> Callable[[int], Batch]:
    """Return batches of points around class centres; a share of the labels is wrong."""
    centres = torch.randn(classes, width, generator=_of(seed, -1)) * 1.5

    def batch(number: int) -> Batch:
        chance = _of(seed, number)
        labels = torch.randint(classes, (size,), generator=chance)
        points = centres[labels] + torch.randn(size, width, generator=chance)
        noise = torch.rand(size, generator=chance) < wrong
        return points, torch.where(noise, torch.randint(classes, (size,), generator=chance), labels)

    return batch


def _mlp(inputs: int, outputs: int, hidden: int = 48) -> nn.Sequential:
    return mlp(inputs, hidden, hidden, outputs)


def _class_loss(model: nn.Module) -> Callable[[Batch], torch.Tensor]:
    return lambda batch: F.cross_entropy(model(batch[0]), batch[1])


def label_noise(seed: int) -> Training:
    """Ten classes, 3 % wrong labels, batches of 2: the loss is near 0 and now and then 8."""
    model = _mlp(20, 10)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    return _single(model, optimizer, _class_loss(model), _blobs(seed, 2, 10, 0.03))


def _heavy_targets(seed: int, freedom: int) -> Callable[[int], Batch]:
    """Return batches of 4 with a nonlinear signal and Student-t noise of few degrees of freedom."""

    def batch(number: int) -> Batch:
        chance = _of(seed, number)
        points = torch.randn(4, 8, generator=chance)
        squares = torch.randn(freedom, 4, generator=chance).square().mean(0)
        noise = torch.randn(4, generator=chance) / squares.sqrt()
        return points, 3 * points[:, 0].sin() + 2 * points[:, 1] * points[:, 2] + 0.5 * noise

    return batch


def heavy_regression(seed: int) -> Training:
    """Regression with Cauchy noise in the targets and a Huber loss; Adam."""
    model = _mlp(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loss = lambda b: F.smooth_l1_loss(model(b[0])[:, 0], b[1])  # noqa: E731
    return _single(model, optimizer, loss, _heavy_targets(seed, 1), _inputs_times_1000)


def likelihood(seed: int) -> Training:
    """A Gaussian log-likelihood, which falls below zero; AdamW."""
    model = _mlp(8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def batch(number: int) -> Batch:
        points = torch.randn(4, 8, generator=_of(seed, number))
        noise = torch.randn(4, generator=_of(seed + 1, number)) * 0.05
        return points, points[:, 0].sin() + noise

    def loss(b: Batch) -> torch.Tensor:
        mean, spread = model(b[0]).unbind(1)
        return F.gaussian_nll_loss(mean, b[1], spread.exp() + 1e-3)

    return _single(model, optimizer, loss, batch, _targets_times_1000)


# --- held out


def char_lstm(seed: int) -> Training:
    """Characters of another text, one piece of 4 to 48 at a time.

    SGD with momentum and no clipping.
    """
    model = _CharacterModel(nn.LSTM, 32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    batch = _pieces(_text(torch.optim.lr_scheduler), seed, 1, 48)
    return _single(model, optimizer, _token_loss(model), batch, _other_alphabet)


def curriculum(seed: int) -> Training:
    """Two easy classes with clean labels for 1,500 steps, then ten with noisy ones.

    Batches of 4; Adam.
    """
    model = _mlp(20, 10)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    easy, hard = _blobs(seed, 4, 10, 0.0), _blobs(seed, 4, 10, 0.1)

    def batch(number: int) -> Batch:
        points, labels = (easy if number % 1_000_000 < 1500 else hard)(number)
        if number % 1_000_000 >= 1500:
            return points, labels
        chosen = labels % 2
        return points + (chosen * 2 - 1)[:, None] * 1.0, labels

    return _single(model, optimizer, _class_loss(model), batch)


def small_images(seed: int) -> Training:
    """A convolutional net with BatchNorm on noisy patterns, batches of 4; SGD with momentum."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(72, 6),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=1e-4)
    patterns = torch.randn(6, 1, 10, 10, generator=_of(seed, -1))

    def batch(number: int) -> Batch:
        chance = _of(seed, number)
        labels = torch.randint(6, (4,), generator=chance)
        return patterns[labels] + 1.5 * torch.randn(4, 1, 10, 10, generator=chance), labels

    return _single(model, optimizer, _class_loss(model), batch)


def triplets(seed: int) -> Training:
    """A triplet loss that is exactly zero on most batches later; batches of 2; Adam."""
    model = _mlp(20, 8)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    centres = torch.randn(12, 20, generator=_of(seed, -1))

    def batch(number: int) -> Batch:
        chance = _of(seed, number)
        chosen = torch.rand(2, 12, generator=chance).topk(2).indices
        which = torch.stack([chosen[:, 0], chosen[:, 0], chosen[:, 1]])
        return centres[which] + 0.8 * torch.randn(3, 2, 20, generator=chance), which

    def loss(b: Batch) -> torch.Tensor:
        return F.triplet_margin_loss(*model(b[0]).unbind(0), margin=1.0)

    return _single(model, optimizer, loss, batch)


def skip_grams(seed: int) -> Training:
    """Embeddings of characters from their neighbours, Zipf-like frequencies, batches of 4; Adam."""
    model = nn.Sequential(nn.Embedding(96, 24), nn.Linear(24, 96))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    text = _text(json.decoder)

    def batch(number: int) -> Batch:
        places = torch.randint(2, len(text) - 2, (4,), generator=_of(seed, number))
        return text[places], text[places + 1]

    return _single(model, optimizer, _class_loss(model), batch, _other_alphabet)


def variational(seed: int) -> Training:
    """A variational autoencoder whose KL weight grows over 1,000 steps, batches of 4; Adam."""
    encoder, decoder = _mlp(20, 8), _mlp(4, 20)
    model = nn.ModuleList([encoder, decoder])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    points = _blobs(seed, 4, 6, 0.0)

    def batch(number: int) -> tuple[torch.Tensor, float, torch.Tensor]:
        weight = min(1.0, number % 1_000_000 / 1000)
        return points(number)[0], weight, torch.randn(4, 4, generator=_of(seed + 7, number))

    def loss(b: tuple[torch.Tensor, float, torch.Tensor]) -> torch.Tensor:
        mean, spread = encoder(b[0]).chunk(2, 1)
        rebuilt = decoder(mean + (0.5 * spread).exp() * b[2])
        divergence = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1).mean()
        return F.mse_loss(rebuilt, b[0]) + 0.02 * b[1] * divergence

    return _single(model, optimizer, loss, batch, lambda b: (b[0] * 1000, b[1], b[2]))


def heavy_squares(seed: int) -> Training:
    """Regression with Student-t noise (3 degrees of freedom) and a squared loss.

    SGD with a cosine schedule.
    """
    model = _mlp(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.003, momentum=0.9)
    loss = lambda b: F.mse_loss(model(b[0])[:, 0], b[1])  # noqa: E731
    schedule = lambda step: 0.55 + 0.45 * math.cos(math.pi * min(step, 5000) / 5000)  # noqa: E731
    return _single(model, optimizer, loss, _heavy_targets(seed, 3), _targets_times_1000, schedule)


def gan(seed: int) -> Training:
    """A generator against a discriminator on points around 8 centres.

    Neither loss means anything by its level.
    """
    generator, discriminator = _mlp(4, 2), _mlp(2, 1)
    model = nn.ModuleList([generator, discriminator])
    angles = torch.arange(8) * math.pi / 4
    centres = torch.stack([angles.cos(), angles.sin()], 1) * 2

    def batch(number: int) -> Batch:
        chance = _of(seed, number)
        real = centres[torch.randint(8, (4,), generator=chance)] + 0.1 * torch.randn(
            4, 2, generator=chance
        )
        return real, torch.randn(4, 4, generator=chance)

    def of_discriminator(b: Batch) -> torch.Tensor:
        return (
            F.softplus(-discriminator(b[0])).mean()
            + F.softplus(discriminator(generator(b[1]).detach())).mean()
        )

    def of_generator(b: Batch) -> torch.Tensor:
        return F.softplus(-discriminator(generator(b[1]))).mean()

    players = {
        "discriminator": (
            torch.optim.Adam(discriminator.parameters(), 2e-3, (0.5, 0.9)),
            of_discriminator,
        ),
        "generator": (torch.optim.Adam(generator.parameters(), 1e-3, (0.5, 0.9)), of_generator),
    }
    return Training(model=model, players=players, batch=batch, spoil=_inputs_times_1000)


DESIGN = (char_gru, transformer, adding_rnn, label_noise, heavy_regression, likelihood)
HELD_OUT = (char_lstm, curriculum, small_images, triplets, skip_grams, variational, heavy_squares)


# --- faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One way to spoil a run: its learning rate, weights, moments or batches."""

    name: str
    strike: Callable[[Training, int], None] = lambda _training, _since: (
        None
    )  # before each step from the planted one on
    spoils_batches: int = 0  # from the planted step on, as a broken pipeline does
    lr_factor: Callable[[int], float] = _unchanged  # by the steps since the planted one


def _scale_a_matrix(training: Training, since: int) -> None:
    if since == 0:
        matrices = [p for p in training.model.parameters() if p.ndim >= 2]
        with torch.no_grad():
            matrices[len(matrices) // 2].mul_(100.0)


def _break_moments(training: Training, since: int) -> None:
    """Zero Adam's second moment, or multiply the momentum of SGD by 1,000."""
    for optimizer, _ in training.players.values() if since == 0 else ():
        for state in optimizer.state.values():
            if "exp_avg_sq" in state:
                state["exp_avg_sq"].zero_()
            else:
                state["momentum_buffer"].mul_(1000.0)


FAULTS = (
    Fault(name="lr x 30 from then on", lr_factor=lambda _: 30.0),
    Fault(name="lr x 1000 for one step", lr_factor=lambda since: 1000.0 if since == 0 else 1.0),
    Fault(name="lr x 100 for five steps", lr_factor=lambda since: 100.0 if since < 5 else 1.0),
    Fault(name="one weight matrix x 100", strike=_scale_a_matrix),
    Fault(name="broken moments", strike=_break_moments),
    Fault(name="20 broken batches", spoils_batches=20),
    Fault(name="lr growing by 2 % a step", lr_factor=lambda since: 1.02**since),
)
