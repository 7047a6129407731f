"""Healthy programs of the set: methods."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, adamw, healthy, sgd, update


class _SAM(optim.Optimizer):
    """Sharpness-aware: climb a little, take the gradient there, come back and step."""

    def __init__(self, params: Iterable[nn.Parameter], inner: type[optim.Optimizer], **kwargs: Any) -> None:
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


class _Hyper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = parts.mlp(2, 48, 16 * 3 + 1)
        nn.init.normal_(self.trunk[2].weight, std=0.05)

    def forward(self, task: Tensor, x: Tensor) -> Tensor:
        made = self.trunk(task)
        w1, b1, w2 = made[:, :48].view(-1, 3, 16).unbind(1)
        hidden = (torch.einsum("bn,bh->bnh", x, 3 * w1) + 3 * b1[:, None]).sin()
        return torch.einsum("bnh,bh->bn", hidden, w2) + made[:, 48:]


class _SGLD(optim.Optimizer):
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


class _Experts(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.gate = nn.Linear(2, count)
        self.experts = nn.ModuleList(parts.mlp(2, 16, 2) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(1).max(1)
        out = torch.zeros(len(x), 2)
        for k, expert in enumerate(self.experts):
            mine = chosen == k
            if mine.any():
                out[mine] = expert(x[mine]) * weight[mine, None]
        return out


class _Loop:
    """A trainer class as people write it for themselves: callbacks, early stopping, best weights."""

    def __init__(self, model: nn.Module, opt: optim.Optimizer, plateau: Any) -> None:
        self.model, self.opt, self.plateau = model, opt, plateau
        self.best, self.bad = math.inf, 0

    def epoch(self, x: Tensor, y: Tensor) -> None:
        self.model.train()
        for rows in torch.randperm(len(x)).split(50):
            self.opt.zero_grad()
            nn.L1Loss()(self.model(x[rows]), y[rows]).backward()
            self.opt.step()

    @torch.no_grad()
    def evaluate(self, x: Tensor, y: Tensor) -> float:
        self.model.eval()
        loss = nn.L1Loss()(self.model(x), y).item()
        self.plateau.step(loss)
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return loss


class HealthyMethods(Programs):
    """Unusual ways to step: closures, two backwards, inner loops, made weights, noise, experts."""

    @healthy
    def lbfgs_logistic(self) -> None:
        """L-BFGS with a closure, many backwards per step, weight decay by hand in the loss."""
        x, y, *_ = data.table("breast_cancer", self.seed)
        model = nn.Linear(30, 2)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = optim.LBFGS(model.parameters(), lr=0.5, max_iter=10, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y) + 0.001 * model.weight.square().sum()
            loss.backward()
            return loss

        for _ in self.watched(range(40), model, optimizer):
            optimizer.step(closure)

    @healthy
    def sharpness_aware(self) -> None:
        """Two forward and backward passes per update, weights moved in between by hand."""
        net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(432, 10))
        opt = _SAM(net.parameters(), optim.SGD, lr=0.1, momentum=0.9)
        for a, b in self.watched(data.draws(data.digit_images(self.seed), 32, 250), net, opt):
            F.cross_entropy(net(a), b).backward()
            opt.climb()
            F.cross_entropy(net(a), b).backward()
            opt.step()

    @healthy
    def meta_learnt_sines(self) -> None:
        """Model-agnostic meta-learning: inner steps by autograd.grad with a graph, one outer step for four tasks."""
        net = parts.mlp(1, 32, 32, 1, act=nn.Tanh)
        meta = adam(net, 0.003)

        def adapted(phase: Tensor, amp: Tensor) -> Tensor:
            weights = dict(net.named_parameters())
            x = torch.rand(20, 1) * 6 - 3
            for _ in range(3):
                loss = F.mse_loss(torch.func.functional_call(net, weights, x), amp * (x + phase).sin())
                grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                weights = {k: w - 0.05 * g for (k, w), g in zip(weights.items(), grads, strict=True)}
            q = torch.rand(20, 1) * 6 - 3
            return F.mse_loss(torch.func.functional_call(net, weights, q), amp * (q + phase).sin())

        history = []
        for _ in self.watched(range(220), net, meta):
            meta.zero_grad()
            for _ in range(4):
                loss = adapted(torch.rand(()) * 1.5, 0.5 + torch.rand(()) * 1.5) / 4
                loss.backward()
                history.append(loss.item() * 4)
            meta.step()

    @healthy
    def hypernetwork_of_waves(self) -> None:
        """A network makes the weights of another, which holds no parameters at all; MultiStepLR, einsum."""
        model = _Hyper()
        optimizer = adam(model, 0.003)
        scheduler = optim.lr_scheduler.MultiStepLR(optimizer, milestones=[400, 600], gamma=0.3)

        def sample(count: int) -> tuple[Tensor, Tensor, Tensor]:
            task, x = torch.rand(count, 2), torch.rand(count, 24) * 4 - 2
            return (task, x, (0.5 + task[:, :1]) * (1.5 * x + task[:, 1:]).sin())

        for _ in self.watched(range(700), model, optimizer, scheduler=scheduler, total_steps=700):
            task, x, y = sample(24)
            update(optimizer, (model(task, x) - y).pow(2).mean())
            scheduler.step()

    @healthy
    def langevin_posterior(self) -> None:
        """A hand-made optimizer that adds noise, on a Gaussian likelihood with negative values."""
        x = torch.rand(400, 1) * 4 - 2
        y = x.cos() + 0.05 * torch.randn(400, 1)
        net = parts.mlp(1, 32, 1, act=nn.Tanh)
        opt = _SGLD(net.parameters(), lr=0.02, temperature=1e-05)
        nll = nn.GaussianNLLLoss()
        for _ in self.watched(range(900), net, opt):
            i = torch.randint(400, (40,))
            update(opt, nll(net(x[i]), y[i], torch.full((40, 1), 0.1)))

    @healthy
    def heteroscedastic_noise(self) -> None:
        """Mean and variance are both learnt by GaussianNLLLoss: the loss becomes negative."""
        x = torch.rand(1000, 1) * 2 - 1
        y = 0.3 * x**2 + (0.02 + 0.08 * (x > 0)) * torch.randn(1000, 1)
        model = parts.mlp(1, 48, 48, 2, act=nn.Softplus)
        criterion = nn.GaussianNLLLoss(eps=0.0001)
        for epoch in self.watched(range(40), model, adam(model, 0.005)):
            for rows in torch.randperm(800).split(50):
                mean, raw = model(x[rows]).chunk(2, 1)
                self.update(criterion(mean, y[rows], F.softplus(raw)))
            if epoch % 5 == 4:
                with torch.no_grad():
                    mean, raw = model(x[800:]).chunk(2, 1)
                    self.watching.validated(criterion(mean, y[800:], F.softplus(raw)).item())

    @healthy
    def experts_some_never_chosen(self) -> None:
        """Each point is sent to one expert of six; some experts are chosen seldom or never and get no gradient."""
        model = _Experts()
        for _ in self.watched(range(400), model, adam(model, 0.01)):
            x, y = data.moons(64)
            self.update(F.cross_entropy(model(x), y))

    @healthy
    def perceptron_with_hinge(self) -> None:
        """A linear machine on separable data: the hinge loss reaches exactly 0 and all gradients with it."""
        x, y, *_ = data.table("iris", self.seed)
        sign = torch.where(y == 0, 1.0, -1.0)
        model = nn.Linear(4, 1)
        for _ in self.watched(range(400), model, sgd(model, 0.05)):
            i = torch.randperm(len(x))[:32]
            self.update((1 - sign[i] * model(x[i])[:, 0]).clamp(min=0).mean())

    @healthy
    def trainer_with_early_stopping(self) -> None:
        """ReduceLROnPlateau on the validation loss of each epoch, early stopping; rings that a line cannot part."""
        x = torch.randn(700, 2)
        y = x.norm(dim=1, keepdim=True).sin()
        model = nn.Sequential(
            nn.Linear(2, 48), nn.Hardswish(), nn.Linear(48, 48), nn.LayerNorm(48), nn.Hardswish(), nn.Linear(48, 1)
        )
        opt = adamw(model, 0.01)
        plateau = optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=3)
        loop = _Loop(model, opt, plateau)
        for _ in self.watched(range(60), model, opt, scheduler=plateau):
            loop.epoch(x[:500], y[:500])
            self.watching.validated(loop.evaluate(x[500:], y[500:]))
            if loop.bad > 12:
                break

    @healthy
    def masked_columns(self) -> None:
        """Self-supervision on a table: masked cells are guessed from the others by attention over columns."""
        x, *_ = data.table("wine", self.seed)
        value, column = nn.Linear(1, 16), nn.Parameter(torch.randn(13, 16) * 0.2)
        attend = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        out = nn.Linear(16, 1)
        model = nn.ModuleDict({"value": value, "attend": attend, "out": out})
        model.register_parameter("column", column)

        def guess(rows: Tensor, hidden: Tensor) -> Tensor:
            shown = rows.masked_fill(hidden, 0)
            return out(attend(value(shown[..., None]) + column * (1 + hidden[..., None].float())))[..., 0]

        for _ in self.watched(range(400), model, adamw(model, 0.003)):
            rows = x[torch.randint(len(x), (32,))]
            hidden = torch.rand_like(rows) < 0.2
            self.update(((guess(rows, hidden) - rows) ** 2)[hidden].mean())
