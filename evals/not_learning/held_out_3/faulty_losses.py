"""Faults in what is minimised."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evals.not_learning import data, parts
from evals.not_learning.held_out_3 import shared
from evals.not_learning.program import adam, faulty, sgd


class FaultyLosses(shared.Twins):
    """The loss is not the one that was meant."""

    @faulty("H813 H814")  # energy distance: 0.007 without the fault, 0.32 with it
    def gan_generator_detached(self) -> None:
        """The generator's samples are detached in its own step too, so its loss cannot reach it."""
        generator, critic = parts.mlp(4, 32, 2), parts.mlp(2, 48, 1)
        judge, optimizer = (
            adam(critic, 0.002, betas=(0.5, 0.99)),
            adam(generator, 0.001, betas=(0.5, 0.99)),
        )
        for _ in self.watched(range(1500), generator, optimizer):
            real, false = data.moons(64)[0], generator(torch.randn(64, 4))
            judge.zero_grad()
            (F.softplus(-critic(real)) + F.softplus(critic(false.detach()))).mean().backward()
            judge.step()
            optimizer.zero_grad()
            F.softplus(-critic(false.detach() if self.broken else false)).mean().backward()
            optimizer.step()
        self.score = -shared.distance(
            shared.outputs(generator, torch.randn(500, 4)), data.moons(500)[0]
        )

    @faulty("")  # error of the coverage: 0.008 without the fault, 0.77 with it
    def quantile_of_the_other_side(self) -> None:
        """The difference in the pinball loss has the wrong sign.

        The 90 % quantile becomes that of 10 %.
        """
        x = 4 * torch.rand(1500, 1) - 2
        y = (2 * x).sin() + (0.2 + 0.2 * x.abs()) * torch.randn(1500, 1)
        model = parts.mlp(1, 32, 32, 1, act=nn.Tanh)

        def pinball(found: Tensor, b: Tensor) -> Tensor:
            left = found - b if self.broken else b - found
            return torch.maximum(0.9 * left, -0.1 * left).mean()

        self.fit(model, adam(model, 0.005), data.batches((x[:1000], y[:1000]), 50, 500), pinball)
        self.score = -abs((y[1000:] < shared.outputs(model, x[1000:])).float().mean().item() - 0.9)

    @faulty("")  # R2: 0.55 without the fault, -0.33 with it
    def counts_exponentiated_twice(self) -> None:
        """The network ends in `exp`, and the Poisson loss, by its default, takes that for the
        logarithm.
        """
        x = torch.randn(1500, 6)
        y = torch.poisson((x @ (0.4 * torch.randn(6)) + 1).exp())
        model = parts.mlp(6, 32, 1)
        self.fit(
            model,
            adam(model, 0.003),
            data.batches((x[:1000], y[:1000]), 50, 500),
            lambda found, b: F.poisson_nll_loss(found[:, 0].exp(), b, log_input=self.broken),
        )
        self.score = shared.r2(shared.outputs(model, x[1000:]).exp(), y[1000:])

    @faulty("H855")  # AUC: 0.97 without the fault, 0.72 with it
    def pairs_labelled_zero_and_one(self) -> None:
        """The cosine loss wants 1 and -1.

        Pairs that differ are labelled 0, which costs nothing, ever.
        """
        x, y, held_x, held_y = data.digits(self.seed)
        model = parts.mlp(64, 96, 16)
        optimizer = adam(model, 0.001)
        for a, b in self.watched(data.batches((x, y), 128, 300), model, optimizer):
            found, alike = model(a), b[:64] == b[64:]
            label = alike.long() if self.broken else 2 * alike.long() - 1
            self.update(F.cosine_embedding_loss(found[:64], found[64:], label, margin=0.2))
        found = F.normalize(shared.outputs(model, held_x), dim=1)
        same = held_y[:60, None] == held_y[:60]
        self.score = shared.auc((found[:60] @ found[:60].T).flatten(), same.flatten().long())

    @faulty("H855", shows="H815 H828")  # accuracy: 1.00 without the fault, 0.54 with it
    def hinge_of_zero_and_one(self) -> None:
        """The hinge loss multiplies by labels of 0 and 1, so that the negative ones have no say."""
        (x, y), (held_x, held_y) = data.moons(1000), data.moons(500)
        model = parts.mlp(2, 32, 32, 1)
        self.fit(
            model,
            sgd(model, 0.1, momentum=0.9),
            data.batches((x, y), 32, 400),
            lambda found, b: F.relu(1 - (b if self.broken else 2 * b - 1) * found[:, 0]).mean(),
        )
        self.score = (
            ((shared.outputs(model, held_x)[:, 0] > 0) == (held_y > 0)).float().mean().item()
        )

    @faulty("", shows="H801 H804")  # accuracy: 0.99 without the fault, 0.14 with it
    def class_weights_of_whole_numbers(self) -> None:
        """Class weights are made by an integer division, and are 0 for every class that is not
        rare.
        """
        x, y = data.blobs(self.seed, 3000)
        keep = torch.rand(3000) < torch.tensor([1.0, 1.0, 0.8, 0.3, 0.1])[y]
        (x, held_x), (y, held_y) = (
            part[keep].split([1200, int(keep.sum()) - 1200]) for part in (x, y)
        )
        counts = y.bincount()
        weight = ((len(y) // (5 * counts)) if self.broken else len(y) / (5 * counts)).float()
        model = parts.mlp(20, 48, 5)
        self.fit(
            model,
            adam(model, 0.002),
            data.batches((x, y), 64, 400),
            lambda found, b: F.cross_entropy(found, b, weight),
        )
        self.score = shared.accuracy(model, held_x, held_y)

    @faulty("", shows="H828")  # mean error: 0.004 without the fault, 0.66 with it
    def equation_without_a_graph(self) -> None:
        """The derivative in the residual of u' = 2 cos 2t is taken without a graph, so that it
        trains nothing.
        """
        model = parts.mlp(1, 32, 32, 1, act=nn.Tanh)
        optimizer = adam(model, 0.003)
        for _ in self.watched(range(800), model, optimizer):
            t = (3 * torch.rand(64, 1)).requires_grad_()
            slope = torch.autograd.grad(model(t).sum(), t, create_graph=not self.broken)[0]
            self.update(
                (slope - 2 * (2 * t).cos()).square().mean()
                + 10 * model(torch.zeros(1, 1)).square().mean()
            )
        t = torch.linspace(0, 3, 50)[:, None]
        self.score = -(shared.outputs(model, t) - (2 * t).sin()).abs().mean().item()

    @faulty("", shows="H828")  # AUC: 0.69 without the fault, 0.51 with it
    def negatives_among_the_liked(self) -> None:
        """The films that a user is said not to like are drawn from those that the user likes."""
        user, film, score = data.ratings(self.seed)
        liked = torch.zeros(120, 80, dtype=torch.bool)
        liked[user[:4500], film[:4500]] = score[:4500] > 4
        model = parts.Wired(
            lambda m, u, f: (m.u(u) * m.f(f)).sum(1), u=nn.Embedding(120, 8), f=nn.Embedding(80, 8)
        )
        likes, chance = liked.nonzero(), liked.float() if self.broken else (~liked).float()
        optimizer = adam(model, 0.01)
        for at in self.watched(shared.rows(len(likes), 128, 500), model, optimizer):
            who, what = likes[at].T
            other = torch.multinomial(chance[who], 1)[:, 0]
            self.update(-F.logsigmoid(model(who, what) - model(who, other)).mean())
        self.score = shared.auc(
            shared.outputs(model, user[4500:], film[4500:]), (score[4500:] > 4).long()
        )
