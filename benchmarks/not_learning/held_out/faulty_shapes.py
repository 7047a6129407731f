"""Faulty programs whose loss compares the wrong things: shapes, axes, ranges of targets, units of outputs."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.not_learning.held_out.data import digits, seasons, table
from benchmarks.not_learning.held_out.entry import error_score, faulty, squared_score
from benchmarks.not_learning.program import Watch


def targets_lack_a_dimension(watch: Watch, seed: int) -> float:
    """Predictions (n, 1) against targets (n,) in MSELoss: every prediction is held against every target."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("diabetes", seed)
    mean, std = y.mean(), y.std()
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.MSELoss()
    with watch(model, optimizer):
        for _ in range(40):
            for rows in torch.randperm(len(x)).split(32):
                outputs = model(x[rows])
                loss = criterion(outputs, (y[rows] - mean) / std)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return squared_score(model(held_x)[:, 0] * std + mean, held_y)


class _Force(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, atoms: torch.Tensor) -> torch.Tensor:
        gaps = atoms[:, :, None] - atoms[:, None]
        return self.pair(gaps.abs()).sum((1, 2)) / atoms.shape[1]


def residual_by_hand_broadcasts(watch: Watch, seed: int) -> float:
    """Energies of pairs of atoms, one residual written by hand between (n, 1) and (n,)."""
    torch.manual_seed(seed)
    atoms = torch.randn(400, 5, 3)
    energy = (-(atoms[:, :, None] - atoms[:, None]).square().sum(-1)).exp().sum((1, 2))
    energy = (energy - energy.mean()) / energy.std()
    model = _Force()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with watch(model, opt):
        for _ in range(400):
            i = torch.randint(350, (40,))
            residual = model(atoms[i]) - energy[i]
            loss = (residual**2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    return squared_score(model(atoms[350:])[:, 0], energy[350:])


def log_softmax_down_the_batch(watch: Watch, seed: int) -> float:
    """log_softmax over dimension 0: the rows of a batch compete, not the classes, most of which are rare."""
    torch.manual_seed(seed)
    x = torch.randn(1500, 8)
    y = ((x[:, 0] + 0.5 * torch.randn(1500)) > 1.2).long() + ((x[:, 1] + 0.5 * torch.randn(1500)) > 1.5).long()
    net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 3))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    with watch(net, opt):
        for _ in range(12):
            for i in torch.randperm(1200).split(32):
                out = F.log_softmax(net(x[i]), dim=0)
                loss = F.nll_loss(out, y[i])
                opt.zero_grad()
                loss.backward()
                opt.step()
    return error_score(net(x[1200:]), y[1200:])


class _Pointer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.out = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.score(x).softmax(dim=0)
        return self.out((weight * x).sum(1))[:, 0]


def attention_over_the_batch(watch: Watch, seed: int) -> float:
    """Attention pooling normalises over the batch where it should over time."""
    torch.manual_seed(seed)

    def sample(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        value, flag = torch.randn(count, 9), torch.zeros(count, 9)
        flag[torch.arange(count), torch.randint(9, (count,))] = 1
        return torch.stack([value, flag], 2), (value * flag).sum(1)

    model = _Pointer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for _ in range(500):
            x, y = sample(64)
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    x, y = sample(64)
    return squared_score(model(x), y)


def labels_one_and_two(watch: Watch, seed: int) -> float:
    """The file codes the classes 1 and 2, and binary cross-entropy takes them as they are."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("breast_cancer", seed)
    code = y + 1
    model = nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for _ in range(30):
            for i in torch.randperm(len(x)).split(32):
                loss = F.binary_cross_entropy_with_logits(model(x[i]).squeeze(), code[i].float())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    out = model(held_x)
    return error_score(torch.cat([-out, out], 1), held_y)


def _perceptron(sizes: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers.append(nn.Linear(a, b))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


def rectified_scores(watch: Watch, seed: int) -> float:
    """A loop that builds the layers puts a ReLU after the last one too."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("digits", seed)
    model = _perceptron([64, 32, 32, 10])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for _ in range(10):
            for rows in torch.randperm(len(x)).split(32):
                loss = F.cross_entropy(model(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return error_score(model(held_x), held_y)


def rectified_forecast(watch: Watch, seed: int) -> float:
    """The next value of a series about 0, through a last ReLU that can give no negative one."""
    torch.manual_seed(seed)
    series = seasons(300, 17)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1), nn.ReLU())
    opt = torch.optim.RMSprop(net.parameters(), lr=3e-3)
    with watch(net, opt):
        for _ in range(500):
            rows = series[torch.randint(250, (32,))]
            loss = (net(rows[:, :16])[:, 0] - rows[:, 16]).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    return squared_score(net(series[250:, :16])[:, 0], series[250:, 16])


def tanh_for_targets_in_hundreds(watch: Watch, seed: int) -> float:
    """A regression in its own units, between 25 and 346, by a network whose output lies in (-1, 1)."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("diabetes", seed)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1), nn.Tanh())
    goal, back = (lambda t: t), (lambda t: t)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for _ in range(400):
            i = torch.randint(len(x), (32,))
            loss = F.smooth_l1_loss(model(x[i]).view(-1), goal(y[i]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return squared_score(back(model(held_x).view(-1)), held_y)


def temperature_a_hundred(watch: Watch, seed: int) -> float:
    """Contrastive learning that divides cosines by 100 instead of by 0.1: all logits are equal."""
    torch.manual_seed(seed)
    angle = torch.randn(2000, 6)
    mix = 0.3 * torch.randn(6, 30)
    net_a = nn.Sequential(nn.Linear(30, 48), nn.ReLU(), nn.Linear(48, 12))
    net_b = nn.Sequential(nn.Linear(30, 48), nn.ReLU(), nn.Linear(48, 12))
    model = nn.ModuleList([net_a, net_b])
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    temperature = 100.0

    def logits(rows: torch.Tensor) -> torch.Tensor:
        one = F.normalize(net_a((angle[rows] @ mix).sin()), dim=1)
        two = F.normalize(net_b((angle[rows] @ mix + 0.5).cos()), dim=1)
        return one @ two.T / temperature

    with watch(model, opt):
        for _ in range(300):
            loss = F.cross_entropy(logits(torch.randint(1900, (64,))), torch.arange(64))
            opt.zero_grad()
            loss.backward()
            opt.step()
    return error_score(logits(torch.arange(1900, 2000)), torch.arange(100))


def cosine_labels_zero_and_one(watch: Watch, seed: int) -> float:
    """cosine_embedding_loss wants 1 and -1, gets 1 and 0, and so never pushes anything apart."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    with watch(net, opt):
        for _ in range(400):
            i, j = torch.randint(len(x), (2, 64))
            j[::2] = torch.stack([torch.nonzero(y == y[k])[0, 0] for k in i[::2]])
            target = (y[i] == y[j]).float()
            loss = F.cosine_embedding_loss(net(x[i]), net(x[j]), target, margin=0.2)
            opt.zero_grad()
            loss.backward()
            opt.step()
    near = F.normalize(net(held_x), dim=1) @ F.normalize(net(x), dim=1).T
    return float((y[near.argmax(1)] != held_y).float().mean() / 0.9)


def root_of_zero_distance(watch: Watch, seed: int) -> float:
    """Distances by hand, the root of 0 between a row and itself: finite losses, gradients that are not numbers."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("wine", seed)
    net = nn.Sequential(nn.Linear(13, 24), nn.ReLU(), nn.Linear(24, 4))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    with watch(net, opt):
        for _ in range(250):
            i = torch.randperm(len(x))[:32]
            z = net(x[i])
            gap = (z[:, None] - z[None]).pow(2).sum(-1).sqrt()
            same = y[i][:, None] == y[i][None]
            loss = torch.where(same, gap, (2 - gap).clamp(min=0)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    near = torch.cdist(net(held_x), net(x)).argmin(1)
    return float((y[near] != held_y).float().mean() / 0.6) if net[0].weight.isfinite().all() else math.nan


PROGRAMS = [
    faulty(targets_lack_a_dimension, causes="841", also="828 830"),
    faulty(residual_by_hand_broadcasts, causes="841", also="828 830"),
    faulty(log_softmax_down_the_batch, causes="842", also="828 830"),
    faulty(attention_over_the_batch, causes="842", also="828"),
    faulty(labels_one_and_two, causes="855", also="840 826 828 830"),
    faulty(rectified_scores, causes="837", also="847 828 823 815"),
    faulty(rectified_forecast, causes="837 847", also="828 815 823"),
    faulty(tanh_for_targets_in_hundreds, causes="828 830", also="847 848 815 823 824"),
    faulty(temperature_a_hundred, causes="828", also="824 830 848"),
    faulty(cosine_labels_zero_and_one, causes="855", also="844 815"),
    faulty(root_of_zero_distance, causes="802", also="801 804 805"),
]
