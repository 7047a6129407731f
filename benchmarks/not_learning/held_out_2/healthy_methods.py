"""Healthy programs with unusual loops: other optimizers, other steps, other roles of parameters, odd batches."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from benchmarks.not_learning.held_out.data import digits, moons, table
from benchmarks.not_learning.held_out.entry import error_score, healthy, squared_score
from benchmarks.not_learning.held_out_2.parts import (
    class_score,
    endless,
    fit_score,
    friedman,
    loader,
    mlp,
    rings,
    small_cnn,
)
from benchmarks.not_learning.program import Watch


def iris_full_batch_lbfgs(watch: Watch, seed: int) -> float:
    """Quasi-Newton steps with a closure on all data at once."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("iris", seed)
    model = mlp(4, 8, 3, act=nn.Tanh)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = sum(weight.square().sum() for weight in model.parameters())
        loss = functional.cross_entropy(model(x), y) + 1e-3 * penalty
        loss.backward()
        return loss

    with watch(model, optimizer):
        for _ in range(250):
            optimizer.step(closure)
    return class_score(model, held_x, held_y)


class _Lion(torch.optim.Optimizer):
    """The sign of a moving average, with decoupled decay."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["decay"])
                weight.sub_(group["lr"] * (0.9 * mean + 0.1 * weight.grad).sign())
                mean.lerp_(weight.grad, 0.01)


def digits_own_optimizer_lion(watch: Watch, seed: int) -> float:
    """An optimizer of one's own, with a linear schedule."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = small_cnn()
    optimizer = _Lion(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=300)
    with watch(model, optimizer, scheduler=scheduler, total_steps=300):
        for a, b in endless(loader(x, y, size=64), 300):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
            scheduler.step()
    return class_score(model, held_x, held_y)


def rings_sharpness_aware(watch: Watch, seed: int) -> float:
    """Two backward passes for each step, the second one at weights moved uphill."""
    torch.manual_seed(seed)
    x, y = rings(1000)
    model = mlp(2, 48, 48, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:700], y[:700], size=32), 400):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            slopes = [weight.grad for weight in model.parameters() if weight.grad is not None]
            size = torch.stack([slope.norm() for slope in slopes]).norm() + 1e-12
            moves = [0.05 * slope / size for slope in slopes]
            with torch.no_grad():
                for weight, move in zip(model.parameters(), moves, strict=True):
                    weight.add_(move)
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            with torch.no_grad():
                for weight, move in zip(model.parameters(), moves, strict=True):
                    weight.sub_(move)
            optimizer.step()
    return class_score(model, x[700:], y[700:])


def sines_reptile(watch: Watch, seed: int) -> float:
    """Meta-learning by Reptile: inner steps on a copy, and the difference is the outer gradient."""
    torch.manual_seed(seed)
    model = mlp(1, 40, 40, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def adapted(steps: int, shift: Tensor) -> nn.Module:
        inner = copy.deepcopy(model)
        fast = torch.optim.SGD(inner.parameters(), lr=0.05)
        for _ in range(steps):
            x = 6 * torch.rand(20, 1) - 3
            fast.zero_grad()
            functional.mse_loss(inner(x), (x + shift).sin() + 2).backward()
            fast.step()
        return inner

    with watch(model, optimizer):
        for _ in range(250):
            inner = adapted(5, 0.5 * torch.rand(1))
            for weight, moved in zip(model.parameters(), inner.parameters(), strict=True):
                weight.grad = (weight - moved).detach()
            optimizer.step()
    x = torch.linspace(-3, 3, 100)[:, None]
    return squared_score(adapted(10, torch.tensor([0.4]))(x), (x + 0.4).sin() + 2)


class _Sign(torch.autograd.Function):
    """The sign, whose gradient passes within one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        return above[0] * (ctx.saved_tensors[0].abs() < 1)


class _Binary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 128), nn.BatchNorm1d(128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Any:
        return self.last(_Sign.apply(self.norm(self.first(x.flatten(1)))))


def digits_binary_units_straight_through(watch: Watch, seed: int) -> float:
    """Units of plus or minus one, with a backward pass of one's own."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = _Binary()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=64), 350):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def digits_gradual_unfreezing(watch: Watch, seed: int) -> float:
    """The body is frozen for the first third, and has a tenth of the head's rate then."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    body, head = mlp(64, 96, 48), nn.Linear(48, 10)
    model = nn.Sequential(nn.Flatten(), body, nn.ReLU(), head)
    body.requires_grad_(False)
    groups = [{"params": body.parameters(), "lr": 1e-3}, {"params": head.parameters(), "lr": 1e-2}]
    optimizer = torch.optim.Adam(groups)
    with watch(model, optimizer):
        for step, (a, b) in enumerate(endless(loader(x, y, size=64), 400)):
            if step == 130:
                body.requires_grad_(True)
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


class _Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *above: Any) -> Any:
        return -0.3 * above[0]


def moons_domain_adversary(watch: Watch, seed: int) -> float:
    """A classifier whose features shall not tell the domain, in one optimizer, by a reversed gradient."""
    torch.manual_seed(seed)
    body, head, judge = mlp(3, 48, 24), nn.Linear(24, 2), mlp(24, 24, 2)
    model = nn.ModuleDict({"body": body, "head": head, "judge": judge})
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def made(count: int) -> tuple[Tensor, Tensor, Tensor]:
        x, y = moons(count)
        side = torch.randint(2, (count,))
        return torch.cat([x, side[:, None] + 0.3 * torch.randn(count, 1)], 1), y, side

    with watch(model, optimizer, objective="adversarial"):
        for _ in range(450):
            x, y, side = made(64)
            hidden = body(x).relu()
            loss = functional.cross_entropy(head(hidden), y)
            loss = loss + functional.cross_entropy(judge(_Reverse.apply(hidden)), side)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    x, y, _ = made(1000)
    return error_score(head(body(x).relu()), y)


class _LowRank(nn.Module):
    """A frozen layer and a product of two thin matrices, one of which starts at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(base.in_features, 4))
        self.up = nn.Parameter(torch.zeros(4, base.out_features))

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + x @ self.down @ self.up


def friedman_low_rank_tuning(watch: Watch, seed: int) -> float:
    """A trained network is moved to a related task by low-rank updates alone."""
    torch.manual_seed(seed)
    x, y = friedman(1500, noise=0.1)
    layers = [nn.Linear(10, 48), nn.Linear(48, 48), nn.Linear(48, 1)]
    plain = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    first = torch.optim.Adam(plain.parameters(), lr=3e-3)
    for a, b in endless(loader(x, y, size=64), 300):
        first.zero_grad()
        functional.mse_loss(plain(a).squeeze(1), b).backward()
        first.step()
    model = nn.Sequential(_LowRank(layers[0]), nn.Tanh(), _LowRank(layers[1]), nn.Tanh(), _LowRank(layers[2]))
    other = y + x[:, 6] - x[:, 0]
    optimizer = torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], lr=5e-3, weight_decay=0.0)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:1200], other[:1200], size=64), 400):
            optimizer.zero_grad()
            functional.mse_loss(model(a).squeeze(1), b).backward()
            optimizer.step()
    return fit_score(model, x[1200:], other[1200:])


def moons_pruned(watch: Watch, seed: int) -> float:
    """Two thirds of the weights are masked to zero at the start, and stay so."""
    torch.manual_seed(seed)
    model = mlp(2, 96, 96, 2)
    for layer in (model[0], model[2]):
        prune.random_unstructured(layer, "weight", amount=0.66)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for _ in range(400):
            x, y = moons(50, noise=0.15)
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return class_score(model, *moons(1000, noise=0.15))


def digits_half_the_labels_wrong(watch: Watch, seed: int) -> float:
    """Half of the labels are random; the loss stays high, and what is learnt is right."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    noisy = torch.where(torch.rand(len(y)) < 0.5, torch.randint(10, (len(y),)), y)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), mlp(64, 64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, noisy, size=64), 400):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


def iris_one_sample_at_a_time(watch: Watch, seed: int) -> float:
    """Batches of one sample, with layer norm."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("iris", seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with watch(model, optimizer):
        for _ in range(5):
            for row in torch.randperm(len(x)):
                optimizer.zero_grad()
                functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1]).backward()
                optimizer.step()
    return class_score(model, held_x, held_y)


def rings_loss_scaler_hardest_half(watch: Watch, seed: int) -> float:
    """A gradient scaler, and only the hardest half of each batch is learnt from; restarts of the rate."""
    torch.manual_seed(seed)
    x, y = rings(1500)
    model = mlp(2, 64, 64, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=100, T_mult=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with watch(model, optimizer, scheduler=scheduler):
        for a, b in endless(loader(x[:1000], y[:1000], size=64), 400):
            losses = functional.cross_entropy(model(a), b, reduction="none")
            optimizer.zero_grad()
            scaler.scale(losses.topk(len(b) // 2).values.mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    return class_score(model, x[1000:], y[1000:])


def friedman_boosted_stages(watch: Watch, seed: int) -> float:
    """One watch for each of three small networks, that learn what the earlier ones left over."""
    torch.manual_seed(seed)
    x, y = friedman(1500, noise=0.1)
    stages: list[nn.Module] = []
    left = y.clone()
    for stage in range(3):
        model = mlp(10, 16, 1, act=nn.Tanh)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02 / (1 + stage))
        with watch(model, optimizer):
            for a, b in endless(loader(x[:1200], left[:1200], size=64), 250):
                optimizer.zero_grad()
                functional.l1_loss(model(a).squeeze(1), b).backward()
                optimizer.step()
        stages.append(model)
        left = left - 0.7 * model(x).squeeze(1).detach()
    return float(left[1200:].square().mean() / y[1200:].var())


def digits_double_precision_cyclic(watch: Watch, seed: int) -> float:
    """Double precision under a triangular cyclic rate, with spectral norm and dropout by channel."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    inner = nn.utils.parametrizations.spectral_norm(nn.Conv2d(12, 24, 3, padding=1))
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.LeakyReLU(0.1), nn.Dropout2d(0.1), inner, nn.LeakyReLU(0.1)
    )
    model.extend([nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10)]).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.02, 0.2, step_size_up=50, cycle_momentum=False)
    with watch(model, optimizer, scheduler=scheduler):
        for a, b in endless(loader(x.double(), y, size=48), 400):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
            scheduler.step()
    return class_score(model, held_x.double(), held_y)


PROGRAMS = [
    healthy(train)
    for train in (
        iris_full_batch_lbfgs,
        digits_own_optimizer_lion,
        rings_sharpness_aware,
        sines_reptile,
        digits_binary_units_straight_through,
        digits_gradual_unfreezing,
        moons_domain_adversary,
        friedman_low_rank_tuning,
        moons_pruned,
        digits_half_the_labels_wrong,
        iris_one_sample_at_a_time,
        rings_loss_scaler_hardest_half,
        friedman_boosted_stages,
        digits_double_precision_cyclic,
    )
]
