"""Faulty programs in which a path is cut, or the optimizer and the model do not belong together."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.not_learning.held_out.data import digits, ratings, seasons, table
from benchmarks.not_learning.held_out.entry import faulty, squared_score
from benchmarks.not_learning.held_out_2.parts import (
    class_score,
    endless,
    fit_score,
    friedman,
    loader,
    mlp,
    rings,
)
from benchmarks.not_learning.program import Watch


def friedman_loss_wrapped_anew(watch: Watch, seed: int) -> float:
    """The loss is made a tensor again before the backward pass."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    model = mlp(10, 48, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=64), 400):
            loss = functional.mse_loss(model(a).squeeze(1), b)
            optimizer.zero_grad()
            torch.tensor(loss.item(), requires_grad=True).backward()
            optimizer.step()
    return fit_score(model, x[1200:], y[1200:])


class _Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(2, 32, 3, act=nn.Tanh), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x).detach())


def rings_features_detached(watch: Watch, seed: int) -> float:
    """The features are detached on their way to the head."""
    torch.manual_seed(seed)
    x, y = rings(1500)
    model = _Detached()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=64), 600):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, x[1200:], y[1200:])


class _ByNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp(10, 32, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(x)
        return self.head(torch.from_numpy(hidden.detach().numpy()))


def friedman_through_numpy(watch: Watch, seed: int) -> float:
    """The features pass through numpy in the middle of the network."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    model = _ByNumpy()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=64), 500):
            optimizer.zero_grad()
            functional.mse_loss(model(a).squeeze(1), b).backward()
            optimizer.step()
    return fit_score(model, x[1200:], y[1200:])


def digits_loss_of_the_choice(watch: Watch, seed: int) -> float:
    """The loss is taken from the chosen class, which was then told to require gradients."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = nn.Sequential(nn.Flatten(), mlp(64, 48, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=64), 300):
            chosen = model(a).argmax(1).float()
            loss = functional.mse_loss(chosen, b.float()).requires_grad_()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


class _Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)
        self.layers = [nn.Linear(4, 4) for _ in range(3)]

    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x).tanh()
        return self.last(x)


def rings_layers_in_a_list(watch: Watch, seed: int) -> float:
    """The middle layers are in a plain list, which the model does not know of."""
    torch.manual_seed(seed)
    x, y = rings(1500)
    model = _Listed()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=64), 700):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, x[1200:], y[1200:])


def digits_head_replaced_late(watch: Watch, seed: int) -> float:
    """The head is replaced after the optimizer was made, and the rest is frozen."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 2))
    model[1].requires_grad_(False)
    optimizer = torch.optim.Adam(model[-1].parameters(), lr=1e-2)
    model[-1] = nn.Linear(48, 10)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=64), 300):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def friedman_copy_is_trained(watch: Watch, seed: int) -> float:
    """The model that computes the loss is a copy of the one that the optimizer holds."""
    torch.manual_seed(seed)
    x, y = friedman(1500)
    model = mlp(10, 48, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    used = copy.deepcopy(model)
    with watch(used, optimizer):
        for a, b in endless(loader(x[:1200], y[:1200], size=64), 400):
            optimizer.zero_grad()
            functional.mse_loss(used(a).squeeze(1), b).backward()
            optimizer.step()
    return fit_score(used, x[1200:], y[1200:])


def digits_only_the_decoder(watch: Watch, seed: int) -> float:
    """An autoencoder whose optimizer was given the decoder alone."""
    torch.manual_seed(seed)
    x = digits(seed)[0].flatten(1)
    encoder, decoder = mlp(64, 64, 12), mlp(12, 64)
    model = nn.Sequential(encoder, decoder)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for (a,) in endless(loader(x, size=64), 600):
            optimizer.zero_grad()
            functional.mse_loss(model(a), a).backward()
            optimizer.step()
    return float((model(x) - x).square().mean() / (x - x.mean(0)).square().mean())


def wine_frozen_part_in_the_optimizer(watch: Watch, seed: int) -> float:
    """The body is frozen, and it is the body that the optimizer holds."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("wine", seed)
    body, head = mlp(13, 24), nn.Linear(24, 3)
    model = nn.Sequential(body, nn.ReLU(), head)
    body.requires_grad_(False)
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=16), 300):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


class _FirstState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Any:
        start = torch.zeros(1, len(x), 24)
        _, last = self.body(x, start)
        return self.head(start[-1]) if last is not None else None


def seasons_first_state_read(watch: Watch, seed: int) -> float:
    """The head reads the state before the series, not the one after it."""
    torch.manual_seed(seed)
    series = seasons(800, 25)[:, :, None]
    x, y = series[:, :24], series[:, 24]
    model = _FirstState()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:600], y[:600], size=32), 300):
            optimizer.zero_grad()
            functional.mse_loss(model(a), b).backward()
            optimizer.step()
    return squared_score(model(x[600:]), y[600:])


class _TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(2, 24), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x)[0][:, -1])


def levels_batch_first_forgotten(watch: Watch, seed: int) -> float:
    """Series (N, T, C) are given to a recurrent layer that reads (T, N, C)."""
    torch.manual_seed(seed)
    x = torch.randn(1200, 12, 2)
    y = x[:, :, 0].mean(1, keepdim=True) * 3 + x[:, 3, 1:] * 0.5
    model = _TimeFirst()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1000], y[:1000], size=50), 300):
            optimizer.zero_grad()
            functional.mse_loss(model(a), b).backward()
            optimizer.step()
    return squared_score(model(x[1000:]), y[1000:])


class _Taste(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.film, self.net = nn.Embedding(120, 8), nn.Embedding(80, 8), mlp(16, 48, 1)

    def forward(self, user: Tensor, film: Tensor) -> Any:
        return 3.5 + self.net(torch.cat([self.user(user), self.film(film)], 1)).squeeze(1)


def ratings_rounded(watch: Watch, seed: int) -> float:
    """Predictions are rounded to stars before the loss."""
    torch.manual_seed(seed)
    user, film, rating = ratings(seed)
    model = _Taste()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    with watch(model, optimizer):
        for u, f, r in endless(loader(user[:5000], film[:5000], rating[:5000], size=128), 600):
            told = model(u, f).round()
            optimizer.zero_grad()
            functional.mse_loss(told, r).backward()
            optimizer.step()
    return squared_score(model(user[5000:], film[5000:]), rating[5000:])


def ring_gan_maker_detached(watch: Watch, seed: int) -> float:
    """The samples are detached in the maker's turn too."""
    torch.manual_seed(seed)
    maker, judge = mlp(4, 32, 32, 2), mlp(2, 32, 32, 1, act=nn.LeakyReLU)
    first = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.99))
    second = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.99))
    loss = functional.binary_cross_entropy_with_logits
    with watch({"maker": maker, "judge": judge}, {"maker": first, "judge": second}, objective="adversarial"):
        for _ in range(700):
            angle, fake = 2 * torch.pi * torch.rand(64, 1), maker(torch.randn(64, 4))
            real = 2 * torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2)
            second.zero_grad()
            told = judge(torch.cat([real, fake.detach()]))
            loss(told, torch.cat([torch.ones(64, 1), torch.zeros(64, 1)])).backward()
            second.step()
            first.zero_grad()
            loss(judge(fake.detach()), torch.ones(64, 1)).backward()
            first.step()
    return float((maker(torch.randn(500, 4)).norm(dim=1) - 2).abs().mean() / 1.8)


def ring_gan_maker_not_in_its_optimizer(watch: Watch, seed: int) -> float:
    """Both optimizers were given the judge."""
    torch.manual_seed(seed)
    maker, judge = mlp(4, 32, 32, 2), mlp(2, 32, 32, 1, act=nn.LeakyReLU)
    first = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.99))
    second = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.99))
    loss = functional.binary_cross_entropy_with_logits
    with watch({"maker": maker, "judge": judge}, {"maker": first, "judge": second}, objective="adversarial"):
        for _ in range(700):
            angle, fake = 2 * torch.pi * torch.rand(64, 1), maker(torch.randn(64, 4))
            real = 2 * torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2)
            second.zero_grad()
            told = judge(torch.cat([real, fake.detach()]))
            loss(told, torch.cat([torch.ones(64, 1), torch.zeros(64, 1)])).backward()
            second.step()
            first.zero_grad()
            loss(judge(fake), torch.ones(64, 1)).backward()
            first.step()
    return float((maker(torch.randn(500, 4)).norm(dim=1) - 2).abs().mean() / 1.8)


PROGRAMS = [
    faulty(friedman_loss_wrapped_anew, causes="813", also="814 828 832"),
    faulty(rings_features_detached, causes="814", also="828 832"),
    faulty(friedman_through_numpy, causes="814", also="828 832"),
    faulty(digits_loss_of_the_choice, causes="813 814", also="828 832"),
    faulty(rings_layers_in_a_list, causes="808", also="828 832"),
    faulty(digits_head_replaced_late, causes="808 809", also="812 813 814 828 832"),
    faulty(friedman_copy_is_trained, causes="808 809", also="812 813 814 828 832"),
    faulty(digits_only_the_decoder, causes="808", also="828 832"),
    faulty(wine_frozen_part_in_the_optimizer, causes="808 810", also="812 813 814 828 832"),
    faulty(seasons_first_state_read, causes="830", also="814 828 829 832 844"),
    faulty(levels_batch_first_forgotten, causes="", also="828 829 832"),
    faulty(ratings_rounded, causes="815", also="823 828 829 832"),
    faulty(ring_gan_maker_detached, causes="813 814", also="823 853"),
    faulty(ring_gan_maker_not_in_its_optimizer, causes="808", also="811 814 853"),
]
