"""Healthy programs that generate or act: flows, diffusion, adversarial pairs, energies, reinforcement."""

from __future__ import annotations

import copy
import itertools
import math
import random

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.not_learning.held_out.data import digits, moons
from benchmarks.not_learning.held_out.entry import healthy
from benchmarks.not_learning.program import Watch


def _mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class _RealNVP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(_mlp(1, 32, 32, 2, act=nn.Tanh) for _ in range(6))

    def log_prob(self, x: torch.Tensor) -> torch.Tensor:
        log_det = torch.zeros(len(x))
        for k, net in enumerate(self.nets):
            keep, move = (x[:, :1], x[:, 1:]) if k % 2 else (x[:, 1:], x[:, :1])
            s, t = net(keep).chunk(2, 1)
            s = s.tanh() * 2
            move = move * s.exp() + t
            x = torch.cat([keep, move], 1) if k % 2 else torch.cat([move, keep], 1)
            log_det = log_det + s[:, 0]
        return -0.5 * x.square().sum(1) - math.log(2 * math.pi) + log_det


def flow_on_small_moons(watch: Watch, seed: int) -> float:
    """A normalising flow on data of small scale: its negative log-likelihood goes well below 0."""
    torch.manual_seed(seed)
    flow = _RealNVP()
    optimizer = torch.optim.Adam(flow.parameters(), lr=5e-3)
    with watch(flow, optimizer, total_steps=400):
        for _ in range(400):
            x, _ = moons(128)
            loss = -flow.log_prob(0.3 * x).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(flow.parameters(), 5.0)
            optimizer.step()
    x = 0.3 * moons(2000)[0]
    wide = torch.distributions.MultivariateNormal(x.mean(0), torch.cov(x.T))
    return math.exp(float(-flow.log_prob(x).detach().mean() + wide.log_prob(x).mean()))


def diffusion_of_points(watch: Watch, seed: int) -> float:
    """Denoising diffusion in the plane with a running average of the weights: the loss soon stays where it is."""
    torch.manual_seed(seed)
    beta = torch.linspace(1e-3, 0.2, 40)
    keep = (1 - beta).cumprod(0)
    net = _mlp(3, 96, 96, 2, act=nn.SiLU)
    ema = copy.deepcopy(net)
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    with watch(net, opt):
        for _ in range(700):
            x = 1.5 * moons(128)[0]
            t = torch.randint(40, (128,))
            a = keep[t][:, None]
            noise = torch.randn_like(x)
            guess = net(torch.cat([a.sqrt() * x + (1 - a).sqrt() * noise, t[:, None] / 40], 1))
            loss = F.mse_loss(guess, noise)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            with torch.no_grad():
                for e, p in zip(ema.parameters(), net.parameters(), strict=True):
                    e.mul_(0.99).add_(p, alpha=0.01)
    with torch.no_grad():
        z = torch.randn(500, 2)
        for k in reversed(range(40)):
            guess = ema(torch.cat([z, torch.full((500, 1), k / 40)], 1))
            z = (z - beta[k] / (1 - keep[k]).sqrt() * guess) / (1 - beta[k]).sqrt()
            z = z + beta[k].sqrt() * torch.randn_like(z) * (k > 0)
    real = 1.5 * moons(500)[0]
    near, far = torch.cdist(real, z).min(1).values, torch.cdist(real, torch.randn(500, 2)).min(1).values
    return float(near.mean() / far.mean())


class _VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = _mlp(64, 96, 16), _mlp(8, 96, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mu, logvar = self.enc(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return torch.sigmoid(self.dec(z)), mu, logvar


def vae_summed_losses(watch: Watch, seed: int) -> float:
    """A VAE whose losses are summed over the batch, as in the well-known example: values in the thousands."""
    torch.manual_seed(seed)
    x, _, held, _ = digits(seed)
    x, held = x.flatten(1), held.flatten(1)
    model = _VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer) as watching:
        for _ in range(20):
            for rows in torch.randperm(len(x)).split(64):
                recon, mu, logvar = model(x[rows])
                bce = F.binary_cross_entropy(recon, x[rows], reduction="sum")
                kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
                optimizer.zero_grad()
                (bce + kld).backward()
                optimizer.step()
            with torch.no_grad():
                watching.validated(F.binary_cross_entropy(model(held)[0], held).item())
    return float((model(held)[0].detach() - held).square().mean() / (held - x.mean(0)).square().mean())


def _ring(count: int) -> torch.Tensor:
    angle = torch.randint(8, (count,)) * (math.pi / 4)
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.2 * torch.randn(count, 2)


def gan_on_a_ring(watch: Watch, seed: int) -> float:
    """A plain adversarial pair, alternating; the generator's backward also fills the discriminator's gradients."""
    torch.manual_seed(seed)
    gen, disc = _mlp(8, 64, 64, 2), _mlp(2, 64, 64, 1, act=nn.LeakyReLU)
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(disc.parameters(), lr=1e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    one, zero = torch.ones(128, 1), torch.zeros(128, 1)
    with watch({"gen": gen, "disc": disc}, {"gen": opt_g, "disc": opt_d}, objective="adversarial"):
        for _ in range(900):
            disc.zero_grad()
            fake = gen(torch.randn(128, 8))
            bce(disc(_ring(128)), one * 0.9).backward()
            bce(disc(fake.detach()), zero).backward()
            opt_d.step()
            gen.zero_grad()
            bce(disc(fake), one).backward()
            opt_g.step()
    fake = gen(torch.randn(1000, 8)).detach()
    real = _ring(1000)
    return float(torch.cdist(real, fake).min(1).values.mean() / real.norm(dim=1).mean())


def wasserstein_with_penalty(watch: Watch, seed: int) -> float:
    """A critic with a gradient penalty, three critic updates per generator update, losses of any sign."""
    torch.manual_seed(seed)
    gen, critic = _mlp(4, 48, 48, 2), _mlp(2, 48, 48, 1)
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.5, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=3e-3, betas=(0.5, 0.9))
    with watch({"gen": gen, "critic": critic}, {"g": opt_g, "c": opt_c}, objective="adversarial"):
        for step in range(900):
            real, fake = moons(64)[0], gen(torch.randn(64, 4))
            mix = torch.rand(64, 1)
            at = (mix * real + (1 - mix) * fake.detach()).requires_grad_()
            slope = torch.autograd.grad(critic(at).sum(), at, create_graph=True)[0]
            penalty = (slope.norm(dim=1) - 1).square().mean()
            opt_c.zero_grad()
            (critic(fake.detach()).mean() - critic(real).mean() + penalty).backward()
            opt_c.step()
            if step % 3 == 2:
                opt_g.zero_grad()
                (-critic(gen(torch.randn(64, 4))).mean()).backward()
                opt_g.step()
    real, fake = moons(600)[0], gen(torch.randn(600, 4)).detach()
    return float(torch.cdist(real, fake).min(1).values.mean() / 0.3)


def energy_by_langevin(watch: Watch, seed: int) -> float:
    """An energy model by contrastive divergence: the loss hovers about 0 and says nothing; samples by gradients."""
    torch.manual_seed(seed)
    energy = _mlp(2, 64, 64, 1, act=nn.SiLU)
    opt = torch.optim.Adam(energy.parameters(), lr=2e-3, betas=(0.0, 0.999))
    buffer = torch.randn(512, 2)
    with watch(energy, opt, objective="adversarial"):
        for _ in range(300):
            i = torch.randint(512, (64,))
            x = buffer[i]
            for _ in range(8):
                x = x.detach().requires_grad_()
                slope = torch.autograd.grad(energy(x).sum(), x)[0]
                x = x - 0.05 * slope + 0.1 * torch.randn_like(x)
            x = x.detach()
            buffer[i] = x
            real = 1.5 * moons(64)[0]
            e_real, e_fake = energy(real), energy(x)
            loss = e_real.mean() - e_fake.mean() + 0.1 * (e_real.square() + e_fake.square()).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
    real, noise = 1.5 * moons(500)[0], 1.5 * torch.randn(500, 2)
    return float((energy(real) > energy(noise).T).float().mean() * 2)


def reinforce_contextual(watch: Watch, seed: int) -> float:
    """REINFORCE with a running mean as baseline: the loss has any sign and does not fall."""
    torch.manual_seed(seed)
    rule = torch.randn(4, 5)
    policy = _mlp(4, 32, 5, act=nn.Tanh)
    opt = torch.optim.Adam(policy.parameters(), lr=5e-3)
    baseline, history = 0.0, []
    with watch(policy, opt, objective="reinforcement"):
        for _ in range(500):
            state = torch.randn(32, 4)
            dist = torch.distributions.Categorical(logits=policy(state))
            action = dist.sample()
            reward = ((state @ rule).argmax(1) == action).float()
            baseline = 0.95 * baseline + 0.05 * reward.mean().item()
            loss = -(dist.log_prob(action) * (reward - baseline)).mean() - 0.01 * dist.entropy().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            history.append(reward.mean().item())
    return (1 - sum(history[-50:]) / 50) / 0.8


class _Corridor:
    """Nine cells; the right end pays 1, the left end 0.1."""

    def reset(self) -> int:
        self.cell = 4
        return self.cell

    def step(self, action: int) -> tuple[int, float, bool]:
        self.cell += 1 if action else -1
        return self.cell, {0: 0.1, 8: 1.0}.get(self.cell, 0.0), self.cell in (0, 8)


def q_learning_with_target(watch: Watch, seed: int) -> float:
    """Deep Q-learning with replay and a copy refreshed now and then: targets move, the loss rises and falls."""
    torch.manual_seed(seed)
    random.seed(seed)
    rng = np.random.default_rng(seed)
    q = _mlp(9, 32, 2)
    target = copy.deepcopy(q)
    opt = torch.optim.RMSprop(q.parameters(), lr=2e-3)
    eye, memory, step = torch.eye(9), [], 0
    env = _Corridor()
    with watch({"q": q, "target": target}, opt, objective="reinforcement", frozen=("target",)):
        for episode in range(70):
            s, done = env.reset(), False
            while not done and step < 1500:
                greedy = int(q(eye[s]).argmax())
                a = greedy if rng.random() > max(0.1, 1 - episode / 40) else int(rng.integers(2))
                s2, r, done = env.step(a)
                memory.append((s, a, r, s2, done))
                s, step = s2, step + 1
                if len(memory) < 50:
                    continue
                bs, ba, br, bs2, bd = map(torch.tensor, zip(*random.sample(memory, 32), strict=True))
                with torch.no_grad():
                    goal = br + 0.9 * (1 - bd.float()) * target(eye[bs2]).max(1).values
                loss = F.smooth_l1_loss(q(eye[bs]).gather(1, ba[:, None])[:, 0], goal)
                opt.zero_grad()
                loss.backward()
                opt.step()
                if step % 40 == 0:
                    target.load_state_dict(q.state_dict())
    return float((q(eye[1:8]).argmax(1) == 0).float().mean() * 2)


def actor_critic_pendulum(watch: Watch, seed: int) -> float:
    """An actor and a critic on a toy of control with Gaussian actions: two optimizers, one backward."""
    torch.manual_seed(seed)
    actor, critic = _mlp(2, 32, 1, act=nn.Tanh), _mlp(2, 32, 1, act=nn.Tanh)
    log_std = nn.Parameter(torch.tensor(-0.5))
    actor.register_parameter("log_std", log_std)
    opt_a, opt_c = torch.optim.Adam(actor.parameters(), lr=3e-3), torch.optim.Adam(critic.parameters(), lr=1e-2)
    returns = []
    with watch({"actor": actor, "critic": critic}, {"a": opt_a, "c": opt_c}, objective="reinforcement"):
        for _ in range(120):
            state = torch.randn(32, 2)
            logps, values, rewards = [], [], []
            for _ in range(10):
                dist = torch.distributions.Normal(actor(state)[:, 0], log_std.exp())
                force = dist.sample()
                logps.append(dist.log_prob(force))
                values.append(critic(state)[:, 0])
                speed = 0.9 * state[:, 1] + 0.5 * force.clamp(-2, 2)
                state = torch.stack([state[:, 0] + 0.5 * speed, speed], 1)
                rewards.append(-state[:, 0].abs() - 0.05 * force.abs())
            gain, total = [], torch.zeros(32)
            for r in reversed(rewards):
                total = r + 0.9 * total
                gain.insert(0, total)
            g, v = torch.stack(gain), torch.stack(values)
            adv = (g - v).detach()
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            loss = -(torch.stack(logps) * adv).mean() + F.mse_loss(v, g) - 1e-3 * log_std
            opt_a.zero_grad()
            opt_c.zero_grad()
            loss.backward()
            opt_a.step()
            opt_c.step()
            returns.append(torch.stack(rewards).mean().item())
    return (sum(returns[-10:]) / 10) / (sum(returns[:5]) / 5)


PROGRAMS = [
    healthy(flow_on_small_moons),
    healthy(diffusion_of_points),
    healthy(vae_summed_losses),
    healthy(gan_on_a_ring),
    healthy(wasserstein_with_penalty),
    healthy(energy_by_langevin),
    healthy(reinforce_contextual),
    healthy(q_learning_with_target),
    healthy(actor_critic_pendulum),
]
