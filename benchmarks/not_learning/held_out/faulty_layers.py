"""Faulty programs whose layers cannot learn as they stand: starting weights, depth, modes, normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.not_learning.held_out.data import digits, moons, table
from benchmarks.not_learning.held_out.entry import error_score, faulty, squared_score
from benchmarks.not_learning.program import Watch


def weights_all_zero(watch: Watch, seed: int) -> float:
    """A network by hand whose weight matrices all start at 0."""
    torch.manual_seed(seed)
    w1, b1 = nn.Parameter(torch.zeros(64, 32)), nn.Parameter(torch.zeros(32))
    w2, b2 = nn.Parameter(torch.zeros(32, 10)), nn.Parameter(torch.zeros(10))
    params = nn.ParameterList([w1, b1, w2, b2])
    x, y, held_x, held_y = table("digits", seed)
    opt = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    # by hand
    with watch(params, opt):
        for _ in range(400):
            i = torch.randint(len(x), (32,))
            loss = F.cross_entropy((x[i] @ w1 + b1).relu() @ w2 + b2, y[i])
            opt.zero_grad()
            loss.backward()
            opt.step()
    return error_score((held_x @ w1 + b1).relu() @ w2 + b2, held_y)


def _constant(module: nn.Module) -> None:
    if isinstance(module, nn.Conv1d | nn.Linear):
        nn.init.constant_(module.weight, 0.05)
        nn.init.zeros_(module.bias)


def weights_all_alike(watch: Watch, seed: int) -> float:
    """constant_ for every layer of a classifier of sounds: all filters are one filter for ever."""
    torch.manual_seed(seed)

    def sample(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        kind = torch.randint(5, (count,))
        t = torch.arange(96) / 96 + torch.rand(count, 1)
        return ((15 + 14 * kind[:, None]) * t).sin()[:, None] + 0.2 * torch.randn(count, 1, 96), kind

    model = nn.Sequential(
        nn.Conv1d(1, 12, 9, 2), nn.ReLU(), nn.Conv1d(12, 16, 5, 2), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5),
    )  # fmt: skip
    model.apply(_constant)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for _ in range(400):
            x, y = sample(32)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    x, y = sample(500)
    return error_score(model(x), y)


class _Adapter(nn.Module):
    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Parameter(torch.zeros(frozen.in_features, 8))
        self.up = nn.Parameter(torch.zeros(8, frozen.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + x @ self.down @ self.up


def adapters_both_zero(watch: Watch, seed: int) -> float:
    """Low-rank adapters with both factors at 0: each one's gradient holds the other as a factor."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = nn.Sequential(nn.Flatten(), _Adapter(nn.Linear(64, 64)), nn.ReLU(), _Adapter(nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3, weight_decay=0.0)
    with watch(model, optimizer):
        for _ in range(300):
            i = torch.randint(len(x), (32,))
            loss = F.cross_entropy(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return error_score(model(held_x), held_y)


def twelve_sigmoids_deep(watch: Watch, seed: int) -> float:
    """Twelve sigmoid layers in a row: nothing of the gradient arrives at the first ones."""
    torch.manual_seed(seed)
    act: type[nn.Module] = nn.Sigmoid
    layers: list[nn.Module] = [nn.Linear(2, 32)]
    for _ in range(11):
        layers += [act(), nn.Linear(32, 32)]
    net = nn.Sequential(*layers, act(), nn.Linear(32, 2))
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    with watch(net, opt):
        for _ in range(400):
            x, y = moons(64)
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    x, y = moons(1000)
    return error_score(net(x), y)


def biases_far_below_zero(watch: Watch, seed: int) -> float:
    """A "sparse" start with biases of -20 leaves every rectified unit silent for good."""
    torch.manual_seed(seed)
    x = torch.randn(600, 5)
    y = (x[:, :1] * x[:, 1:2]).tanh() + x[:, 2:3].abs()
    net = nn.Sequential(nn.Linear(5, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    start = -20.0
    for layer in net:
        if isinstance(layer, nn.Linear) and layer.out_features > 1:
            nn.init.constant_(layer.bias, start)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    with watch(net, opt):
        for _ in range(400):
            i = torch.randint(500, (50,))
            loss = F.mse_loss(net(x[i]), y[i])
            opt.zero_grad()
            loss.backward()
            opt.step()
    return squared_score(net(x[500:]), y[500:])


def recurrence_that_explodes(watch: Watch, seed: int) -> float:
    """A linear recurrence whose matrix is 1.6 times a rotation, over 200 steps: overflow in the first batches."""
    torch.manual_seed(seed)
    gain = 1.6
    inside, matrix = nn.Linear(1, 16), nn.Parameter(gain * torch.linalg.qr(torch.randn(16, 16)).Q)
    head = nn.Linear(16, 1)
    model = nn.ModuleDict({"inside": inside, "head": head})
    model.register_parameter("matrix", matrix)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3)

    def forward(x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(len(x), 16)
        for t in range(x.shape[1]):
            h = h @ matrix + inside(x[:, t : t + 1])
        return head(h)

    def sample(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, 200)
        return x, x[:, -1:] - x[:, -2:-1]

    with watch(model, opt):
        for _ in range(100):
            x, y = sample(16)
            loss = F.mse_loss(forward(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    x, y = sample(200)
    return squared_score(forward(x), y)


def dropout_keeps_one_in_twenty(watch: Watch, seed: int) -> float:
    """Dropout(0.95), in the belief that 0.95 is what is kept, in each of four layers."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("digits", seed)
    p = 0.95
    layers: list[nn.Module] = []
    for a, b in ((64, 32), (32, 32), (32, 32), (32, 32)):
        layers += [nn.Linear(a, b), nn.ReLU(), nn.Dropout(p)]
    net = nn.Sequential(*layers, nn.Linear(32, 10))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    with watch(net, opt) as watching:
        for _ in range(12):
            net.train()
            for i in torch.randperm(len(x)).split(32):
                opt.zero_grad()
                F.cross_entropy(net(x[i]), y[i]).backward()
                opt.step()
            net.eval()
            watching.validated(F.cross_entropy(net(held_x), held_y).item())
    return error_score(net(held_x), held_y)


def evaluated_and_never_back(watch: Watch, seed: int) -> float:
    """eval() for a first look at the loss, and no train() after: BatchNorm works with statistics it never took."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    x, held_x = 255 * x, 255 * held_x
    layers: list[nn.Module] = []
    for k in range(3):
        layers += [nn.Conv2d(1 if k == 0 else 16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def look() -> float:
        model.eval()
        with torch.no_grad():
            return F.cross_entropy(model(held_x), held_y).item()

    with watch(model, optimizer) as watching:
        watching.validated(look())
        for _ in range(4):
            # an epoch
            for i in torch.randperm(len(x)).split(32):
                loss = F.cross_entropy(model(x[i]), y[i])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            watching.validated(look())
    return error_score(model(held_x), held_y)


def batch_norm_on_pairs(watch: Watch, seed: int) -> float:
    """BatchNorm1d with batches of two: after it each unit is +1 or -1 and says only which row was larger."""
    torch.manual_seed(seed)
    x = torch.randn(800, 6) * 2
    y = x[:, 0] + 2 * x[:, 1].sin() - x[:, 2].abs()
    y = (y - y.mean()) / y.std()
    batch_size = 2
    net = nn.Sequential(
        nn.Linear(6, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Linear(32, 1),
    )
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    with watch(net, opt) as watching:
        for _ in range(600):
            net.train()
            i = torch.randperm(600)[:batch_size]
            loss = F.mse_loss(net(x[i])[:, 0], y[i])
            opt.zero_grad()
            loss.backward()
            opt.step()
        net.eval()
        watching.validated(F.mse_loss(net(x[600:])[:, 0], y[600:]).item())
    return squared_score(net(x[600:])[:, 0], y[600:])


def validated_in_training_mode(watch: Watch, seed: int) -> float:
    """Validation without eval(): what is reported, and here scored, is the network with half its units gone."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("digits", seed)
    net = nn.Sequential(
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Dropout(0.7),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Dropout(0.7),
        nn.Linear(64, 10),
    )
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    with watch(net, opt) as watching:
        for _ in range(12):
            net.train()
            for i in torch.randperm(len(x)).split(32):
                opt.zero_grad()
                F.cross_entropy(net(x[i]), y[i]).backward()
                opt.step()
            # validate
            with torch.no_grad():
                out = net(held_x)
                watching.validated(F.cross_entropy(out, held_y).item())
    return error_score(out, held_y)


PROGRAMS = [
    faulty(weights_all_zero, causes="822", also="814 815 823 828 830 847"),
    faulty(weights_all_alike, causes="822", also="828 823 848"),
    faulty(adapters_both_zero, causes="822 815", also="814 823 828"),
    faulty(twelve_sigmoids_deep, causes="848", also="828 830 823 824 847"),
    faulty(biases_far_below_zero, causes="847", also="815 823 828 830 848"),
    faulty(recurrence_that_explodes, causes="801 802 848", also="804 803 825 826 827 828"),
    faulty(dropout_keeps_one_in_twenty, causes="834 828", also="824 830 847"),
    faulty(evaluated_and_never_back, causes="834", also="801 802 804 825 826 827 828 847 848"),
    faulty(batch_norm_on_pairs, causes="835", also="834 828"),
    faulty(validated_in_training_mode, causes="834", also="833"),
]
