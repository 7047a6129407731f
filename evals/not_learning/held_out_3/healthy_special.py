"""Healthy programs with a loop or a loss of their own."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, Normal

from evals.not_learning import data, parts
from evals.not_learning.held_out_3 import shared, tasks
from evals.not_learning.program import adam, adamw, follow, healthy, sgd, update


class HealthySpecial(shared.Twins):
    """Generators, views, agents, equations, and the like."""

    def adversaries(self, penalty: float) -> None:
        """Train a generator against a critic, the generator being watched.

        With a gradient penalty or without.
        """
        generator, critic = parts.mlp(4, 48, 48, 2), parts.mlp(2, 48, 48, 1)
        judge, optimizer = (
            adam(m, lr, betas=(0.5, 0.99)) for m, lr in ((critic, 0.002), (generator, 0.001))
        )
        for _ in self.watched(range(900), generator, optimizer):
            for _ in range(3 if penalty else 1):
                real, false = data.moons(64)[0], generator(torch.randn(64, 4)).detach()
                if penalty:
                    between = (real + torch.rand(64, 1) * (false - real)).requires_grad_()
                    slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[
                        0
                    ].norm(dim=1)
                    update(
                        judge,
                        (critic(false) - critic(real)).mean()
                        + penalty * (slope - 1).square().mean(),
                    )
                else:
                    update(judge, (F.softplus(-critic(real)) + F.softplus(critic(false))).mean())
            found = critic(generator(torch.randn(64, 4)))
            self.update(-found.mean() if penalty else F.softplus(-found).mean())
        self.end(
            -shared.distance(shared.outputs(generator, torch.randn(500, 4)), data.moons(500)[0]),
            -0.1,
        )

    @healthy
    def gan_of_moons(self) -> None:
        """A generator whose loss does not fall, as the critic learns too."""
        self.adversaries(0)

    @healthy
    def wasserstein_of_moons(self) -> None:
        """Critics with a gradient penalty; losses of any sign."""
        self.adversaries(1.0)

    def views(self, kind: str, lr: float = 0.002) -> None:
        """Learn features of digits from two noisy views of each."""
        x, _, held_x, _ = data.digits(self.seed)
        ahead = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        model = nn.Sequential(
            nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32)
        )
        slow, before = copy.deepcopy(model), shared.matched(model, held_x)
        whole = nn.ModuleList([model, ahead]) if kind == "follow" else model
        optimizer = adam(whole, lr)
        for at in self.watched(shared.rows(1400, 100, 500), whole, optimizer):
            a, b = (x[at] * (torch.rand(100, 64) > 0.3) for _ in range(2))
            one, two = model(a), model(b)
            if kind == "contrast":
                likeness = F.normalize(one, dim=1) @ F.normalize(two, dim=1).T / 0.5
                loss = F.cross_entropy(likeness, torch.arange(100))
            elif kind == "triplet":
                loss = F.triplet_margin_loss(one, two, two.roll(1, 0), margin=0.5)
            elif kind == "variance":
                spread = sum(
                    F.relu(1 - v.std(0)).mean() + (v - v.mean(0)).T.cov().tril(-1).square().mean()
                    for v in (one, two)
                )
                loss = 10 * F.mse_loss(one, two) + 10 * spread
            else:
                loss = -F.cosine_similarity(ahead(one), slow(b).detach()).mean()
            self.update(loss)
            follow(slow, model, 0.01)
        self.end(shared.matched(model, held_x), 1.3 * before)

    @healthy
    def views_contrasted(self) -> None:
        """A contrastive loss whose floor is high, its temperature being so."""
        self.views("contrast")

    @healthy
    def views_in_triplets(self) -> None:
        """Triplets, many of which soon cost nothing."""
        self.views("triplet", 0.001)

    @healthy
    def views_with_variance(self) -> None:
        """Views that are alike while every feature varies."""
        self.views("variance")

    @healthy
    def views_of_a_slow_teacher(self) -> None:
        """Predict what a slow copy says; the loss is negative."""
        self.views("follow")

    @healthy
    def vae_of_digits(self) -> None:
        """A variational autoencoder with a warm-up of its divergence."""
        x, _, held_x, _ = data.digits(self.seed)
        model = parts.Wired(lambda m, a: m.a(a), a=parts.mlp(64, 96, 16), b=parts.mlp(8, 96, 64))
        optimizer = adam(model, 0.002)
        for step, (a, _) in self.watched(
            enumerate(data.batches((x, x), 64, 400)), model, optimizer
        ):
            mean, log = model(a).chunk(2, 1)
            kl = 0.5 * (mean.square() + log.exp() - 1 - log).sum(1).mean()
            back = F.mse_loss(
                model.b(mean + (log / 2).exp() * torch.randn_like(mean)), a, reduction="sum"
            ) / len(a)
            self.update(20 * back + min(1, step / 200) * kl)
        with torch.no_grad():
            self.end(shared.r2(model.b(model(held_x)[:, :8]), held_x), 0.7)

    @healthy
    def hidden_pixels(self) -> None:
        """A masked autoencoder, whose loss counts only what was hidden."""
        x, _, held_x, _ = data.digits(self.seed)
        model = parts.mlp(64, 128, 128, 64)
        optimizer = adamw(model, 0.002)

        def hidden(a: Tensor) -> tuple[Tensor, Tensor]:
            mask = torch.rand_like(a) < 0.4
            return model(a.masked_fill(mask, -1))[mask], a[mask]

        for a, _ in self.watched(data.batches((x, x), 64, 700), model, optimizer):
            self.update(F.mse_loss(*hidden(a)))
        with torch.no_grad():
            self.end(shared.r2(*hidden(held_x)), 0.5)

    @healthy
    def diffusion_of_rings(self) -> None:
        """Predict noise, most of which cannot be predicted, with an average of the weights."""
        model = parts.mlp(3, 96, 96, 2, act=nn.SiLU)
        slow, optimizer = copy.deepcopy(model), adam(model, 0.003)

        def loss(net: nn.Module, x: Tensor) -> Tensor:
            noise, level = torch.randn_like(x), torch.rand(len(x), 1)
            return F.mse_loss(
                net(torch.cat([(1 - level).sqrt() * x + level.sqrt() * noise, level], 1)), noise
            )

        for _ in self.watched(range(700), model, optimizer):
            self.update(loss(model, data.rings(128)[0]))
            follow(slow, model, 0.02)
        with torch.no_grad():
            self.end(-loss(slow, data.rings(2000)[0]).item(), -0.55)

    @healthy
    def flow_of_moons(self) -> None:
        """Coupling layers trained by likelihood, in nats that may be negative."""
        nets = nn.ModuleList(parts.mlp(1, 32, 2, act=nn.Tanh) for _ in range(6))

        def loss(x: Tensor) -> Tensor:
            total = torch.zeros(len(x))
            for i, net in enumerate(nets):
                log, move = net(x[:, [i % 2]]).chunk(2, 1)
                moved = x[:, [1 - i % 2]] * log.tanh().exp() + move
                x, total = (
                    torch.cat([x[:, [0]], moved] if i % 2 == 0 else [moved, x[:, [1]]], 1),
                    total + log.tanh()[:, 0],
                )
            return (x.square().sum(1) / 2 + 1.838 - total).mean()

        self.descend(nets, adam(nets, 0.005), shared.fresh(lambda: data.moons(128)[0], 500), loss)
        self.end(-loss(data.moons(1000)[0]).item(), -1.3)

    @healthy
    def mixture_of_answers(self) -> None:
        """A mixture density for a target with two branches, which no mean can follow."""
        model = parts.mlp(1, 32, 9, act=nn.Tanh)

        def loss() -> Tensor:
            x = 2 * torch.rand(128) - 1
            y = torch.where(torch.rand(128) < 0.5, x, -x) * 2 + 0.1 * torch.randn(128)
            weight, mean, log = model(x[:, None]).chunk(3, 1)
            return (
                -MixtureSameFamily(Categorical(logits=weight), Normal(mean, log.exp() + 0.01))
                .log_prob(y)
                .mean()
            )

        self.descend(model, adam(model, 0.01), [()] * 600, loss, clip=5.0)
        self.end(-loss().item(), -0.6)

    def policy(self, kind: str) -> None:
        """Learn which of four levers pays in each of six rooms, from very noisy rewards."""
        best = torch.arange(6) % 4
        model = parts.mlp(6, 32, 5)
        optimizer = adam(model, 0.01)
        for _ in self.watched(range(400), model, optimizer):
            at = torch.eye(6)[rooms := torch.randint(6, (64,))]
            said = Categorical(logits=model(at)[:, :4])
            action, old = (a := said.sample()), said.log_prob(a).detach()
            reward = (action == best[rooms]).float() + torch.randn(64)
            for _ in range(3 if kind == "clipped" else 1):
                out = model(at)
                now, value = Categorical(logits=out[:, :4]), out[:, 4]
                gain = reward - (value.detach() if kind != "plain" else reward.mean())
                ratio = (now.log_prob(action) - old).exp()
                aim = (
                    torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
                    if kind == "clipped"
                    else now.log_prob(action) * gain
                )
                extra = 0.5 * (value - reward).square() if kind != "plain" else 0
                self.update((extra - aim).mean() - 0.01 * now.entropy().mean())
        self.end(
            (shared.outputs(model, torch.eye(6))[:, :4].argmax(1) == best).float().mean().item(),
            0.8,
        )

    @healthy
    def levers_by_their_gradient(self) -> None:
        """REINFORCE, whose loss says nothing about progress."""
        self.policy("plain")

    @healthy
    def levers_with_a_critic(self) -> None:
        """An actor with a critic."""
        self.policy("critic")

    @healthy
    def levers_in_small_steps(self) -> None:
        """Three clipped steps for each batch of experience."""
        self.policy("clipped")

    @healthy
    def corridor_with_a_target(self) -> None:
        """Q-learning from a memory, with a target that is copied now and then.

        The loss rises at first.
        """
        self.learn_values()
        self.need = -10

    @healthy
    def equation_of_decay(self) -> None:
        """A network that solves u' = -u, from the equation alone."""
        model = parts.mlp(1, 32, 32, 1, act=nn.Tanh)

        def loss(t: Tensor) -> Tensor:
            u = model(t.requires_grad_())
            slope = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
            return (slope + u).square().mean() + (model(torch.zeros(1, 1)) - 1).square().mean()

        self.descend(
            model, adam(model, 0.005), shared.fresh(lambda: 2 * torch.rand(64, 1), 400), loss
        )
        t = torch.linspace(0, 2, 40)[:, None]
        self.end(-(shared.outputs(model, t) - (-t).exp()).abs().max().item(), -0.1)

    @healthy
    def pixels_as_parameters(self) -> None:
        """What is optimised is an image, seen through a blur: a network has no part in it."""
        true = data.discs(1)[1]
        model = parts.Wired(
            lambda m: F.avg_pool2d(m.image, 3, 1, 1), image=nn.Parameter(torch.zeros(1, 1, 16, 16))
        )
        seen = F.avg_pool2d(true, 3, 1, 1) + 0.01 * torch.randn(1, 1, 16, 16)
        self.descend(
            model,
            adam(model, 0.1),
            [()] * 500,
            lambda: F.mse_loss(model(), seen) + 1e-4 * model.image.abs().mean(),
        )
        self.end(shared.r2(model.image.detach(), true), 0.4)

    @healthy
    def rarely_and_often_at_once(self) -> None:
        """Three tasks with losses of their own weights, which are learned too.

        The loss becomes negative.
        """
        x, y = data.blobs(self.seed, 2000)
        number = x[:, :1] * x[:, 1:2]
        model = parts.Wired(
            lambda m, a: m.body(a).split([5, 1], 1),
            body=parts.mlp(20, 64, 6),
            weight=nn.Parameter(torch.zeros(2)),
        )
        optimizer = adam(model, 0.005)
        for at in self.watched(shared.rows(1500, 64, 400), model, optimizer):
            of, worth = model(x[at])
            each = torch.stack([F.cross_entropy(of, y[at]), F.mse_loss(worth, number[at])])
            self.update((each * (-model.weight).exp() + model.weight).sum())
        with torch.no_grad():
            self.end((model(x[1500:])[0].argmax(1) == y[1500:]).float().mean().item(), 0.9)

    @healthy
    def survival_by_order(self) -> None:
        """Cox's partial likelihood with censored patients: the loss hardly moves, and cannot."""
        x, truth = torch.randn(1500, 8), torch.randn(8)
        time, over = -torch.rand(1500).log() / (x @ truth * 0.7).exp(), torch.rand(1500) < 0.6
        model = parts.mlp(8, 16, 1)

        def loss(at: Tensor) -> Tensor:
            order = at[time[at].argsort(descending=True)]
            risk = model(x[order])[:, 0]
            return -((risk - risk.logcumsumexp(0)) * over[order]).sum() / over[order].sum()

        self.descend(model, adam(model, 0.003), shared.rows(1200, 200, 200), loss)
        found = shared.outputs(model, x[1200:])[:, 0]
        self.end(torch.corrcoef(torch.stack([found, x[1200:] @ truth]))[0, 1].item(), 0.8)

    @healthy
    def several_labels_at_once(self) -> None:
        """Rare labels, several of which may hold."""
        x, y = torch.randn(2500, 12), torch.zeros(2500, 6)
        y = (x @ torch.randn(12, 6) + torch.randn(2500, 6) > 5).float()
        model = parts.mlp(12, 32, 6)
        self.fit(
            model,
            adamw(model, 0.003),
            data.batches((x[:2000], y[:2000]), 64, 300),
            F.binary_cross_entropy_with_logits,
        )
        self.end(shared.auc(shared.outputs(model, x[2000:]).flatten(), y[2000:].flatten()), 0.85)

    @healthy
    def counts_by_poisson(self) -> None:
        """A likelihood of counts, negative where they are large."""
        x = torch.randn(1500, 6)
        y = torch.poisson((x @ (0.3 * torch.randn(6)) + 3).exp())
        model = nn.Linear(6, 1)
        self.fit(
            model,
            adam(model, 0.02),
            data.batches((x[:1000], y[:1000]), 50, 400),
            lambda found, b: F.poisson_nll_loss(found[:, 0], b),
        )
        self.end(shared.r2(shared.outputs(model, x[1000:]).exp(), y[1000:]), 0.5)

    @healthy
    def students_of_a_teacher(self) -> None:
        """A small network learns what a large one says, softly; the loss ends far from zero."""
        task = tasks.tuned(self.seed, "all")
        x, _, held_x, held_y = data.digits(self.seed)
        model, teacher = parts.mlp(64, 16, 10), task.model
        optimizer = sgd(model, 0.3, momentum=0.9)
        for at in self.watched(shared.rows(1400, 50, 400), model, optimizer):
            self.update(
                F.cross_entropy(model(x[at]) / 4, (shared.outputs(teacher, x[at]) / 4).softmax(1))
            )
        self.end(shared.accuracy(model, held_x, held_y), 0.85)
