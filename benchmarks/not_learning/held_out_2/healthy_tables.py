"""Healthy programs on tables: regressions, counts, ranks, survival, and losses that are not the usual two."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.not_learning.held_out.data import ratings, table
from benchmarks.not_learning.held_out.entry import error_score, healthy, squared_score
from benchmarks.not_learning.held_out_2.parts import (
    class_score,
    diabetes,
    endless,
    fit_score,
    friedman,
    loader,
    mlp,
    picked,
)
from benchmarks.not_learning.program import Watch


def wine_softmax_regression(watch: Watch, seed: int) -> float:
    """A linear classifier with plain gradient descent."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("wine", seed)
    model = nn.Linear(13, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=16), 400):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def cancer_raw_features_batchnorm(watch: Watch, seed: int) -> float:
    """Raw features of very different size; a batch norm in front scales them."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("breast_cancer", seed, raw=True)
    model = nn.Sequential(nn.BatchNorm1d(30), mlp(30, 32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=64, drop_last=True), 400):
            optimizer.zero_grad()
            functional.binary_cross_entropy_with_logits(model(a).squeeze(1), b.float()).backward()
            optimizer.step()
    model.eval()
    scores = model(held_x).squeeze(1)
    return error_score(torch.stack([-scores, scores], 1), held_y)


def diabetes_huber_adamw(watch: Watch, seed: int) -> float:
    """A small noisy regression with a robust loss and cosine decay by epochs."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = diabetes(seed)
    model = mlp(10, 32, 1, act=nn.SiLU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
    with watch(model, optimizer, scheduler=scheduler):
        for _ in range(30):
            for a, b in loader(x, y, size=32):
                optimizer.zero_grad()
                nn.HuberLoss()(model(a), b[:, None]).backward()
                optimizer.step()
            scheduler.step()
    return fit_score(model, held_x, held_y)


def prices_in_logarithms(watch: Watch, seed: int) -> float:
    """Prices over three decades, learnt as their logarithm."""
    torch.manual_seed(seed)
    x = torch.randn(1500, 8)
    price = (12 + 0.8 * x[:, 0] + 0.5 * x[:, 1] * x[:, 2] + 0.3 * torch.randn(1500)).exp()
    target = price.log1p()
    model = mlp(8, 64, 64, 1, act=nn.GELU)
    nn.init.constant_(model[-1].bias, float(target[:1200].mean()))  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for _ in range(500):
            at = picked(1200, 64)
            optimizer.zero_grad()
            functional.mse_loss(model(x[at]).squeeze(1), target[at]).backward()
            optimizer.step()
    return fit_score(model, x[1200:], target[1200:])


def friedman_self_normalising(watch: Watch, seed: int) -> float:
    """A deep network of SELU with alpha dropout and LeCun's initialisation."""
    torch.manual_seed(seed)
    x, y = friedman(1600)
    layers: list[nn.Module] = []
    for wide in (10, 48, 48, 48):
        layers += [nn.Linear(wide, 48), nn.SELU(), nn.AlphaDropout(0.02)]
    model = nn.Sequential(*layers, nn.Linear(48, 1))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
            nn.init.zeros_(layer.bias)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1300], y[:1300], size=64), 600):
            optimizer.zero_grad()
            functional.mse_loss(model(a).squeeze(1), b).backward()
            optimizer.step()
    return fit_score(model, x[1300:], y[1300:])


class _Store(nn.Module):
    """Entity embeddings of two categories beside numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.shop, self.day = nn.Embedding(50, 6), nn.Embedding(7, 3)
        self.drop, self.net = nn.Dropout(0.05), mlp(13, 64, 1)

    def forward(self, shop: Tensor, day: Tensor, x: Tensor) -> Any:
        known = self.drop(torch.cat([self.shop(shop), self.day(day)], 1))
        return self.net(torch.cat([known, x], 1)).squeeze(1)


def sales_with_entity_embeddings(watch: Watch, seed: int) -> float:
    """Sales from categories by embeddings and a few numbers."""
    torch.manual_seed(seed)
    shop, day, x = torch.randint(50, (3000,)), torch.randint(7, (3000,)), torch.randn(3000, 4)
    y = torch.randn(50)[shop] + 0.7 * torch.randn(7)[day] + 0.5 * x[:, 0] + 0.2 * torch.randn(3000)
    model = _Store()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for s, d, a, b in endless(loader(shop[:2400], day[:2400], x[:2400], y[:2400], size=64), 500):
            optimizer.zero_grad(set_to_none=False)
            functional.mse_loss(model(s, d, a), b).backward()
            optimizer.step()
    model.eval()
    return squared_score(model(shop[2400:], day[2400:], x[2400:]), y[2400:])


class _Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.film = nn.Embedding(120, 6, sparse=True), nn.Embedding(80, 6, sparse=True)
        self.bias = nn.Parameter(torch.tensor(3.5))

    def forward(self, user: Tensor, film: Tensor) -> Any:
        return (self.user(user) * self.film(film)).sum(1) + self.bias


def ratings_sparse_adam(watch: Watch, seed: int) -> float:
    """Matrix factorisation with sparse gradients: one optimizer for the tables, one for the bias."""
    torch.manual_seed(seed)
    user, film, rating = ratings(seed)
    model = _Factors()
    sparse = torch.optim.SparseAdam([*model.user.parameters(), *model.film.parameters()], lr=2e-2)
    dense = torch.optim.SGD([model.bias], lr=1e-2)
    with watch(model, {"tables": sparse, "bias": dense}):
        for u, f, r in endless(loader(user[:5000], film[:5000], rating[:5000], size=128), 700):
            sparse.zero_grad()
            dense.zero_grad()
            functional.mse_loss(model(u, f), r).backward()
            sparse.step()
            dense.step()
    return squared_score(model(user[5000:], film[5000:]), rating[5000:])


def quantile_bands(watch: Watch, seed: int) -> float:
    """Three quantiles at once by the pinball loss; noise grows with the input."""
    torch.manual_seed(seed)
    x = 4 * torch.rand(2000, 1) - 2
    truth = (2 * x).sin()
    y = truth + 0.15 * x.abs() * torch.randn(2000, 1)
    levels = torch.tensor([0.1, 0.5, 0.9])
    model = mlp(1, 48, 48, 3, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for _ in range(500):
            at = picked(2000, 128)
            short = y[at] - model(x[at])
            loss = torch.maximum(levels * short, (levels - 1) * short).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return squared_score(model(x)[:, 1:2], truth)


def ordinal_grades(watch: Watch, seed: int) -> float:
    """Grades 0 to 4 as four cumulative yes-or-no questions with shared weights."""
    torch.manual_seed(seed)
    x, y = friedman(2000, noise=0.1)
    grade = torch.bucketize(y, torch.tensor([-1.0, -0.3, 0.3, 1.0]))
    body = mlp(10, 48, 1)
    model = nn.ModuleDict({"body": body, "steps": nn.ParameterList([torch.linspace(1, -1, 4)])})
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for _ in range(600):
            at = picked(1600, 64)
            scores = body(x[at]) + model["steps"][0]  # type: ignore[index]
            above = (grade[at][:, None] > torch.arange(4)).float()
            optimizer.zero_grad()
            functional.binary_cross_entropy_with_logits(scores, above).backward()
            optimizer.step()
        found = (body(x[1600:]) + model["steps"][0] > 0).sum(1).detach()  # type: ignore[index]
    return squared_score(found.float(), grade[1600:].float())


def survival_cox(watch: Watch, seed: int) -> float:
    """Cox's partial likelihood over a batch of censored lives, whose level depends on the batch."""
    torch.manual_seed(seed)
    x = torch.randn(1200, 6)
    risk = x[:, 0] - 0.8 * x[:, 1] + 0.5 * x[:, 2] ** 2
    life = torch.empty(1200).exponential_() * (-risk).exp()
    limit = torch.empty(1200).exponential_() * 2
    seen, time = (life <= limit).float(), torch.minimum(life, limit)
    model = mlp(6, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for _ in range(400):
            at = picked(1000, 128)
            at = at[time[at].argsort(descending=True)]
            score = model(x[at]).squeeze(1)
            loss = -((score - score.logcumsumexp(0)) * seen[at]).sum() / seen[at].sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    score = model(x[1000:]).squeeze(1).detach()
    return float(1 - torch.corrcoef(torch.stack([score, risk[1000:]]))[0, 1])


def counts_poisson(watch: Watch, seed: int) -> float:
    """Counts by the Poisson likelihood, whose loss goes below zero."""
    torch.manual_seed(seed)
    x = torch.randn(1500, 5)
    rate = (1.5 + 0.6 * x[:, 0] - 0.4 * x[:, 1]).exp()
    y = torch.poisson(rate)
    model = mlp(5, 32, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=50), 600):
            optimizer.zero_grad()
            functional.poisson_nll_loss(model(a).squeeze(1), b).backward()
            optimizer.step()
    return squared_score(model(x).squeeze(1).exp(), rate)


def heteroscedastic_gaussian(watch: Watch, seed: int) -> float:
    """Mean and variance together; the loss becomes negative."""
    torch.manual_seed(seed)
    x = 6 * torch.rand(1500, 1) - 3
    truth = x.sin()
    y = truth + (0.02 + 0.06 * (x > 0).float()) * torch.randn(1500, 1)
    model = mlp(1, 64, 64, 2, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for _ in range(700):
            at = picked(1500, 100)
            mean, raw = model(x[at]).chunk(2, 1)
            optimizer.zero_grad()
            functional.gaussian_nll_loss(mean, y[at], functional.softplus(raw) + 1e-4).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
    return squared_score(model(x)[:, :1], truth)


def multi_task_learnt_weights(watch: Watch, seed: int) -> float:
    """A regression and a classification, weighed by learnt uncertainties that live outside the network."""
    torch.manual_seed(seed)
    x, y = friedman(1600)
    label = (x[:, 5] * x[:, 6] > 0).long()
    body, value, kind = mlp(10, 64, 64), nn.Linear(64, 1), nn.Linear(64, 2)
    spread = nn.ParameterList([torch.zeros(2)])
    model = nn.ModuleDict({"body": nn.Sequential(body, nn.ReLU()), "value": value, "kind": kind, "spread": spread})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for _ in range(700):
            at = picked(1300, 64)
            hidden = model["body"](x[at])
            first = functional.mse_loss(value(hidden).squeeze(1), y[at])
            second = functional.cross_entropy(kind(hidden), label[at])
            losses = torch.stack([first, second])
            loss = ((-spread[0]).exp() * losses + spread[0]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return fit_score(nn.Sequential(model["body"], value), x[1300:], y[1300:])


def little_to_learn(watch: Watch, seed: int) -> float:
    """Targets with three times more noise than signal: the loss falls by little, and rightly."""
    torch.manual_seed(seed)
    x = torch.randn(4000, 6)
    truth = 0.6 * x[:, 0] - 0.5 * x[:, 3]
    y = truth + 1.4 * torch.randn(4000)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=64), 500):
            optimizer.zero_grad()
            functional.mse_loss(model(a).squeeze(1), b).backward()
            optimizer.step()
    return fit_score(model, x, truth)


PROGRAMS = [
    healthy(train)
    for train in (
        wine_softmax_regression,
        cancer_raw_features_batchnorm,
        diabetes_huber_adamw,
        prices_in_logarithms,
        friedman_self_normalising,
        sales_with_entity_embeddings,
        ratings_sparse_adam,
        quantile_bands,
        ordinal_grades,
        survival_cox,
        counts_poisson,
        heteroscedastic_gaussian,
        multi_task_learnt_weights,
        little_to_learn,
    )
]
