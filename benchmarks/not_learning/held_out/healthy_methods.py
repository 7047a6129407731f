"""Healthy programs with unusual ways to step: closures, two backwards, inner loops, made weights, noise, experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.not_learning.held_out.data import digits, moons, table
from benchmarks.not_learning.held_out.entry import error_score, healthy, squared_score
from benchmarks.not_learning.program import Watch


def lbfgs_logistic(watch: Watch, seed: int) -> float:
    """L-BFGS with a closure, many backwards per step, weight decay by hand in the loss."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("breast_cancer", seed)
    model = nn.Linear(30, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=10, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + 1e-3 * model.weight.square().sum()
        loss.backward()
        return loss

    with watch(model, optimizer):
        for _ in range(40):
            optimizer.step(closure)
    return error_score(model(held_x), held_y)


class _SAM(torch.optim.Optimizer):
    """Sharpness-aware: climb a little, take the gradient there, come back and step."""

    def __init__(self, params: Iterable[nn.Parameter], inner: type[torch.optim.Optimizer], **kwargs: Any) -> None:
        super().__init__(params, {"rho": 0.05, **kwargs})
        self.inner = inner(self.param_groups, **kwargs)
        self.param_groups = self.inner.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        grads = [p.grad for g in self.param_groups for p in g["params"]]
        norm = torch.stack([g.norm() for g in grads]).norm() + 1e-12
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["shift"] = p.grad * (group["rho"] / norm)
                p.add_(self.state[p]["shift"])
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.state[p]["shift"])
        self.inner.step(closure)
        self.zero_grad()


def sharpness_aware(watch: Watch, seed: int) -> float:
    """Two forward and backward passes per update, weights moved in between by hand."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(432, 10))
    opt = _SAM(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with watch(net, opt):
        for _ in range(250):
            i = torch.randint(len(x), (32,))
            F.cross_entropy(net(x[i]), y[i]).backward()
            opt.climb()
            F.cross_entropy(net(x[i]), y[i]).backward()
            opt.step()
    return error_score(net(held_x), held_y)


def meta_learnt_sines(watch: Watch, seed: int) -> float:
    """Model-agnostic meta-learning: inner steps by autograd.grad with a graph, one outer step for four tasks."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
    meta = torch.optim.Adam(net.parameters(), lr=3e-3)

    def adapted(phase: torch.Tensor, amp: torch.Tensor) -> torch.Tensor:
        weights = dict(net.named_parameters())
        x = torch.rand(20, 1) * 6 - 3
        for _ in range(3):
            loss = F.mse_loss(torch.func.functional_call(net, weights, x), amp * (x + phase).sin())
            grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {k: w - 0.05 * g for (k, w), g in zip(weights.items(), grads, strict=True)}
        q = torch.rand(20, 1) * 6 - 3
        return F.mse_loss(torch.func.functional_call(net, weights, q), amp * (q + phase).sin())

    history = []
    with watch(net, meta):
        for _ in range(220):
            meta.zero_grad()
            for _ in range(4):
                loss = adapted(torch.rand(()) * 1.5, 0.5 + torch.rand(()) * 1.5) / 4
                loss.backward()
                history.append(loss.item() * 4)
            meta.step()
    return sum(history[-80:]) / sum(history[:80])


class _Hyper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 16 * 3 + 1))
        nn.init.normal_(self.trunk[2].weight, std=0.05)

    def forward(self, task: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        made = self.trunk(task)
        w1, b1, w2 = made[:, :48].view(-1, 3, 16).unbind(1)
        hidden = (torch.einsum("bn,bh->bnh", x, 3 * w1) + 3 * b1[:, None]).sin()
        return torch.einsum("bnh,bh->bn", hidden, w2) + made[:, 48:]


def hypernetwork_of_waves(watch: Watch, seed: int) -> float:
    """A network makes the weights of another, which holds no parameters at all; MultiStepLR, einsum."""
    torch.manual_seed(seed)
    model = _Hyper()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[400, 600], gamma=0.3)

    def sample(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        task, x = torch.rand(count, 2), torch.rand(count, 24) * 4 - 2
        return task, x, (0.5 + task[:, :1]) * (1.5 * x + task[:, 1:]).sin()

    with watch(model, optimizer, scheduler=scheduler, total_steps=700):
        for _ in range(700):
            task, x, y = sample(24)
            loss = (model(task, x) - y).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    task, x, y = sample(200)
    return squared_score(model(task, x), y)


class _SGLD(torch.optim.Optimizer):
    """Gradient descent with noise: samples of a posterior rather than a minimum."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, temperature: float) -> None:
        super().__init__(params, {"lr": lr, "temperature": temperature})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is None
        for group in self.param_groups:
            noise = math.sqrt(2 * group["lr"] * group["temperature"])
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"]).add_(torch.randn_like(p), alpha=noise)


def langevin_posterior(watch: Watch, seed: int) -> float:
    """A hand-made optimizer that adds noise, on a Gaussian likelihood with negative values."""
    torch.manual_seed(seed)
    x = torch.rand(400, 1) * 4 - 2
    y = x.cos() + 0.05 * torch.randn(400, 1)
    net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
    opt = _SGLD(net.parameters(), lr=0.02, temperature=1e-5)
    nll = nn.GaussianNLLLoss()
    with watch(net, opt):
        for _ in range(900):
            i = torch.randint(400, (40,))
            loss = nll(net(x[i]), y[i], torch.full((40, 1), 0.1))
            opt.zero_grad()
            loss.backward()
            opt.step()
    return squared_score(net(x), y)


def heteroscedastic_noise(watch: Watch, seed: int) -> float:
    """Mean and variance are both learnt by GaussianNLLLoss: the loss becomes negative."""
    torch.manual_seed(seed)
    x = torch.rand(1000, 1) * 2 - 1
    y = 0.3 * x**2 + (0.02 + 0.08 * (x > 0)) * torch.randn(1000, 1)
    model = nn.Sequential(nn.Linear(1, 48), nn.Softplus(), nn.Linear(48, 48), nn.Softplus(), nn.Linear(48, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    criterion = nn.GaussianNLLLoss(eps=1e-4)
    with watch(model, optimizer) as watching:
        for epoch in range(40):
            for rows in torch.randperm(800).split(50):
                mean, raw = model(x[rows]).chunk(2, 1)
                loss = criterion(mean, y[rows], F.softplus(raw))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if epoch % 5 == 4:
                with torch.no_grad():
                    mean, raw = model(x[800:]).chunk(2, 1)
                    watching.validated(criterion(mean, y[800:], F.softplus(raw)).item())
    return squared_score(model(x[800:])[:, :1], 0.3 * x[800:] ** 2)


class _Experts(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.gate = nn.Linear(2, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(1).max(1)
        out = torch.zeros(len(x), 2)
        for k, expert in enumerate(self.experts):
            mine = chosen == k
            if mine.any():
                out[mine] = expert(x[mine]) * weight[mine, None]
        return out


def experts_some_never_chosen(watch: Watch, seed: int) -> float:
    """Each point is sent to one expert of six; some experts are chosen seldom or never and get no gradient."""
    torch.manual_seed(seed)
    model = _Experts()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for _ in range(400):
            x, y = moons(64)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    x, y = moons(1000)
    return error_score(model(x), y)


def perceptron_with_hinge(watch: Watch, seed: int) -> float:
    """A linear machine on separable data: the hinge loss reaches exactly 0 and all gradients with it."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("iris", seed)
    sign = torch.where(y == 0, 1.0, -1.0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for _ in range(400):
            i = torch.randperm(len(x))[:32]
            loss = (1 - sign[i] * model(x[i])[:, 0]).clamp(min=0).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    score = model(held_x)
    return error_score(torch.cat([-score, score], 1), (held_y == 0).long())


class _Loop:
    """A trainer class as people write it for themselves: callbacks, early stopping, best weights."""

    def __init__(self, model: nn.Module, opt: torch.optim.Optimizer, plateau: Any) -> None:
        self.model, self.opt, self.plateau = model, opt, plateau
        self.best, self.bad = math.inf, 0

    def epoch(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.model.train()
        for rows in torch.randperm(len(x)).split(50):
            self.opt.zero_grad()
            nn.L1Loss()(self.model(x[rows]), y[rows]).backward()
            self.opt.step()

    @torch.no_grad()
    def evaluate(self, x: torch.Tensor, y: torch.Tensor) -> float:
        self.model.eval()
        loss = nn.L1Loss()(self.model(x), y).item()
        self.plateau.step(loss)
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return loss


def trainer_with_early_stopping(watch: Watch, seed: int) -> float:
    """ReduceLROnPlateau on the validation loss of each epoch, early stopping; rings that a line cannot part."""
    torch.manual_seed(seed)
    x = torch.randn(700, 2)
    y = x.norm(dim=1, keepdim=True).sin()
    model = nn.Sequential(
        nn.Linear(2, 48), nn.Hardswish(), nn.Linear(48, 48), nn.LayerNorm(48), nn.Hardswish(), nn.Linear(48, 1)
    )
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=3)
    loop = _Loop(model, opt, plateau)
    with watch(model, opt, scheduler=plateau) as watching:
        for _ in range(60):
            loop.epoch(x[:500], y[:500])
            watching.validated(loop.evaluate(x[500:], y[500:]))
            if loop.bad > 12:
                break
    return squared_score(model(x[500:]), y[500:])


def masked_columns(watch: Watch, seed: int) -> float:
    """Self-supervision on a table: masked cells are guessed from the others by attention over columns."""
    torch.manual_seed(seed)
    x, _, held, _ = table("wine", seed)
    value, column = nn.Linear(1, 16), nn.Parameter(torch.randn(13, 16) * 0.2)
    attend = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    out = nn.Linear(16, 1)
    model = nn.ModuleDict({"value": value, "attend": attend, "out": out})
    model.register_parameter("column", column)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def guess(rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        shown = rows.masked_fill(hidden, 0)
        return out(attend(value(shown[..., None]) + column * (1 + hidden[..., None].float())))[..., 0]

    with watch(model, opt):
        for _ in range(400):
            rows = x[torch.randint(len(x), (32,))]
            hidden = torch.rand_like(rows) < 0.2
            loss = ((guess(rows, hidden) - rows) ** 2)[hidden].mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    model.eval()
    hidden = torch.rand_like(held) < 0.2
    return squared_score(guess(held, hidden)[hidden], held[hidden])


PROGRAMS = [
    healthy(lbfgs_logistic),
    healthy(sharpness_aware),
    healthy(meta_learnt_sines),
    healthy(hypernetwork_of_waves),
    healthy(langevin_posterior),
    healthy(heteroscedastic_noise),
    healthy(experts_some_never_chosen),
    healthy(perceptron_with_hinge),
    healthy(trainer_with_early_stopping),
    healthy(masked_columns),
]
