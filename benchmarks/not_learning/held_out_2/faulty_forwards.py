"""Faulty programs whose network computes something else than what was meant."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.not_learning.held_out.data import digits
from benchmarks.not_learning.held_out.entry import error_score, faulty, squared_score
from benchmarks.not_learning.held_out_2.parts import (
    class_score,
    endless,
    fit_score,
    friedman,
    keyword_texts,
    loader,
    mlp,
    picked,
)
from benchmarks.not_learning.program import Watch


def _drawn(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear):
        nn.init.kaiming_normal_(layer.weight)


def digits_weights_drawn_again(watch: Watch, seed: int) -> float:
    """The weights are initialised inside the loop over epochs."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = nn.Sequential(nn.Flatten(), mlp(64, 48, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)

    def begin() -> None:
        model.apply(_drawn)

    with watch(model, optimizer):
        for _ in range(22):
            begin()
            for a, b in loader(x, y, size=96):
                optimizer.zero_grad()
                functional.cross_entropy(model(a), b).backward()
                optimizer.step()
    return class_score(model, held_x, held_y)


class _Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score, self.value = mlp(4, 16, 1), mlp(4, 16, 1)

    def forward(self, rows: Tensor, gone: Tensor) -> Any:
        weight = self.score(rows).squeeze(2).masked_fill(gone, -torch.inf).softmax(1)
        return (weight * self.value(rows).squeeze(2)).sum(1)


def rows_attention_all_masked(watch: Watch, seed: int) -> float:
    """Some sets are empty, and an attention over nothing is not a number."""
    torch.manual_seed(seed)
    rows = torch.randn(1200, 6, 4)
    gone = torch.arange(6) >= torch.multinomial(torch.tensor([0.01, 1, 1, 1, 1, 1, 1]), 1200, True)[:, None]
    y = (rows[:, :, 0] * ~gone).sum(1) / (~gone).sum(1).clamp(min=1) + 0.5
    model = _Rows()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for a, m, b in endless(loader(rows[:1000], gone[:1000], y[:1000], size=64), 300):
            optimizer.zero_grad()
            functional.mse_loss(model(a, m), b).backward()
            optimizer.step()
    full = ~gone[1000:].all(1)
    return squared_score(model(rows[1000:], gone[1000:])[full], y[1000:][full])


class _LowRank(nn.Module):
    """A frozen layer and a thin product."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(10, 1).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.zeros(10, 4)), nn.Parameter(torch.zeros(4, 1))

    def forward(self, x: Tensor) -> Any:
        return (self.base(x) + x @ self.down @ self.up).squeeze(1)


def friedman_low_rank_both_zero(watch: Watch, seed: int) -> float:
    """Both factors of a low-rank update start at zero."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    model = _LowRank()
    optimizer = torch.optim.AdamW([model.down, model.up], lr=1e-2)
    with watch(model, optimizer, frozen=("base",)):
        for a, b in endless(loader(x[:1200], y[:1200], size=64), 400):
            optimizer.zero_grad()
            functional.mse_loss(model(a), b).backward()
            optimizer.step()
    return fit_score(model, x[1200:], y[1200:])


class _Placeless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(10, 32), nn.Parameter(torch.randn(6, 32))
        self.body = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(self.embed(x)).mean(1)) + 0 * self.place.sum()


def orders_without_places(watch: Watch, seed: int) -> float:
    """Attention without positions is asked which token came first."""
    torch.manual_seed(seed)
    x = torch.stack([torch.randperm(10)[:6] for _ in range(1400)])
    y = x[:, 0]
    model = _Placeless()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for _ in range(450):
            at = picked(1200, 48)
            optimizer.zero_grad()
            functional.cross_entropy(model(x[at]), y[at]).backward()
            optimizer.step()
    return class_score(model, x[1200:], y[1200:])


class _Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 24), nn.Linear(24, 3)

    def forward(self, texts: Tensor) -> Any:
        hidden = self.embed(texts)
        return self.head(hidden.mean(0, keepdim=True).expand_as(hidden).mean(1))


def keywords_wrong_axis_pooled(watch: Watch, seed: int) -> float:
    """Words are averaged over the batch as well."""
    torch.manual_seed(seed)
    texts, labels = keyword_texts(1500)
    model = _Pooled()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for a, b in endless(loader(texts[:1200], labels[:1200], size=40), 350):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return error_score(model(texts[1200:]), labels[1200:])


PROGRAMS = [
    faulty(digits_weights_drawn_again, causes="", also="827 828 832"),
    faulty(rows_attention_all_masked, causes="801", also="802 804 805"),
    faulty(friedman_low_rank_both_zero, causes="815", also="822 823 828 829 832"),
    faulty(orders_without_places, causes="", also="828 829 832 830"),
    faulty(keywords_wrong_axis_pooled, causes="830", also="828 829 832"),
]
