"""Healthy programs of the set: methods."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.nn.utils import prune

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, healthy, sgd, update


class _Lion(optim.Optimizer):
    """The sign of a moving average, with decoupled decay."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "decay": 0.01})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["decay"])
                weight.sub_(group["lr"] * (0.9 * mean + 0.1 * weight.grad).sign())
                mean.lerp_(weight.grad, 0.01)


class _Sign(torch.autograd.Function):
    """The sign, whose gradient passes within one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx: Any, *above: Any) -> Any:
        return above[0] * (ctx.saved_tensors[0].abs() < 1)


class _Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned round."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, *above: Any) -> Any:
        return -0.3 * above[0]


class _LowRank(nn.Module):
    """A frozen layer and a product of two thin matrices, one of which starts at zero."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(base.in_features, 4))
        self.up = nn.Parameter(torch.zeros(4, base.out_features))

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + x @ self.down @ self.up


class HealthyMethods(Programs):
    """Healthy programs with unusual loops.

    Other optimizers, other steps, other roles of parameters, odd batches.
    """

    @healthy
    def iris_full_batch_lbfgs(self) -> None:
        """Quasi-Newton steps with a closure on all data at once."""
        x, y, *_ = data.table("iris", self.seed)
        model = parts.mlp(4, 8, 3, act=nn.Tanh)
        optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            penalty = sum(weight.square().sum() for weight in model.parameters())
            loss = F.cross_entropy(model(x), y) + 0.001 * penalty
            loss.backward()
            return loss

        for _ in self.watched(range(250), model, optimizer):
            optimizer.step(closure)

    @healthy
    def digits_own_optimizer_lion(self) -> None:
        """An optimizer of one's own, with a linear schedule."""
        x, y, *_ = data.digit_images(self.seed)
        model = parts.small_cnn()
        optimizer = _Lion(model.parameters(), lr=0.002)
        scheduler = optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=300)
        stream = data.stream((x, y), 64, 300)
        self.fit(model, optimizer, stream, F.cross_entropy, scheduler=scheduler, total_steps=300)

    @healthy
    def rings_sharpness_aware(self) -> None:
        """Two backward passes for each step, the second one at weights moved uphill."""
        x, y = data.rings(1000)
        model = parts.mlp(2, 48, 48, 3)
        optimizer = sgd(model, 0.1, momentum=0.9)
        for a, b in self.watched(data.stream((x[:700], y[:700]), 32, 400), model, optimizer):
            optimizer.zero_grad()
            F.cross_entropy(model(a), b).backward()
            slopes = [weight.grad for weight in model.parameters() if weight.grad is not None]
            size = torch.stack([slope.norm() for slope in slopes]).norm() + 1e-12
            moves = [0.05 * slope / size for slope in slopes]
            with torch.no_grad():
                for weight, move in zip(model.parameters(), moves, strict=True):
                    weight.add_(move)
            optimizer.zero_grad()
            F.cross_entropy(model(a), b).backward()
            with torch.no_grad():
                for weight, move in zip(model.parameters(), moves, strict=True):
                    weight.sub_(move)
            optimizer.step()

    @healthy
    def sines_reptile(self) -> None:
        """Meta-learning by Reptile.

        Inner steps on a copy, and the difference is the outer gradient.
        """
        model = parts.mlp(1, 40, 40, 1, act=nn.Tanh)
        optimizer = adam(model, 0.005)

        def adapted(steps: int, shift: Tensor) -> nn.Module:
            inner = copy.deepcopy(model)
            fast = sgd(inner, 0.05)
            for _ in range(steps):
                x = 6 * torch.rand(20, 1) - 3
                update(fast, F.mse_loss(inner(x), (x + shift).sin() + 2))
            return inner

        for _ in self.watched(range(250), model, optimizer):
            inner = adapted(5, 0.5 * torch.rand(1))
            for weight, moved in zip(model.parameters(), inner.parameters(), strict=True):
                weight.grad = (weight - moved).detach()
            optimizer.step()

    @healthy
    def digits_binary_units_straight_through(self) -> None:
        """Units of plus or minus one, with a backward pass of one's own."""
        model = parts.Wired(
            lambda self, x: self.last(_Sign.apply(self.norm(self.first(x.flatten(1))))),
            first=nn.Linear(64, 128),
            norm=nn.BatchNorm1d(128),
            last=nn.Linear(128, 10),
        )
        self.fit(
            model,
            adam(model, 0.003),
            data.stream(data.digit_images(self.seed), 64, 350),
            F.cross_entropy,
        )

    @healthy
    def digits_gradual_unfreezing(self) -> None:
        """The body is frozen for the first third, and has a tenth of the head's rate then."""
        x, y, *_ = data.digit_images(self.seed)
        body, head = parts.mlp(64, 96, 48), nn.Linear(48, 10)
        model = nn.Sequential(nn.Flatten(), body, nn.ReLU(), head)
        body.requires_grad_(False)
        groups = [
            {"params": body.parameters(), "lr": 0.001},
            {"params": head.parameters(), "lr": 0.01},
        ]
        optimizer = optim.Adam(groups)
        for step, (a, b) in self.watched(enumerate(data.stream((x, y), 64, 400)), model, optimizer):
            if step == 130:
                body.requires_grad_(True)
            update(optimizer, F.cross_entropy(model(a), b))

    @healthy
    def moons_domain_adversary(self) -> None:
        """A classifier whose features shall not tell the domain, in one optimizer, by a reversed
        gradient.
        """
        body, head, judge = parts.mlp(3, 48, 24), nn.Linear(24, 2), parts.mlp(24, 24, 2)
        model = nn.ModuleDict({"body": body, "head": head, "judge": judge})

        def made(count: int) -> tuple[Tensor, Tensor, Tensor]:
            x, y = data.moons(count)
            side = torch.randint(2, (count,))
            return (torch.cat([x, side[:, None] + 0.3 * torch.randn(count, 1)], 1), y, side)

        for _ in self.watched(range(450), model, adam(model, 0.003), objective="adversarial"):
            x, y, side = made(64)
            hidden = body(x).relu()
            loss = F.cross_entropy(head(hidden), y)
            self.update(loss + F.cross_entropy(judge(_Reverse.apply(hidden)), side))

    @healthy
    def friedman_low_rank_tuning(self) -> None:
        """A trained network is moved to a related task by low-rank updates alone."""
        x, y = data.friedman(1500, noise=0.1)
        layers = [nn.Linear(10, 48), nn.Linear(48, 48), nn.Linear(48, 1)]
        plain = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
        first = adam(plain, 0.003)
        for a, b in data.stream((x, y), 64, 300):
            update(first, F.mse_loss(plain(a).squeeze(1), b))
        model = nn.Sequential(
            _LowRank(layers[0]), nn.Tanh(), _LowRank(layers[1]), nn.Tanh(), _LowRank(layers[2])
        )
        other = y + x[:, 6] - x[:, 0]
        optimizer = optim.AdamW(
            [w for w in model.parameters() if w.requires_grad], lr=0.005, weight_decay=0.0
        )
        stream = data.stream((x[:1200], other[:1200]), 64, 400)
        self.descend(model, optimizer, stream, lambda a, b: F.mse_loss(model(a).squeeze(1), b))

    @healthy
    def moons_pruned(self) -> None:
        """Two thirds of the weights are masked to zero at the start, and stay so."""
        model = parts.mlp(2, 96, 96, 2)
        for layer in (model[0], model[2]):
            prune.random_unstructured(layer, "weight", amount=0.66)
        for _ in self.watched(range(400), model, adam(model, 0.003)):
            x, y = data.moons(50, noise=0.15)
            self.update(F.cross_entropy(model(x), y))

    @healthy
    def digits_half_the_labels_wrong(self) -> None:
        """Half of the labels are random; the loss stays high, and what is learnt is right."""
        x, y, *_ = data.digit_images(self.seed)
        noisy = torch.where(torch.rand(len(y)) < 0.5, torch.randint(10, (len(y),)), y)
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), parts.mlp(64, 64, 10))
        optimizer = sgd(model, 0.05, momentum=0.9, weight_decay=0.001)
        self.fit(model, optimizer, data.stream((x, noisy), 64, 400), F.cross_entropy)

    @healthy
    def iris_one_sample_at_a_time(self) -> None:
        """Batches of one sample, with layer norm."""
        x, y, *_ = data.table("iris", self.seed)
        model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3))
        for _ in self.watched(range(5), model, sgd(model, 0.02)):
            for row in torch.randperm(len(x)):
                self.update(F.cross_entropy(model(x[row : row + 1]), y[row : row + 1]))

    @healthy
    def rings_loss_scaler_hardest_half(self) -> None:
        """A gradient scaler, and only the hardest half of each batch is learnt from.

        Restarts of the rate.
        """
        x, y = data.rings(1500)
        model = parts.mlp(2, 64, 64, 3)
        optimizer = sgd(model, 0.1, momentum=0.9)
        scheduler = optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=100, T_mult=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for a, b in self.watched(
            data.stream((x[:1000], y[:1000]), 64, 400), model, optimizer, scheduler=scheduler
        ):
            losses = F.cross_entropy(model(a), b, reduction="none")
            optimizer.zero_grad()
            scaler.scale(losses.topk(len(b) // 2).values.mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()

    @healthy
    def friedman_boosted_stages(self) -> None:
        """One watch for each of three small networks, that learn what the earlier ones left
        over.
        """
        x, y = data.friedman(1500, noise=0.1)
        stages: list[nn.Module] = []
        left = y.clone()
        for stage in range(3):
            model = parts.mlp(10, 16, 1, act=nn.Tanh)
            optimizer = adam(model, 0.02 / (1 + stage))
            with self.watch(model, optimizer):
                for a, b in data.stream((x[:1200], left[:1200]), 64, 250):
                    update(optimizer, F.l1_loss(model(a).squeeze(1), b))
            stages.append(model)
            left = left - 0.7 * model(x).squeeze(1).detach()
        return float(left[1200:].square().mean() / y[1200:].var())

    @healthy
    def digits_double_precision_cyclic(self) -> None:
        """Double precision under a triangular cyclic rate, with spectral norm and dropout by
        channel.
        """
        x, y, *_ = data.digit_images(self.seed)
        inner = nn.utils.parametrizations.spectral_norm(nn.Conv2d(12, 24, 3, padding=1))
        model = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.LeakyReLU(0.1),
            nn.Dropout2d(0.1),
            inner,
            nn.LeakyReLU(0.1),
        )
        model.extend([nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10)]).double()
        optimizer = sgd(model, 0.02, momentum=0.9)
        scheduler = optim.lr_scheduler.CyclicLR(
            optimizer, 0.02, 0.2, step_size_up=50, cycle_momentum=False
        )
        stream = data.stream((x.double(), y), 48, 400)
        self.fit(model, optimizer, stream, F.cross_entropy, scheduler=scheduler)
