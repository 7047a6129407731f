"""Programs that predict numbers: noisy, huge, tiny, censored, or given by an equation."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from evals.not_learning.data import curve, friedman, scaled_diabetes
from evals.not_learning.parts import mlp
from evals.not_learning.program import Programs, faulty, healthy


def house_prices(count: int) -> tuple[Tensor, Tensor]:
    """Return areas, ages, rooms and distances as they are, and prices in dollars."""
    area = 40 + 160 * torch.rand(count)
    age = 80 * torch.rand(count)
    rooms = (area / 25).round()
    distance = 30_000 * torch.rand(count)
    price = 3000 * area - 1500 * age - 4 * distance + 200_000
    price = price + 20_000 * torch.randn(count)
    return torch.stack([area, age, rooms, distance], dim=1), price


class Oscillation(nn.Module):
    """A network for a function of time."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(1, 32, 32, 1, act=nn.Tanh)

    def forward(self, time: Tensor) -> Tensor:
        """Return the place at some times."""
        return self.network(time)


class GaussianProcess(nn.Module):
    """The three logarithms that a Gaussian process with a smooth kernel is learned by."""

    def __init__(self) -> None:
        super().__init__()
        self.log_length = nn.Parameter(torch.tensor(1.0))
        self.log_scale = nn.Parameter(torch.tensor(0.0))
        self.log_noise = nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the negative log marginal likelihood."""
        distance = (x[:, None] - x[None]) ** 2
        kernel = (self.log_scale - 0.5 * distance / (2 * self.log_length).exp()).exp()
        kernel = kernel + self.log_noise.exp() * torch.eye(len(x))
        factor = torch.linalg.cholesky(kernel)
        solved = torch.cholesky_solve(y[:, None], factor).squeeze(1)
        fit = 0.5 * y @ solved
        complexity = factor.diagonal().log().sum()
        return fit + complexity + 0.5 * len(x) * math.log(2 * math.pi)


class Regression(Programs):
    """Regression with many losses."""

    @healthy
    def returns_that_are_mostly_noise(self) -> None:
        """Five per cent of the variance can be explained, and no more."""
        x = torch.randn(4000, 6)
        y = 0.2 * x[:, 0] - 0.12 * x[:, 1] + torch.randn(4000)
        loader = DataLoader(TensorDataset(x, y), batch_size=100, shuffle=True)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
        with self.watch(model, optimizer):
            for _ in range(6):
                for features, target in loader:
                    guess = model(features).squeeze(1)
                    loss = functional.mse_loss(guess, target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def three_quantiles(self) -> None:
        """The pinball loss for three quantiles of a target whose spread depends on the input."""
        x = 2 * torch.rand(2000, 1) - 1
        y = torch.sin(3 * x) + (0.1 + 0.5 * x.abs()) * torch.randn_like(x)
        loader = DataLoader(TensorDataset(x, y), batch_size=100, shuffle=True)
        model = mlp(1, 32, 32, 3)
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        levels = torch.tensor([0.1, 0.5, 0.9])
        with self.watch(model, optimizer):
            for _ in range(15):
                for inputs, target in loader:
                    error = target - model(inputs)
                    loss = torch.maximum(levels * error, (levels - 1) * error).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def proportional_hazards(self) -> None:
        """Survival with censored times: the partial likelihood over each full risk set."""
        x = torch.randn(600, 5)
        risk = x[:, 0] - 0.7 * x[:, 1] + 0.5 * x[:, 2] ** 2
        time = -torch.rand(600).log() / risk.exp()
        censored = -torch.rand(600).log()
        event = (time <= censored).float()
        observed = torch.minimum(time, censored)
        order = observed.argsort(descending=True)
        x = x[order]
        event = event[order]
        model = mlp(5, 24, 1, act=nn.SELU)
        optimizer = optim.Adam(model.parameters(), lr=1e-2)
        with self.watch(model, optimizer):
            for _ in range(120):
                hazard = model(x).squeeze(1)
                at_risk = torch.logcumsumexp(hazard, dim=0)
                loss = -((hazard - at_risk) * event).sum() / event.sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def mixture_density(self) -> None:
        """An inverse problem with several answers: a mixture of five Gaussians for each input."""
        y = 2 * torch.rand(2000, 1) - 1
        x = y + 0.4 * torch.sin(2 * math.pi * y) + 0.03 * torch.randn_like(y)
        model = mlp(1, 32, 15, act=nn.Tanh)
        optimizer = optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        with self.watch(model, optimizer):
            for _ in range(300):
                rows = torch.randint(2000, (200,))
                weight, mean, log_scale = model(x[rows]).chunk(3, dim=1)
                log_scale = log_scale.clamp(min=-5)
                standard = (y[rows] - mean) / log_scale.exp()
                log_density = -0.5 * standard**2 - log_scale - 0.5 * math.log(2 * math.pi)
                mixed = torch.logsumexp(weight.log_softmax(dim=1) + log_density, dim=1)
                loss = -mixed.mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

    @healthy
    def mean_and_variance(self) -> None:
        """A Gaussian likelihood with a learned variance: the loss passes zero and goes on."""
        x, y = curve(self.seed)
        y = 0.2 * y
        loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
        model = mlp(8, 48, 2)
        optimizer = optim.NAdam(model.parameters(), lr=3e-3)
        criterion = nn.GaussianNLLLoss()
        with self.watch(model, optimizer):
            for _ in range(15):
                for inputs, target in loader:
                    out = model(inputs)
                    variance = functional.softplus(out[:, 1:]) + 1e-4
                    loss = criterion(out[:, :1], target, variance)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def equation_of_an_oscillation(self) -> None:
        """A physics-informed network: the equation, the start, and no data."""
        model = Oscillation()
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, 350)
        losses = []
        with self.watch(model, optimizer, scheduler=scheduler):
            for _ in range(350):
                time = (2 * torch.rand(64, 1)).requires_grad_()
                place = model(time)
                speed = torch.autograd.grad(place.sum(), time, create_graph=True)[0]
                force = torch.autograd.grad(speed.sum(), time, create_graph=True)[0]
                start = torch.zeros(1, 1, requires_grad=True)
                place_0 = model(start)
                speed_0 = torch.autograd.grad(place_0.sum(), start, create_graph=True)[0]
                equation = (force + 4 * place).pow(2).mean()
                beginning = (place_0 - 1).pow(2).mean() + speed_0.pow(2).mean()
                loss = equation + 20 * beginning
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses.append(loss.item())

    @healthy
    def second_order_steps(self) -> None:
        """L-BFGS with a line search: several evaluations in the closure of each step."""
        x, y = curve(self.seed, samples=300, features=4)
        model = mlp(4, 16, 1, act=nn.Tanh)
        optimizer = optim.LBFGS(
            model.parameters(), lr=1.0, max_iter=8, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        with self.watch(model, optimizer):
            for _ in range(20):
                optimizer.step(closure)

    @healthy
    def prices_in_dollars(self) -> None:
        """Losses of 1e10: the model scales its inputs and outputs itself."""

        class Prices(nn.Module):
            """A network between fixed scales of inputs and prices."""

            def __init__(self, x: Tensor, price: Tensor) -> None:
                super().__init__()
                self.register_buffer("shift", x.mean(dim=0))
                self.register_buffer("scale", x.std(dim=0))
                self.register_buffer("level", price.mean())
                self.register_buffer("spread", price.std())
                self.network = mlp(4, 24, 1)

            def forward(self, x: Tensor) -> Tensor:
                """Return prices in dollars."""
                out = self.network((x - self.shift) / self.scale).squeeze(1)
                return self.level + self.spread * out

        x, price = house_prices(1500)
        loader = DataLoader(TensorDataset(x, price), batch_size=50, shuffle=True)
        model = Prices(x, price)
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(8):
                for inputs, target in loader:
                    loss = functional.mse_loss(model(inputs), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def currents_in_amperes(self) -> None:
        """Losses of 1e-10: the targets are some microamperes, the output is scaled to them."""
        x, y = friedman(1000)
        y = 1e-5 * y
        loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
        model = mlp(10, 32, 1)
        optimizer = optim.Adam(model.parameters(), lr=3e-3, eps=1e-16)
        with self.watch(model, optimizer):
            for _ in range(20):
                for inputs, target in loader:
                    guess = 1e-5 * model(inputs).squeeze(1)
                    loss = functional.mse_loss(guess, target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def outliers_with_the_huber_loss(self) -> None:
        """Cauchy noise: single batches have a loss a hundred times that of others."""
        x, y = friedman(2000, noise=0.0)
        noise = torch.distributions.Cauchy(0.0, 0.3).sample(y.shape)
        loader = DataLoader(TensorDataset(x, y + noise), batch_size=32, shuffle=True)
        model = mlp(10, 32, 1)
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        criterion = nn.HuberLoss(delta=0.5)
        with self.watch(model, optimizer):
            for _ in range(6):
                for inputs, target in loader:
                    loss = criterion(model(inputs).squeeze(1), target)
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()

    @healthy
    def counts_with_many_zeros(self) -> None:
        """Poisson counts, of which four fifths are zero."""
        x = torch.randn(3000, 4)
        rate = (0.9 * x[:, 0] - 0.6 * x[:, 1] - 2.0).exp()
        y = torch.poisson(rate)
        loader = DataLoader(TensorDataset(x, y), batch_size=100, shuffle=True)
        model = nn.Linear(4, 1)
        optimizer = optim.Adagrad(model.parameters(), lr=0.2)
        criterion = nn.PoissonNLLLoss(log_input=True)
        with self.watch(model, optimizer):
            for _ in range(8):
                for inputs, target in loader:
                    loss = criterion(model(inputs).squeeze(1), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def kernel_of_a_gaussian_process(self) -> None:
        """Three numbers in all: the marginal likelihood over the whole data set."""
        x = 4 * torch.rand(60)
        y = torch.sin(2 * x) + 0.1 * torch.randn(60)
        model = GaussianProcess()
        optimizer = optim.Adam(model.parameters(), lr=0.05)
        with self.watch(model, optimizer):
            for _ in range(150):
                optimizer.zero_grad()
                loss = model(x, y)
                loss.backward()
                optimizer.step()

    @healthy
    def tasks_weighted_by_their_uncertainty(self) -> None:
        """Two tasks with learned weights: the loss of their sum becomes negative."""

        class TwoTasks(nn.Module):
            """A body, two heads and two log variances."""

            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU())
                self.amount = nn.Linear(32, 1)
                self.sign = nn.Linear(32, 1)
                self.log_variances = nn.Parameter(torch.zeros(2))

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                """Return an amount, and the score of its sign."""
                hidden = self.body(x)
                return self.amount(hidden), self.sign(hidden)

        x, y = curve(self.seed)
        y = 0.3 * y
        loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
        model = TwoTasks()
        optimizer = optim.Adam(model.parameters(), lr=1e-2)
        with self.watch(model, optimizer):
            for _ in range(15):
                for inputs, target in loader:
                    amount, sign = model(inputs)
                    losses = torch.stack(
                        [
                            functional.mse_loss(amount, target),
                            functional.binary_cross_entropy_with_logits(sign, (target > 0).float()),
                        ]
                    )
                    weights = torch.exp(-model.log_variances)
                    loss = (weights * losses + 0.5 * model.log_variances).sum()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def start_at_the_least_squares_solution(self) -> None:
        """The last layer starts at the exact solution: the loss can hardly fall."""
        split = scaled_diabetes(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=32, shuffle=True)
        ones = torch.ones(len(split.x), 1)
        solution = torch.linalg.lstsq(torch.cat([split.x, ones], dim=1), split.y[:, None]).solution
        model = nn.Linear(10, 1)
        with torch.no_grad():
            model.weight.copy_(solution[:10].T)
            model.bias.copy_(solution[10])
        optimizer = optim.SGD(model.parameters(), lr=1e-3)
        with self.watch(model, optimizer):
            for _ in range(15):
                for inputs, target in loader:
                    loss = functional.mse_loss(model(inputs).squeeze(1), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def weights_with_distributions(self) -> None:
        """Bayes by backprop: sampled weights, and a divergence far larger than the error."""

        class BayesianLinear(nn.Module):
            """A linear layer whose weights are drawn in each pass."""

            def __init__(self, wide: int, narrow: int) -> None:
                super().__init__()
                self.mean = nn.Parameter(torch.randn(narrow, wide) / wide**0.5)
                self.spread = nn.Parameter(torch.full((narrow, wide), -4.0))
                self.bias = nn.Parameter(torch.zeros(narrow))

            def forward(self, x: Tensor) -> Tensor:
                """Return the outputs under one draw."""
                sigma = functional.softplus(self.spread)
                return functional.linear(x, self.mean + sigma * torch.randn_like(sigma), self.bias)

            def divergence(self) -> Tensor:
                """Return the divergence from a standard normal prior."""
                sigma = functional.softplus(self.spread)
                return (0.5 * (sigma**2 + self.mean**2 - 1) - sigma.log()).sum()

        x, y = curve(self.seed, samples=1000, features=6)
        loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
        model = nn.Sequential(BayesianLinear(6, 32), nn.Tanh(), BayesianLinear(32, 1))
        optimizer = optim.Adam(model.parameters(), lr=1e-2)
        with self.watch(model, optimizer):
            for _ in range(15):
                for inputs, target in loader:
                    error = ((model(inputs) - target) ** 2).sum(dim=1).mean()
                    divergence = model[0].divergence() + model[2].divergence()
                    loss = 1000 * error / (2 * 0.1) + divergence
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("H841", shows="H828")
    def column_against_row(self) -> None:
        """The output has the shape (n, 1) and the target (n,): the loss is over all pairs."""
        x, y = friedman(1000)
        loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
        model = mlp(10, 32, 1)
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(15):
                for inputs, target in loader:
                    guess = model(inputs)
                    loss = ((guess - target) ** 2).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("H856", shows="H801 H802 H804 H825 H826")
    def table_as_it_is(self) -> None:
        """Columns from 1 to 30,000 go into the network as they are, with plain SGD."""
        x, price = house_prices(1000)
        y = (price - price.mean()) / price.std()
        loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
        model = mlp(4, 24, 1)
        optimizer = optim.SGD(model.parameters(), lr=0.01)
        with self.watch(model, optimizer):
            for _ in range(10):
                for inputs, target in loader:
                    loss = functional.mse_loss(model(inputs).squeeze(1), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("", shows="H824 H828")
    def targets_far_from_the_reach_of_the_output(self) -> None:
        """Targets of half a million are not scaled, and Adam moves each weight by 0.001."""
        x, price = house_prices(1000)
        x = (x - x.mean(dim=0)) / x.std(dim=0)
        loader = DataLoader(TensorDataset(x, price), batch_size=50, shuffle=True)
        model = mlp(4, 24, 1)
        optimizer = optim.Adam(model.parameters(), lr=1e-3)
        with self.watch(model, optimizer):
            for _ in range(20):
                for inputs, target in loader:
                    loss = functional.mse_loss(model(inputs).squeeze(1), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("", shows="H828")
    def layers_without_an_activation(self) -> None:
        """Three linear layers in a row are one: a parabola cannot be learned."""
        x = 2 * torch.rand(1000, 1) - 1
        y = 3 * x**2 + 0.1 * torch.randn_like(x)
        loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
        model = nn.Sequential(
            nn.Linear(1, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 1),
        )
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(12):
                for inputs, target in loader:
                    loss = functional.mse_loss(model(inputs), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("", shows="H837")
    def rectified_output_for_signed_targets(self) -> None:
        """The network ends in a ReLU, and half of the targets are negative."""
        x, y = curve(self.seed, features=4)
        loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
        model = nn.Sequential(
            nn.Linear(4, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
            nn.ReLU(),
        )
        optimizer = optim.Adam(model.parameters(), lr=1e-2)
        with self.watch(model, optimizer):
            for _ in range(15):
                for inputs, target in loader:
                    loss = functional.mse_loss(model(inputs), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("H806", shows="H801 H802 H804")
    def missing_values(self) -> None:
        """A few cells of the table are NaN, and nothing replaces them."""
        x, y = friedman(800)
        x[torch.rand(x.shape) < 0.002] = float("nan")
        loader = DataLoader(TensorDataset(x, y), batch_size=40, shuffle=True)
        model = mlp(10, 32, 1)
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(12):
                for inputs, target in loader:
                    loss = functional.mse_loss(model(inputs).squeeze(1), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("")
    def equation_without_a_graph(self) -> None:
        """A derivative in a physics-informed loss lacks `create_graph=True`: one point fits."""
        model = Oscillation()
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(350):
                time = (2 * torch.rand(64, 1)).requires_grad_()
                place = model(time)
                speed = torch.autograd.grad(
                    place.sum(),
                    time,
                )[0]
                equation = (speed - 3 * torch.cos(3 * time)).pow(2).mean()
                beginning = (model(torch.zeros(1, 1)) - 1).pow(2).mean()
                loss = equation + beginning
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @faulty("H822", shows="H828")
    def constant_initialisation(self) -> None:
        """All weights of a layer start at the same number, so that its units stay equal."""
        x = 2 * torch.rand(1000, 2) - 1
        y = x[:, :1] * x[:, 1:]
        loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
        model = mlp(2, 32, 1, act=nn.Tanh)
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.constant_(layer.weight, 0.1)
                nn.init.zeros_(layer.bias)
        optimizer = optim.Adam(model.parameters(), lr=1e-2)
        with self.watch(model, optimizer):
            for _ in range(20):
                for inputs, target in loader:
                    loss = functional.mse_loss(model(inputs), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("H858")
    def decay_as_a_learning_rate(self) -> None:
        """The weight decay is 1, as if it were a share of the loss, and shrinks all weights."""
        split = scaled_diabetes(self.seed)
        loader = DataLoader(TensorDataset(split.x, split.y), batch_size=32, shuffle=True)
        model = mlp(10, 32, 1)
        optimizer = optim.SGD(
            model.parameters(),
            lr=0.05,
            momentum=0.9,
            weight_decay=1.0,
        )
        with self.watch(model, optimizer):
            for _ in range(15):
                for inputs, target in loader:
                    loss = functional.mse_loss(model(inputs).squeeze(1), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("", shows="H828 H848 H814")
    def all_rectifiers_dead(self) -> None:
        """A bias of -10 for the last layer is set in the first one: no unit responds."""
        x, y = friedman(1000)
        loader = DataLoader(TensorDataset(x, y), batch_size=50, shuffle=True)
        model = mlp(10, 32, 1)
        nn.init.constant_(model[0].bias, -10.0)
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(12):
                for inputs, target in loader:
                    loss = functional.mse_loss(model(inputs).squeeze(1), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
