"""Healthy programs about graphs, sets, equations, and nets that depend on inner loops."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from evals.not_learning.data import community, digits
from evals.not_learning.parts import Wired, mlp
from evals.not_learning.program import Programs, adam, healthy


class Structures(Programs):
    """Healthy programs about graphs, sets, equations and inner loops."""

    @healthy
    def nodes_with_few_labels(self) -> None:
        """A graph net on one whole graph; only a sixth of the nodes has a label in the loss."""
        adjacency, features, labels = community(self.seed)
        known = torch.arange(180) < 30
        model = Wired(
            lambda net, x: adjacency @ net.out(net.drop((adjacency @ net.hidden(x)).relu())),
            hidden=nn.Linear(16, 24),
            drop=nn.Dropout(0.5),
            out=nn.Linear(24, 3),
        )
        optimizer = adam(model, 1e-2, weight_decay=5e-4)
        with self.watch(model, optimizer):
            for _ in range(200):
                model.train()
                loss = functional.cross_entropy(model(features)[known], labels[known])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                model.eval()
                with torch.no_grad():
                    guess = model(features).argmax(dim=1)
                    self.score = (guess == labels)[~known].float().mean().item()

    @healthy
    def links_against_random_pairs(self) -> None:
        """Which nodes are connected? As many random pairs as edges are the negatives."""
        adjacency, features, _ = community(self.seed, nodes=120)
        left, right = adjacency.triu(1).nonzero(as_tuple=True)
        encoder = nn.Sequential(nn.Linear(16 + 120, 32), nn.ReLU(), nn.Linear(32, 16))
        inputs = torch.cat([features, torch.eye(120)], dim=1)
        optimizer = adam(encoder, 5e-3)
        with self.watch(encoder, optimizer):
            for _ in range(200):
                vectors = encoder(inputs)
                first = torch.randint(120, left.shape)
                second = torch.randint(120, left.shape)
                positive = (vectors[left] * vectors[right]).sum(dim=1)
                negative = (vectors[first] * vectors[second]).sum(dim=1)
                loss = functional.softplus(-positive).mean() + functional.softplus(negative).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def spread_of_a_set(self) -> None:
        """A function of sets: embed the members, add them up, and regress their deviation."""
        model = Wired(
            lambda net, members: net.after(net.before(members).mean(dim=1)),
            before=mlp(1, 32, 32, act=nn.ELU),
            after=mlp(32, 32, 1, act=nn.ELU),
        )
        optimizer = optim.Adamax(model.parameters(), lr=4e-3)
        with self.watch(model, optimizer):
            for _ in range(350):
                scale = 0.2 + 2 * torch.rand(64, 1, 1)
                members = scale * torch.randn(64, 20, 1) + torch.randn(64, 1, 1)
                loss = functional.mse_loss(model(members), members.std(dim=1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def oscillator_from_its_equation(self) -> None:
        """A physics-informed net: no data, only an equation with second derivatives."""
        model = mlp(1, 32, 32, 1, act=nn.Tanh)
        optimizer = adam(model, 4e-3)
        start = torch.zeros(1, 1, requires_grad=True)
        with self.watch(model, optimizer):
            for _ in range(400):
                time = (3 * torch.rand(64, 1)).requires_grad_()
                place = model(time)
                speed = torch.autograd.grad(place.sum(), time, create_graph=True)[0]
                acceleration = torch.autograd.grad(speed.sum(), time, create_graph=True)[0]
                residual = (acceleration + 4 * place).square().mean()
                first = model(start)
                first_speed = torch.autograd.grad(first.sum(), start, create_graph=True)[0]
                initial = (first - 1).square().mean() + first_speed.square().mean()
                loss = residual + 10 * initial
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        grid = torch.linspace(0, 3, 50)[:, None]
        self.score = (model(grid) - (2 * grid).cos()).abs().mean().item()

    @healthy
    def initial_weights_for_fast_adaptation(self) -> None:
        """MAML: two inner steps per task by functional calls; the outer loss is after them."""
        model = mlp(1, 32, 32, 1)
        optimizer = adam(model, 3e-3)
        with self.watch(model, optimizer):
            for _ in range(150):
                total = torch.zeros(())
                for _ in range(4):
                    slope = 2 * torch.randn(1)
                    shift = torch.randn(1)
                    x = 4 * torch.rand(20, 1) - 2
                    y = slope * x.sin() + shift
                    weights = dict(model.named_parameters())
                    for _ in range(2):
                        output = torch.func.functional_call(model, weights, x[:10])
                        inner = functional.mse_loss(output, y[:10])
                        slopes = torch.autograd.grad(inner, weights.values(), create_graph=True)
                        weights = {
                            name: weight - 0.05 * change
                            for (name, weight), change in zip(weights.items(), slopes, strict=True)
                        }
                    adapted = torch.func.functional_call(model, weights, x[10:])
                    total = total + functional.mse_loss(adapted, y[10:])
                optimizer.zero_grad()
                (total / 4).backward()
                optimizer.step()

    @healthy
    def picture_as_a_function(self) -> None:
        """Fourier features of coordinates fit one picture; its matrix of waves is a buffer."""
        picture = digits(self.seed).x[0].view(1, 1, 8, 8)
        picture = functional.interpolate(picture, size=(32, 32), mode="bicubic").flatten()
        axis = torch.linspace(-1, 1, 32)
        places = torch.cartesian_prod(axis, axis)
        model = Wired(
            lambda net, x: net.body(torch.cat([(x @ net.waves).sin(), (x @ net.waves).cos()], 1)),
            body=mlp(64, 64, 1),
        )
        model.register_buffer("waves", 4 * torch.randn(2, 32))
        optimizer = adam(model, 5e-3)
        with self.watch(model, optimizer):
            for _ in range(200):
                loss = functional.mse_loss(model(places).squeeze(1), picture)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def vector_field_by_integration(self) -> None:
        """A neural differential equation: Euler steps through a net of a spiral's velocity."""
        generator = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
        field = mlp(2, 32, 2, act=nn.Tanh)
        optimizer = optim.RMSprop(field.parameters(), lr=3e-3)
        with self.watch(field, optimizer):
            for _ in range(200):
                true = state = 2 * torch.rand(32, 2) - 1
                loss = torch.zeros(())
                for _ in range(10):
                    true = true + 0.1 * true @ generator
                    state = state + 0.1 * field(state)
                    loss = loss + (state - true).abs().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def soft_sorting_of_four_numbers(self) -> None:
        """Sinkhorn: scores become a doubly stochastic matrix, and the target is a permutation."""
        model = mlp(4, 96, 96, 16)
        optimizer = adam(model, 3e-3)

        def matching(scores: Tensor) -> Tensor:
            for _ in range(6):
                scores = scores - scores.logsumexp(dim=1, keepdim=True)
                scores = scores - scores.logsumexp(dim=2, keepdim=True)
            return scores

        with self.watch(model, optimizer):
            for _ in range(350):
                numbers = torch.rand(64, 4)
                order = numbers.argsort(dim=1)
                log_matrix = matching(model(numbers).view(64, 4, 4))
                loss = functional.nll_loss(log_matrix.flatten(0, 1), order.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
