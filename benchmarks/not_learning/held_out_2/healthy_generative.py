"""Healthy programs that make things or act: likelihoods, adversaries, diffusion, rewards, and equations."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.not_learning.held_out.data import digits, moons
from benchmarks.not_learning.held_out.entry import healthy, squared_score
from benchmarks.not_learning.held_out_2.parts import endless, loader, mlp, picked
from benchmarks.not_learning.program import Watch


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 64, 16), mlp(8, 64, 64)

    def forward(self, x: Tensor) -> Any:
        mean, log_var = self.encoder(x).chunk(2, 1)
        code = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
        return self.decoder(code), mean, log_var


def digits_variational(watch: Watch, seed: int) -> float:
    """A variational autoencoder whose divergence is phased in, so that its loss may rise for a while."""
    torch.manual_seed(seed)
    x = digits(seed)[0].flatten(1)
    model = _Variational()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for step, (a,) in enumerate(endless(loader(x, size=64), 500)):
            scores, mean, log_var = model(a)
            fit = functional.binary_cross_entropy_with_logits(scores, a, reduction="sum") / len(a)
            prior = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(1).mean()
            optimizer.zero_grad()
            (fit + min(1.0, step / 250) * prior).backward()
            optimizer.step()
    with torch.no_grad():
        return float((model(x)[0].sigmoid() - x).square().mean() / (x - x.mean(0)).square().mean())


def ring_gan(watch: Watch, seed: int) -> float:
    """The usual two players on points of a ring; their losses do not fall."""
    torch.manual_seed(seed)
    maker, judge = mlp(4, 32, 32, 2), mlp(2, 32, 32, 1, act=nn.LeakyReLU)
    first = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.99))
    second = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.99))
    models, both = {"maker": maker, "judge": judge}, {"maker": first, "judge": second}
    loss = functional.binary_cross_entropy_with_logits
    with watch(models, both, objective="adversarial"):
        for _ in range(700):
            angle = 2 * torch.pi * torch.rand(64, 1)
            real = torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2)
            fake = maker(torch.randn(64, 4))
            second.zero_grad()
            told = judge(torch.cat([real, fake.detach()]))
            loss(told, torch.cat([torch.full((64, 1), 0.9), torch.zeros(64, 1)])).backward()
            second.step()
            first.zero_grad()
            loss(judge(fake), torch.ones(64, 1)).backward()
            first.step()
    made = maker(torch.randn(500, 4)).detach()
    return float((made.norm(dim=1) - 1).abs().mean() + made.mean(0).norm() / 2)


def moons_wgan_gradient_penalty(watch: Watch, seed: int) -> float:
    """Wasserstein critics, three steps each, with the gradient penalty and negative losses."""
    torch.manual_seed(seed)
    maker, critic = mlp(2, 48, 48, 2), mlp(2, 48, 48, 1, act=nn.SiLU)
    first = torch.optim.Adam(maker.parameters(), lr=2e-3, betas=(0.0, 0.9))
    second = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.0, 0.9))
    models, both = {"maker": maker, "critic": critic}, {"maker": first, "critic": second}
    with watch(models, both, objective="adversarial"):
        for _ in range(250):
            for _ in range(3):
                real, fake = moons(64)[0], maker(torch.randn(64, 2)).detach()
                share = torch.rand(64, 1)
                mixed = (share * real + (1 - share) * fake).requires_grad_()
                slope = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)[0]
                loss = critic(fake).mean() - critic(real).mean() + 5 * (slope.norm(dim=1) - 1).square().mean()
                second.zero_grad()
                loss.backward()
                second.step()
            first.zero_grad()
            (-critic(maker(torch.randn(64, 2))).mean()).backward()
            first.step()
    made, real = maker(torch.randn(400, 2)).detach(), moons(400)[0]
    return float(
        torch.cdist(made, real).min(1).values.mean() / torch.cdist(torch.randn(400, 2), real).min(1)[0].mean()
    )


def moons_diffusion(watch: Watch, seed: int) -> float:
    """Noise prediction at a random time, with a moving average of the weights; the loss has a high floor."""
    torch.manual_seed(seed)
    kept = torch.cumprod(1 - torch.linspace(1e-3, 0.15, 40), 0)
    model = mlp(3, 64, 64, 2, act=nn.SiLU)
    mean = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def noised(count: int) -> tuple[Tensor, Tensor]:
        time, noise = torch.randint(40, (count, 1)), torch.randn(count, 2)
        point = kept[time].sqrt() * 1.5 * moons(count)[0] + (1 - kept[time]).sqrt() * noise
        return torch.cat([point, time / 20 - 1], 1), noise

    with watch(model, optimizer):
        for _ in range(700):
            a, noise = noised(128)
            optimizer.zero_grad()
            functional.mse_loss(model(a), noise).backward()
            optimizer.step()
            mean.update_parameters(model)
    a, noise = noised(2000)
    return squared_score(mean(a), noise)


class _Coupling(nn.Module):
    """Affine couplings that start as the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList([mlp(1, 32, 2, act=nn.Tanh) for _ in range(6)])
        for net in self.nets:
            nn.init.zeros_(net[-1].weight)  # type: ignore[index]

    def forward(self, x: Tensor) -> Any:
        volume = torch.zeros(len(x))
        for net in self.nets:
            scale, shift = net(x[:, :1]).chunk(2, 1)
            x = torch.cat([x[:, 1:] * scale.tanh().exp() + shift, x[:, :1]], 1)
            volume = volume + scale.tanh().squeeze(1)
        return x, volume


def moons_normalising_flow(watch: Watch, seed: int) -> float:
    """The exact likelihood by couplings; the score counts the nats under the best Gaussian."""
    torch.manual_seed(seed)
    model = _Coupling()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def surprise(points: Tensor) -> Tensor:
        code, volume = model(points)
        result: Tensor = (0.5 * code.square().sum(1) + 1.838 - volume).mean()
        return result

    with watch(model, optimizer):
        for _ in range(450):
            loss = surprise(moons(128)[0])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)
            optimizer.step()
    points = moons(2000)[0]
    gaussian = float(2.838 + 0.5 * torch.logdet(torch.cov(points.T)))
    return float((surprise(points).detach() - gaussian + 1).clamp(min=0))


def digits_quantised_codes(watch: Watch, seed: int) -> float:
    """A vector-quantised autoencoder: gradients pass straight through the choice of a code."""
    torch.manual_seed(seed)
    x = digits(seed)[0].flatten(1)
    encoder, decoder, codes = mlp(64, 64, 32), mlp(32, 64, 64), nn.Embedding(32, 8)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder, "codes": codes})
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def quantised(a: Tensor) -> tuple[Tensor, Tensor]:
        wanted = encoder(a).reshape(-1, 8)
        chosen = codes(torch.cdist(wanted, codes.weight).argmin(1))
        gap = functional.mse_loss(chosen, wanted.detach()) + 0.25 * functional.mse_loss(wanted, chosen.detach())
        out: Tensor = decoder((wanted + (chosen - wanted).detach()).reshape(-1, 32))
        return out, gap

    with watch(model, optimizer):
        for (a,) in endless(loader(x, size=64), 500):
            out, gap = quantised(a)
            optimizer.zero_grad()
            (10 * functional.mse_loss(out, a) + gap).backward()
            optimizer.step()
    with torch.no_grad():
        return float((quantised(x)[0] - x).square().mean() / (x - x.mean(0)).square().mean())


def corridor_deep_q(watch: Watch, seed: int) -> float:
    """Q-learning in a corridor with a target network, replay and fading exploration; the loss need not fall."""
    torch.manual_seed(seed)
    model = mlp(10, 32, 2)
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    here, seen = 5, []
    with watch(model, optimizer, objective="reinforcement"):
        for step in range(700):
            state = functional.one_hot(torch.tensor(here), 10).float()
            explores = torch.rand(()) < max(0.2, 1 - step / 300)
            act = int(torch.randint(2, (1,))) if explores else int(model(state).argmax())
            there = here + 2 * act - 1
            ended = there in (0, 9)
            seen.append((here, act, float(there == 9) + 0.1 * float(there == 0), there, float(ended)))
            here = int(torch.randint(1, 9, (1,))) if ended else there
            if step < 50:
                continue
            rows = torch.tensor([seen[int(row)] for row in picked(len(seen), 32)])
            before, after = (functional.one_hot(rows[:, at].long(), 10).float() for at in (0, 3))
            wanted = rows[:, 2] + 0.9 * (1 - rows[:, 4]) * target(after).amax(1)
            value = model(before).gather(1, rows[:, 1:2].long()).squeeze(1)
            optimizer.zero_grad()
            functional.smooth_l1_loss(value, wanted).backward()
            optimizer.step()
            if step % 25 == 0:
                target.load_state_dict(model.state_dict())
    right = model(torch.eye(10)[2:9]).argmax(1)
    return float((right == 0).double().mean() * 2)


def bandit_policy_gradient(watch: Watch, seed: int) -> float:
    """REINFORCE with a running baseline and an entropy bonus on a bandit with context."""
    torch.manual_seed(seed)
    best = torch.randn(6, 4)
    policy = mlp(6, 32, 4)
    optimizer = torch.optim.Adam(policy.parameters(), lr=5e-3)
    baseline = 0.0
    with watch(policy, optimizer, objective="reinforcement"):
        for _ in range(400):
            context = torch.randn(32, 6)
            choice = torch.distributions.Categorical(logits=policy(context))
            act = choice.sample()
            reward = (act == (context @ best).argmax(1)).float()
            chance = choice.log_prob(act)
            loss = -(chance * (reward - baseline)).mean() - 0.01 * choice.entropy().mean()
            baseline += 0.05 * (float(reward.mean()) - baseline)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    context = torch.randn(1000, 6)
    return float((policy(context).argmax(1) != (context @ best).argmax(1)).double().mean() / 0.75)


def oscillator_physics_informed(watch: Watch, seed: int) -> float:
    """A differential equation: no targets but the equation itself, by second derivatives of the network."""
    torch.manual_seed(seed)
    model = mlp(1, 32, 32, 1, act=nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for _ in range(700):
            time = (3 * torch.rand(64, 1)).requires_grad_()
            place = model(time)
            speed = torch.autograd.grad(place.sum(), time, create_graph=True)[0]
            pull = torch.autograd.grad(speed.sum(), time, create_graph=True)[0]
            zero = torch.zeros(1, 1, requires_grad=True)
            start = model(zero)
            rise = torch.autograd.grad(start.sum(), zero, create_graph=True)[0]
            loss = (pull + place).square().mean() + 5 * (start - 1).square().mean() + 5 * rise.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    time = torch.linspace(0, 3, 100)[:, None]
    return squared_score(model(time), time.cos())


def painted_image(watch: Watch, seed: int) -> float:
    """An image is optimised until a frozen network sees in it what it sees in another one."""
    torch.manual_seed(seed)
    target = digits(seed)[0][:1]
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 16, 3, padding=1))
    net.requires_grad_(False)
    image = nn.Parameter(torch.rand(1, 1, 8, 8))
    optimizer = torch.optim.Adam([image], lr=0.03)
    wanted = net(target)
    with watch(net, optimizer):
        for _ in range(300):
            optimizer.zero_grad()
            functional.mse_loss(net(image), wanted).backward()
            optimizer.step()
            with torch.no_grad():
                image.clamp_(0, 1)
    return squared_score(image.detach(), target)


PROGRAMS = [
    healthy(train)
    for train in (
        digits_variational,
        ring_gan,
        moons_wgan_gradient_penalty,
        moons_diffusion,
        moons_normalising_flow,
        digits_quantised_codes,
        corridor_deep_q,
        bandit_policy_gradient,
        oscillator_physics_informed,
        painted_image,
    )
]
