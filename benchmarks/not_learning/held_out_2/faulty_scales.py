"""Faulty programs of wrong sizes: learning rates, decay, initial weights, activations, and precision."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.not_learning.held_out.data import digits, moons, seasons, table
from benchmarks.not_learning.held_out.entry import faulty, squared_score
from benchmarks.not_learning.held_out_2.parts import (
    class_score,
    endless,
    fit_score,
    friedman,
    loader,
    mlp,
    picked,
    rings,
)
from benchmarks.not_learning.program import Watch


def _classify(watch: Watch, seed: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> float:
    """Train a classifier of flat digits for 300 steps, and return its score."""
    x, y, held_x, held_y = digits(seed)
    with watch(model, optimizer):
        for a, b in endless(loader(x.flatten(1), y, size=64), 300):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x.flatten(1), held_y)


def _regress(watch: Watch, seed: int, model: nn.Sequential, optimizer: torch.optim.Optimizer) -> float:
    """Train a regression of Friedman's function for 400 steps, and return its score."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=64), 400):
            optimizer.zero_grad()
            functional.mse_loss(model(a).squeeze(1), b).backward()
            optimizer.step()
    return fit_score(model, x[1200:], y[1200:])


def digits_adam_rate_of_one(watch: Watch, seed: int) -> float:
    """Adam with the rate of plain gradient descent."""
    torch.manual_seed(seed)
    model = mlp(64, 64, 64, 10)
    return _classify(watch, seed, model, torch.optim.Adam(model.parameters(), lr=1.0))


def digits_rate_tiny(watch: Watch, seed: int) -> float:
    """Plain gradient descent with a rate of 1e-6."""
    torch.manual_seed(seed)
    model = mlp(64, 64, 10)
    return _classify(watch, seed, model, torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9))


def friedman_rate_diverges(watch: Watch, seed: int) -> float:
    """Plain gradient descent with a rate that makes the weights oscillate without bound."""
    torch.manual_seed(seed)
    model = mlp(10, 64, 64, 1)
    return _regress(watch, seed, model, torch.optim.SGD(model.parameters(), lr=5.0))


def digits_momentum_near_one(watch: Watch, seed: int) -> float:
    """Momentum of 0.999 at a rate that suits 0.9."""
    torch.manual_seed(seed)
    model = mlp(64, 64, 64, 10)
    return _classify(watch, seed, model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.999))


def friedman_decay_of_ten(watch: Watch, seed: int) -> float:
    """A weight decay of ten, decoupled, at a rate of 1e-2."""
    torch.manual_seed(seed)
    model = mlp(10, 48, 1)
    return _regress(watch, seed, model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=10.0))


def digits_penalty_in_the_gradient(watch: Watch, seed: int) -> float:
    """A weight decay of one with plain gradient descent."""
    torch.manual_seed(seed)
    model = mlp(64, 48, 10)
    return _classify(watch, seed, model, torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=1.0))


def friedman_loss_summed_over_batch(watch: Watch, seed: int) -> float:
    """The loss is a sum over 400 samples, at a rate for means."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    model = mlp(10, 48, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for _ in range(300):
            at = picked(1200, 400)
            loss = functional.mse_loss(model(x[at]).squeeze(1), y[at], reduction="sum")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return fit_score(model, x[1200:], y[1200:])


def friedman_divided_twice(watch: Watch, seed: int) -> float:
    """A mean loss is divided by the number of samples once more."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    model = mlp(10, 48, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=64), 400):
            loss = functional.mse_loss(model(a).squeeze(1), b) / len(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return fit_score(model, x[1200:], y[1200:])


def friedman_bfloat16_weights(watch: Watch, seed: int) -> float:
    """All weights are bfloat16, and the steps are below its resolution."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    x, y = x.bfloat16(), y.bfloat16()
    model = mlp(10, 48, 1).to(x.dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=64), 800):
            optimizer.zero_grad()
            functional.mse_loss(model(a).squeeze(1), b).backward()
            optimizer.step()
    return fit_score(model, x[1200:], y[1200:].float())


def rings_half_adam(watch: Watch, seed: int) -> float:
    """A model in half precision under Adam, whose epsilon is zero there."""
    torch.manual_seed(seed)
    x, y = rings(1500)
    kind = torch.float16
    model = mlp(2, 48, 48, 3).to(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200].to(kind), y[:1200], size=64), 300):
            optimizer.zero_grad()
            functional.cross_entropy(model(a).float(), b).backward()
            optimizer.step()
    if not all(weight.isfinite().all() for weight in model.parameters()):
        return float("nan")
    return class_score(model, x[1200:].to(kind), y[1200:])


def digits_all_weights_equal(watch: Watch, seed: int) -> float:
    """All weights start at 0.01."""
    torch.manual_seed(seed)
    model = mlp(64, 48, 48, 10)
    for weight in model.parameters():
        nn.init.constant_(weight, 0.01)
    return _classify(watch, seed, model, torch.optim.Adam(model.parameters(), lr=2e-3))


def digits_all_weights_zero(watch: Watch, seed: int) -> float:
    """All weights and biases start at zero."""
    torch.manual_seed(seed)
    model = mlp(64, 48, 48, 10)
    for weight in model.parameters():
        nn.init.zeros_(weight)
    return _classify(watch, seed, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def digits_units_dead(watch: Watch, seed: int) -> float:
    """Biases start far below zero, so that rectifiers are never active."""
    torch.manual_seed(seed)
    model = mlp(64, 48, 48, 10)
    for at in (0, 2):
        nn.init.constant_(model[at].bias, -5.0)  # type: ignore[arg-type]
    return _classify(watch, seed, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def digits_deep_sigmoids(watch: Watch, seed: int) -> float:
    """Eight layers of sigmoids."""
    torch.manual_seed(seed)
    model = mlp(64, *[32] * 8, 10, act=nn.Sigmoid)
    return _classify(watch, seed, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def digits_tanh_saturated(watch: Watch, seed: int) -> float:
    """Weights of a tanh network are drawn with a deviation of five."""
    torch.manual_seed(seed)
    model = mlp(64, 48, 48, 48, 10, act=nn.Tanh)
    for weight in model.parameters():
        nn.init.normal_(weight, std=5.0)
    return _classify(watch, seed, model, torch.optim.SGD(model.parameters(), lr=0.05))


def digits_deep_plain_small(watch: Watch, seed: int) -> float:
    """Twelve layers whose weights are drawn with a deviation of 0.02."""
    torch.manual_seed(seed)
    model = mlp(64, *[48] * 11, 10)
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.02)
    return _classify(watch, seed, model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9))


class _Recurrent(nn.Module):
    """A linear recurrence by hand."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(24, 24), nn.Linear(1, 24), nn.Linear(24, 1)
        nn.init.orthogonal_(self.inner.weight, gain=gain)

    def forward(self, x: Tensor) -> Any:
        state = torch.zeros(len(x), 24)
        for at in range(x.shape[1]):
            state = functional.relu(self.inner(state) + self.outer(x[:, at]))
        return self.head(state)


def seasons_recurrence_explodes(watch: Watch, seed: int) -> float:
    """A rectified recurrence with a gain of three over forty steps."""
    torch.manual_seed(seed)
    series = seasons(700, 41)[:, :, None]
    x, y = series[:, :40], series[:, 40]
    model = _Recurrent(gain=3.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:500], y[:500], size=32), 300):
            optimizer.zero_grad()
            functional.mse_loss(model(a), b).backward()
            optimizer.step()
    return squared_score(model(x[500:]), y[500:])


def first_of_long_series_forgotten(watch: Watch, seed: int) -> float:
    """A plain tanh recurrence shall remember the first of thirty inputs."""
    torch.manual_seed(seed)
    x = 0.3 * torch.randn(600, 30, 1)
    y = torch.sign(torch.randn(600, 1))
    x[:, 0] = y
    body, head = nn.RNN(1, 24, batch_first=True), nn.Linear(24, 1)
    model = nn.ModuleDict({"body": body, "head": head})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:500], y[:500], size=25), 300):
            optimizer.zero_grad()
            functional.mse_loss(head(body(a)[0][:, -1]), b).backward()
            optimizer.step()
    return squared_score(head(body(x[500:])[0][:, -1]), y[500:])


def diabetes_tanh_cannot_reach(watch: Watch, seed: int) -> float:
    """The last layer is a tanh, and the targets are in the hundreds."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("diabetes", seed)
    model = nn.Sequential(mlp(10, 32, 1), nn.Tanh())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=32), 600):
            optimizer.zero_grad()
            functional.mse_loss(model(a).squeeze(1), b).backward()
            optimizer.step()
    return fit_score(model, held_x, held_y)


def houses_in_dollars(watch: Watch, seed: int) -> float:
    """Prices of hundreds of thousands are regressed as they are."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    price = 200000 + 60000 * y
    model = mlp(10, 48, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], price[:1200], size=64), 400):
            optimizer.zero_grad()
            functional.mse_loss(model(a).squeeze(1), b).backward()
            optimizer.step()
    return fit_score(model, x[1200:], price[1200:])


def twins_root_of_zero(watch: Watch, seed: int) -> float:
    """The distance of two embeddings is the root of a sum that is zero for equal inputs."""
    torch.manual_seed(seed)
    points, labels = moons(600)
    model = mlp(2, 32, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for step in range(300):
            one, other = picked(600, 32), picked(600, 32)
            if step % 50 == 49:
                other[0] = one[0]
            same = (labels[one] == labels[other]).float()
            far = (model(points[one]) - model(points[other])).square().sum(1).sqrt()
            loss = (same * far + (1 - same) * functional.relu(2 - far)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    codes = model(points).detach()
    centres = torch.stack([codes[labels == label].mean(0) for label in (0, 1)])
    wrong = (torch.cdist(codes, centres).argmin(1) != labels).double().mean() * 2
    return float(wrong) if codes.isfinite().all() else float("nan")


def cancer_logarithm_of_zero(watch: Watch, seed: int) -> float:
    """A cross-entropy by hand takes the logarithm of sigmoids that reach 0 and 1."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("breast_cancer", seed)
    model = mlp(30, 64, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y.float(), size=32), 400):
            share = model(a).squeeze(1).sigmoid()
            loss = -(b * share.log() + (1 - b) * (1 - share).log()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return fit_score(nn.Sequential(model, nn.Sigmoid()), held_x, held_y.float())


_BLOWN_UP = "801 802 804 805 825 826 827 828 832 848"

PROGRAMS = [
    faulty(digits_adam_rate_of_one, causes="825", also="826 827 828 830 832 847 848"),
    faulty(digits_rate_tiny, causes="824", also="823 828 832"),
    faulty(friedman_rate_diverges, causes="825", also=f"{_BLOWN_UP.replace(' 825', '')} 830 847"),
    faulty(digits_momentum_near_one, causes="825", also=f"{_BLOWN_UP.replace(' 825', '')} 830 847"),
    faulty(friedman_decay_of_ten, causes="858", also="823 828 830 832 847 848"),
    faulty(digits_penalty_in_the_gradient, causes="858", also="823 828 830 832 848"),
    faulty(friedman_loss_summed_over_batch, causes="825", also=f"{_BLOWN_UP.replace(' 825', '')} 830 847"),
    faulty(friedman_divided_twice, causes="824", also="823 828 832"),
    faulty(friedman_bfloat16_weights, causes="823", also="824 828 832"),
    faulty(rings_half_adam, causes="804", also="801 802 805 823 825 828"),
    faulty(digits_all_weights_equal, causes="822", also="828 829 830 832 848"),
    faulty(digits_all_weights_zero, causes="822", also="815 823 828 829 830 832 847 848"),
    faulty(digits_units_dead, causes="847", also="815 823 828 829 830 832 848"),
    faulty(digits_deep_sigmoids, causes="848", also="828 829 830 832"),
    faulty(digits_tanh_saturated, causes="848", also="823 824 825 826 827 828 832"),
    faulty(digits_deep_plain_small, causes="848", also="823 828 829 830 832"),
    faulty(seasons_recurrence_explodes, causes="848", also="801 802 804 805 825 826 827 828 832"),
    faulty(first_of_long_series_forgotten, causes="848", also="824 828 832"),
    faulty(diabetes_tanh_cannot_reach, causes="848", also="815 823 828 829 830 832"),
    faulty(houses_in_dollars, causes="848", also="824 828 829 832"),
    faulty(twins_root_of_zero, causes="802", also="801 804 805"),
    faulty(cancer_logarithm_of_zero, causes="801", also="802 804 805 825 848"),
]
