"""Healthy programs about tables: regression, counts, rankings, imbalance, odd optimizers."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

from evals.not_learning.data import (
    batches,
    blobs,
    curve,
    diabetes,
    friedman,
    loader,
    ratings,
    scaled_diabetes,
    table,
)
from evals.not_learning.parts import Wired, mlp
from evals.not_learning.program import Programs, adam, adamw, healthy, sgd


class Tabular(Programs):
    """Healthy programs about tables."""

    @healthy
    def targets_are_pure_noise(self) -> None:
        """Nothing can be learned from fresh noise, so the loss rightly stays at its variance."""
        model = mlp(12, 32, 1)
        optimizer = adam(model, 1e-3)
        with self.watch(model, optimizer):
            for _ in range(300):
                loss = functional.mse_loss(model(torch.randn(64, 12)), torch.randn(64, 1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def one_positive_in_thirty(self) -> None:
        """Rare positives with `pos_weight`, a bias at the prior, and ranking as the measure."""
        x = torch.randn(4000, 10)
        score = 1.5 * x[:, 0] + x[:, 1] * x[:, 2] + 0.3 * torch.randn(4000)
        y = (score > score.quantile(0.967)).float()
        model = mlp(10, 32, 1)
        nn.init.constant_(model[-1].bias, -3.4)
        optimizer = adamw(model, 3e-3)
        criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(10.0))
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 128, 300):
                loss = criterion(model(inputs).squeeze(1), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        positive = model(x[y == 1])
        negative = model(x[y == 0])
        self.score = (positive > negative.T).float().mean().item()

    @healthy
    def three_quantiles(self) -> None:
        """The pinball loss of three quantiles under noise that grows with the input."""
        model = mlp(1, 32, 32, 3, act=nn.Tanh)
        levels = torch.tensor([0.1, 0.5, 0.9])
        optimizer = adam(model, 4e-3)
        with self.watch(model, optimizer):
            for _ in range(350):
                x = torch.rand(128, 1) * 4
                y = (2 * x).sin() + 0.3 * x * torch.randn_like(x)
                error = y - model(x)
                loss = torch.maximum(levels * error, (levels - 1) * error).sum(dim=1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def poisson_counts_with_exposure(self) -> None:
        """Counts by a log-linear model with an offset; the loss leaves out a constant."""
        weight = torch.tensor([0.5, -0.4, 0.3, 0.0])
        model = nn.Linear(4, 1)
        optimizer = sgd(model, 0.02)
        with self.watch(model, optimizer):
            for _ in range(400):
                x = torch.randn(64, 4)
                exposure = 1 + 4 * torch.rand(64)
                count = torch.poisson(exposure * (x @ weight + 0.5).exp())
                log_rate = model(x).squeeze(1) + exposure.log()
                loss = functional.poisson_nll_loss(log_rate, count, log_input=True)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        self.score = (model.weight[0] - weight).abs().max().item()

    @healthy
    def quasi_newton_on_the_whole_table(self) -> None:
        """LBFGS with a line search evaluates a closure many times per step on all rows."""
        x, y = scaled_diabetes(self.seed)[:2]
        model = mlp(10, 8, 1, act=nn.Tanh)
        optimizer = optim.LBFGS(model.parameters(), lr=1, max_iter=8, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            penalty = sum(parameter.square().sum() for parameter in model.parameters())
            loss = functional.mse_loss(model(x).squeeze(1), y) + 1e-3 * penalty
            loss.backward()
            return loss

        with self.watch(model, optimizer):
            for _ in range(30):
                optimizer.step(closure)

    @healthy
    def wide_and_sparse_by_adagrad(self) -> None:
        """Bags of ids into one weight each, where most ids are rare; a rate of a half is right."""
        frequency = 1 / torch.arange(1, 401).float()
        effect = torch.randn(400)
        model = nn.EmbeddingBag(400, 1, mode="sum")
        nn.init.zeros_(model.weight)
        optimizer = optim.Adagrad(model.parameters(), lr=0.5)
        with self.watch(model, optimizer):
            for _ in range(350):
                bag = torch.multinomial(frequency.expand(64, -1), 8)
                label = (effect[bag].sum(dim=1) > 0).float()
                loss = functional.binary_cross_entropy_with_logits(model(bag).squeeze(1), label)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def survival_by_partial_likelihood(self) -> None:
        """Cox regression: the loss sums over risk sets and starts near the log of the batch."""
        x = torch.randn(1000, 6)
        risk = 0.9 * x[:, 0] - 0.6 * x[:, 1] * x[:, 2]
        time = torch.distributions.Exponential(risk.exp()).sample()
        censored = 2 * torch.rand(1000)
        observed = time < censored
        time = torch.minimum(time, censored)
        model = mlp(6, 32, 1)
        optimizer = adam(model, 3e-3)
        with self.watch(model, optimizer):
            for _ in range(300):
                rows = torch.randint(1000, (128,))
                rows = rows[time[rows].argsort(descending=True)]
                hazard = model(x[rows]).squeeze(1)
                at_risk = hazard.logcumsumexp(dim=0)
                loss = -(hazard - at_risk)[observed[rows]].mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def ordered_ratings_by_thresholds(self) -> None:
        """An ordinal model: one score, four sorted thresholds, four binary losses."""
        x, y = friedman(2000)
        grade = torch.bucketize(y, torch.tensor([-1.0, -0.3, 0.3, 1.0]))
        reached = (grade[:, None] > torch.arange(4)).float()
        model = Wired(
            lambda net, rows: net.score(rows) - net.gap.exp().cumsum(0) + 2,
            score=mlp(10, 32, 1),
            gap=nn.Parameter(torch.zeros(4)),
        )
        optimizer = optim.NAdam(model.parameters(), lr=4e-3)
        with self.watch(model, optimizer):
            for inputs, target in batches((x, reached), 64, 350):
                loss = functional.binary_cross_entropy_with_logits(model(inputs), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def tasks_weighted_by_uncertainty(self) -> None:
        """Two tasks of different scale whose weights are learnt; the total becomes negative."""
        x, y = curve(self.seed)
        other = 0.05 * x[:, 1:2] + 0.01 * torch.randn(1000, 1)
        model = nn.ModuleDict({"trunk": mlp(8, 48, 48), "head": nn.Linear(48, 2)})
        model.register_parameter("log_variance", nn.Parameter(torch.zeros(2)))
        optimizer = adam(model, 4e-3)
        with self.watch(model, optimizer):
            for _ in range(350):
                rows = torch.randint(1000, (64,))
                output = model["head"](model["trunk"](x[rows]).relu())
                error = (output - torch.cat([y[rows], other[rows]], dim=1)).square().mean(dim=0)
                loss = (error * (-model.log_variance).exp() + model.log_variance).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def mean_and_variance_together(self) -> None:
        """Gaussian likelihood with a predicted variance; the loss passes through zero."""
        x, y = diabetes()
        y = (y - 150) / 80
        model = mlp(10, 24, 2)
        optimizer = adam(model, 2e-3)
        with self.watch(model, optimizer):
            for _ in range(40):
                for inputs, target in loader(x, y, size=50):
                    mean, raw = model(inputs).split(1, dim=1)
                    variance = functional.softplus(raw) + 1e-3
                    loss = functional.gaussian_nll_loss(mean, target, variance)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def learning_rate_of_thirty(self) -> None:
        """Inputs near zero make gradients tiny, so plain SGD rightly needs a rate of thirty."""
        x = 0.05 * torch.randn(800, 6)
        y = 20 * x @ torch.randn(6, 1) / 6**0.5 + 0.1 * torch.randn(800, 1)
        model = nn.Linear(6, 1, bias=False)
        optimizer = sgd(model, 30.0)
        with self.watch(model, optimizer):
            for inputs, target in batches((x, y), 100, 200):
                loss = functional.mse_loss(model(inputs), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def tiny_rate_for_large_inputs(self) -> None:
        """Centred measurements in hundreds, for which a rate of 3e-6 is large enough."""
        x = 150 * torch.randn(500, 3)
        y = x @ torch.tensor([[0.5], [-0.3], [0.2]]) + torch.randn(500, 1)
        model = nn.Linear(3, 1)
        optimizer = sgd(model, 3e-6, momentum=0.5)
        with self.watch(model, optimizer):
            for inputs, target in batches((x, y), 50, 400):
                loss = functional.mse_loss(model(inputs), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def averaged_weights_at_the_end(self) -> None:
        """A constant high rate, and an average of the weights from the second half on."""
        x, y, held_x, held_y = table("breast_cancer", self.seed)
        model = mlp(30, 32, 2)
        average = AveragedModel(model)
        optimizer = sgd(model, 0.2, momentum=0.8)
        with self.watch(model, optimizer):
            for epoch in range(20):
                for inputs, labels in loader(x, y, size=32):
                    loss = functional.cross_entropy(model(inputs), labels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                if epoch >= 10:
                    average.update_parameters(model)
        self.score = (average(held_x).argmax(1) == held_y).float().mean().item()

    @healthy
    def eight_micro_batches_per_step(self) -> None:
        """Gradient accumulation over batches of four, each loss divided by eight."""
        x, y = blobs(self.seed, classes=4)
        model = mlp(20, 32, 4)
        optimizer = sgd(model, 0.1, momentum=0.9)
        with self.watch(model, optimizer):
            for number, (inputs, labels) in enumerate(batches((x, y), 4, 800), start=1):
                loss = functional.cross_entropy(model(inputs), labels) / 8
                loss.backward()
                if number % 8 == 0:
                    optimizer.step()
                    optimizer.zero_grad()

    @healthy
    def sharpness_aware_steps(self) -> None:
        """Two passes per update: climb a little, take the gradient there, and return."""
        x, y = table("wine", self.seed)[:2]
        model = mlp(13, 24, 3)
        optimizer = sgd(model, 0.05, momentum=0.9)
        with self.watch(model, optimizer):
            for inputs, labels in batches((x, y), 32, 200):
                functional.cross_entropy(model(inputs), labels).backward()
                gradients = [parameter.grad.clone() for parameter in model.parameters()]
                norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
                moves = [0.05 * gradient / (norm + 1e-12) for gradient in gradients]
                with torch.no_grad():
                    for parameter, move in zip(model.parameters(), moves, strict=True):
                        parameter.add_(move)
                optimizer.zero_grad()
                functional.cross_entropy(model(inputs), labels).backward()
                with torch.no_grad():
                    for parameter, move in zip(model.parameters(), moves, strict=True):
                        parameter.sub_(move)
                optimizer.step()
                optimizer.zero_grad()

    @healthy
    def bfloat16_forward_float32_weights(self) -> None:
        """Autocast on the CPU: activations in bfloat16, weights and loss in float32."""
        x, y = curve(self.seed, samples=2000)
        model = mlp(8, 64, 64, 1, act=nn.GELU)
        optimizer = adamw(model, 3e-3)
        with self.watch(model, optimizer):
            for inputs, target in batches((x, y), 64, 250):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    output = model(inputs)
                loss = functional.mse_loss(output.float(), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def double_precision_with_lasso(self) -> None:
        """A sparse linear model in float64, where proximal steps set most weights to zero."""
        x = torch.randn(300, 40, dtype=torch.float64)
        effect = torch.zeros(40, 1, dtype=torch.float64)
        effect[:4] = torch.tensor([[2.0], [-1.5], [1.0], [0.8]])
        y = x @ effect + 0.3 * torch.randn(300, 1, dtype=torch.float64)
        model = nn.Linear(40, 1).double()
        optimizer = sgd(model, 0.05)
        with self.watch(model, optimizer):
            for _ in range(200):
                loss = functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    shrunk = functional.softshrink(model.weight, 0.05 * 0.2)
                    model.weight.copy_(shrunk)

    @healthy
    def ratings_by_factors(self) -> None:
        """Factors of users and films with resilient propagation on all ratings at once."""
        users, films, scores = ratings(self.seed)
        model = Wired(
            lambda net, user, film: (net.user(user) * net.film(film)).sum(1) + net.mean,
            user=nn.Embedding(120, 4),
            film=nn.Embedding(80, 4),
            mean=nn.Parameter(torch.tensor(3.5)),
        )
        optimizer = optim.Rprop(model.parameters(), lr=0.01)
        with self.watch(model, optimizer):
            for _ in range(150):
                loss = functional.mse_loss(model(users, films), scores)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def ranking_of_pairs(self) -> None:
        """Only comparisons are given; the scores may drift, as their sum does not matter."""
        x, y = friedman(1500)
        model = mlp(10, 32, 32, 1)
        optimizer = optim.RAdam(model.parameters(), lr=3e-3)
        criterion = nn.MarginRankingLoss(margin=1.0)
        with self.watch(model, optimizer):
            for _ in range(350):
                left = torch.randint(1500, (64,))
                right = torch.randint(1500, (64,))
                sign = (y[left] - y[right]).sign()
                loss = criterion(model(x[left]).squeeze(1), model(x[right]).squeeze(1), sign)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def portfolio_by_sharpe_ratio(self) -> None:
        """A loss of one's own: the negative ratio of mean and deviation of daily returns."""
        model = nn.Sequential(mlp(5, 16, 5), nn.Softmax(dim=1))
        optimizer = adam(model, 3e-3)
        with self.watch(model, optimizer):
            for _ in range(300):
                signal = torch.randn(128, 5)
                returns = 0.01 * (0.5 * signal + torch.randn(128, 5))
                daily = (model(signal) * returns).sum(dim=1)
                loss = -daily.mean() / (daily.std() + 1e-4)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def noisy_labels_and_heavy_dropout(self) -> None:
        """A third of the labels is random and half of all units drop out: a high floor."""
        x, y = blobs(self.seed, samples=3000, classes=4)
        labels = torch.where(torch.rand(3000) < 0.33, torch.randint(4, (3000,)), y)
        model = nn.Sequential(
            nn.Dropout(0.1),
            nn.Linear(20, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 64),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(64, 4),
        )
        optimizer = adam(model, 2e-3)
        with self.watch(model, optimizer):
            for inputs, target in batches((x, labels), 64, 300):
                loss = functional.cross_entropy(model(inputs), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        self.score = (model.eval()(x).argmax(1) == y).float().mean().item()

    @healthy
    def cosine_restarts(self) -> None:
        """Warm restarts throw the rate back up every forty steps, and the loss with it."""
        x, y = friedman(1000)
        model = nn.Sequential(nn.BatchNorm1d(10), mlp(10, 48, 48, 1))
        optimizer = sgd(model, 0.2, momentum=0.9)
        scheduler = optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=40, T_mult=2)
        with self.watch(model, optimizer, scheduler=scheduler):
            for inputs, target in batches((x, y), 64, 280):
                loss = functional.mse_loss(model(inputs).squeeze(-1), target)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_value_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
