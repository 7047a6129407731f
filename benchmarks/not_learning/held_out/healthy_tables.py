"""Healthy programs on tables: regression, classification, ranking, recommendation, survival."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.not_learning.held_out.data import community, ratings, table
from benchmarks.not_learning.held_out.entry import error_score, healthy, squared_score
from benchmarks.not_learning.program import Watch


def wine_selu(watch: Watch, seed: int) -> float:
    """Full-batch SGD with momentum on a small table, log-probabilities into CrossEntropyLoss (which is harmless)."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("wine", seed)
    net = nn.Sequential(nn.Linear(13, 24), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(24, 3), nn.LogSoftmax(dim=1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    with watch(net, opt, total_steps=300):
        for _ in range(300):
            opt.zero_grad()
            criterion(net(x), y).backward()
            opt.step()
    net.eval()
    return error_score(net(held_x), held_y)


def diabetes_quantiles(watch: Watch, seed: int) -> float:
    """A pinball loss written by hand, three quantiles at once, RMSprop, targets left in their own units."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("diabetes", seed)
    quantiles = torch.tensor([0.1, 0.5, 0.9])
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
    opt = torch.optim.RMSprop(net.parameters(), lr=0.02)

    def pinball(guess: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        error = target[:, None] - guess
        return torch.maximum(quantiles * error, (quantiles - 1) * error).mean()

    with watch(net, opt) as watching:
        for epoch in range(60):
            for rows in torch.randperm(len(x)).split(64):
                opt.zero_grad()
                pinball(net(x[rows]), y[rows]).backward()
                opt.step()
            if epoch % 10 == 9:
                with torch.no_grad():
                    watching.validated(pinball(net(held_x), held_y).item())
    return squared_score(net(held_x)[:, 1], held_y)


class _Prototypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
        self.centres = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -torch.cdist(self.encoder(x), self.centres)


def iris_prototypes(watch: Watch, seed: int) -> float:
    """Distances to learnt prototypes as logits, Adagrad with a rate that would be high for others."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("iris", seed)
    model = _Prototypes()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        for _ in range(60):
            for rows in torch.randperm(len(x)).split(16):
                loss = F.cross_entropy(model(x[rows]), y[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return error_score(model(held_x), held_y)


def rare_positives_focal(watch: Watch, seed: int) -> float:
    """Three per cent of positives, a focal loss on sigmoids by hand, NAdam; most batches hold few positives."""
    torch.manual_seed(seed)
    x = torch.randn(4000, 12)
    y = ((x[:, 0] * x[:, 1] + x[:, 2]) > 2.6).float()
    net = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
    net[-1].bias.data.fill_(-math.log(0.97 / 0.03))
    opt = torch.optim.NAdam(net.parameters(), lr=3e-3)

    def focal(logit: torch.Tensor, target: torch.Tensor, gamma: float = 2.0) -> torch.Tensor:
        p = logit.sigmoid()
        pt = p * target + (1 - p) * (1 - target)
        return (-((1 - pt) ** gamma) * pt.clamp_min(1e-6).log()).mean()

    with watch(net, opt):
        for _ in range(8):
            for rows in torch.randperm(len(x)).split(64):
                opt.zero_grad()
                focal(net(x[rows]).squeeze(1), y[rows]).backward()
                opt.step()
    score = net(x).squeeze(1)
    order = score.argsort(descending=True)[: int(y.sum())]
    return float(1 - y[order].mean())


def cancer_pos_weight_accumulated(watch: Watch, seed: int) -> float:
    """Four micro-batches per update, each divided by four; Nesterov SGD, PolynomialLR, class weights."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("breast_cancer", seed)
    model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Mish(), nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    accum, epochs = 4, 60
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=epochs * 3, power=1.0)
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(0.6))
    with watch(model, optimizer, scheduler=scheduler, total_steps=epochs * 3):
        for _ in range(epochs):
            model.train()
            for i, rows in enumerate(torch.randperm(len(x))[:384].split(32)):
                loss = criterion(model(x[rows]).flatten(), y[rows].float()) / accum
                loss.backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
    model.eval()
    logits = model(held_x)
    return error_score(torch.cat([-logits, logits], 1), held_y)


class _Factors(nn.Module):
    def __init__(self, users: int, films: int) -> None:
        super().__init__()
        self.user = nn.Embedding(users, 8, sparse=True)
        self.film = nn.Embedding(films, 8, sparse=True)
        self.user_bias = nn.Embedding(users, 1, sparse=True)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.film.weight, std=0.1)
        nn.init.zeros_(self.user_bias.weight)

    def forward(self, user: torch.Tensor, film: torch.Tensor) -> torch.Tensor:
        return 3.5 + torch.einsum("bd,bd->b", self.user(user), self.film(film)) + self.user_bias(user)[:, 0]


def recommender_sparse(watch: Watch, seed: int) -> float:
    """Matrix factorisation with sparse gradients and SparseAdam; most rows get no gradient in a batch."""
    torch.manual_seed(seed)
    user, film, score = ratings(seed)
    model = _Factors(120, 80)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.02)
    with watch(model, optimizer):
        for _ in range(12):
            for rows in torch.randperm(5000).split(128):
                optimizer.zero_grad()
                loss = F.mse_loss(model(user[rows], film[rows]), score[rows])
                loss.backward()
                optimizer.step()
    return squared_score(model(user[5000:], film[5000:]), score[5000:])


def graph_full_batch(watch: Watch, seed: int) -> float:
    """A graph network in matrix form: every step sees the same whole graph, half the features dropped."""
    torch.manual_seed(seed)
    adjacency, features, labels = community(seed)
    known = torch.randperm(len(labels))[:60]
    first, second = nn.Linear(16, 16), nn.Linear(16, 3)
    net = nn.ModuleDict({"first": first, "second": second})
    opt = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)

    def forward(*, training: bool) -> torch.Tensor:
        hidden = F.dropout(features, 0.5, training)
        hidden = F.relu(first(adjacency @ hidden))
        return F.log_softmax(adjacency @ second(F.dropout(hidden, 0.5, training)), dim=1)

    with watch(net, opt, total_steps=200):
        for _ in range(200):
            net.train()
            opt.zero_grad()
            F.nll_loss(forward(training=True)[known], labels[known]).backward()
            opt.step()
    return error_score(forward(training=False), labels)


def ranking_pairs(watch: Watch, seed: int) -> float:
    """A margin ranking of pairs, learnt so well that many batches end with a loss and gradients of exactly 0."""
    torch.manual_seed(seed)
    x = torch.randn(600, 8)
    worth = x @ torch.linspace(-1, 1, 8) + x[:, 0].clamp_min(0)
    scorer = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    opt = torch.optim.Adam(scorer.parameters(), lr=5e-3)
    with watch(scorer, opt):
        for _ in range(500):
            left, right = torch.randint(600, (2, 32))
            keep = (worth[left] - worth[right]).abs() > 0.5
            left, right = left[keep], right[keep]
            sign = (worth[left] - worth[right]).sign()
            loss = F.margin_ranking_loss(scorer(x[left])[:, 0], scorer(x[right])[:, 0], sign, margin=0.1)
            opt.zero_grad()
            loss.backward()
            opt.step()
    left, right = torch.randint(600, (2, 2000))
    wrong = (scorer(x[left])[:, 0] > scorer(x[right])[:, 0]) != (worth[left] > worth[right])
    return float(wrong.float().mean() * 2)


def bike_counts_poisson(watch: Watch, seed: int) -> float:
    """Counts by a Poisson likelihood, whose value is negative for large counts; Adamax, StepLR per epoch."""
    torch.manual_seed(seed)
    x = torch.rand(1500, 3) * torch.tensor([24.0, 7.0, 30.0])
    rate = (2 + (x[:, 0] * math.pi / 12).sin() + 0.03 * x[:, 2]).exp()
    counts = torch.poisson(rate)
    inputs = (x - x.mean(0)) / x.std(0)
    model = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adamax(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    loss_fn = nn.PoissonNLLLoss(log_input=True)
    with watch(model, optimizer, scheduler=scheduler):
        for _ in range(30):
            for rows in torch.randperm(1200).split(80):
                optimizer.zero_grad(set_to_none=False)
                loss = loss_fn(model(inputs[rows]).view(-1), counts[rows])
                loss.backward()
                optimizer.step()
            scheduler.step()
    return squared_score(model(inputs[1200:]).view(-1).exp(), rate[1200:])


def survival_cox(watch: Watch, seed: int) -> float:
    """Cox's partial likelihood: a logsumexp over the batch, as it has to be there; Adam on whole batches."""
    torch.manual_seed(seed)
    x = torch.randn(500, 6)
    risk = x[:, 0] - 0.7 * x[:, 1] + x[:, 2] * x[:, 3]
    time = torch.empty(500).exponential_() / risk.exp()
    seen = torch.rand(500) < 0.7
    net = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    opt = torch.optim.AdamW(net.parameters(), lr=5e-3)
    with watch(net, opt):
        for _ in range(300):
            rows = torch.randperm(500)[:200]
            rows = rows[time[rows].argsort(descending=True)]
            guess = net(x[rows])[:, 0]
            loss = -(guess - guess.logcumsumexp(0))[seen[rows]].mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    guess = net(x)[:, 0]
    return float(1 - torch.corrcoef(torch.stack([guess.detach(), risk]))[0, 1])


def exact_line_long_after(watch: Watch, seed: int) -> float:
    """A line fitted exactly within a hundred steps, and then trained for seven hundred more at a loss near 0."""
    torch.manual_seed(seed)
    x = torch.randn(64, 3)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 3
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        for _ in range(800):
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return squared_score(model(x), y)


def two_tasks_weighed_by_uncertainty(watch: Watch, seed: int) -> float:
    """Two regressions weighed by learnt uncertainties, whose sum falls below 0; one parameter is a bare scalar."""
    torch.manual_seed(seed)
    x = torch.rand(1000, 5)
    first, second = x[:, 0] * x[:, 1] * 10, (x[:, 2] * 6).sin() * 0.1
    body = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
    model = nn.ModuleDict({"body": body, "a": nn.Linear(64, 1), "b": nn.Linear(64, 1)})
    log_var = nn.Parameter(torch.zeros(2))
    model.register_parameter("log_var", log_var)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for _ in range(700):
            i = torch.randint(1000, (64,))
            h = body(x[i])
            mse_a = (model["a"](h)[:, 0] - first[i]).pow(2).mean()
            mse_b = (model["b"](h)[:, 0] - second[i]).pow(2).mean()
            loss = mse_a * (-log_var[0]).exp() + mse_b * (-log_var[1]).exp() + log_var.sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return squared_score(model["b"](body(x))[:, 0], second)


def noisy_labels_smoothed(watch: Watch, seed: int) -> float:
    """Three labels in ten are wrong, labels are smoothed: the loss stays high although the model is good."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("digits", seed)
    noisy = torch.where(torch.rand(len(y)) < 0.3, torch.randint(10, (len(y),)), y)
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.5), nn.Linear(48, 10))
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    best, best_state = math.inf, copy.deepcopy(net.state_dict())
    with watch(net, opt) as watching:
        for _ in range(15):
            net.train()
            for rows in torch.randperm(len(x)).split(32):
                opt.zero_grad()
                criterion(net(x[rows]), noisy[rows]).backward()
                opt.step()
            net.eval()
            with torch.no_grad():
                val = criterion(net(held_x), held_y).item()
            watching.validated(val)
            if val < best:
                best, best_state = val, copy.deepcopy(net.state_dict())
    net.load_state_dict(best_state)
    return error_score(net(held_x), held_y)


PROGRAMS = [
    healthy(wine_selu),
    healthy(diabetes_quantiles),
    healthy(iris_prototypes),
    healthy(rare_positives_focal),
    healthy(cancer_pos_weight_accumulated),
    healthy(recommender_sparse),
    healthy(graph_full_batch),
    healthy(ranking_pairs),
    healthy(bike_counts_poisson),
    healthy(survival_cox),
    healthy(exact_line_long_after),
    healthy(two_tasks_weighed_by_uncertainty),
    healthy(noisy_labels_smoothed),
]
