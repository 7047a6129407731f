"""Healthy programs of the set: sequences, generative."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, adamw, healthy, sgd, update


class _CharGRU(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocab, 32)
        self.rnn = nn.GRU(32, 64, batch_first=True)
        self.out = nn.Linear(64, vocab)

    def forward(self, ids: Tensor, h: Tensor | None) -> tuple[Tensor, Tensor]:
        y, h = self.rnn(self.emb(ids), h)
        return (self.out(y), h)


class _Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.mlp = parts.mlp(dim, 2 * dim, dim, act=nn.GELU)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class _TinyGPT(nn.Module):
    def __init__(self, vocab: int, dim: int = 32, length: int = 32) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Parameter(torch.zeros(length, dim))
        self.blocks = nn.Sequential(_Block(dim), _Block(dim))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.tok.weight, std=0.02)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tok(ids) + self.pos[: ids.shape[1]])))


class _TCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.utils.parametrizations.weight_norm(nn.Conv1d(1 if i == 0 else 16, 16, 3, dilation=2**i))
            for i in range(4)
        )
        self.out = nn.Conv1d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            pad = (layer.kernel_size[0] - 1) * layer.dilation[0]
            x = F.relu(layer(F.pad(x, (pad, 0))))
        return self.out(x)


def _tones(count: int) -> tuple[Tensor, Tensor]:
    kind = torch.randint(4, (count,))
    time = torch.arange(256) / 256
    pitch = (12 + 9 * kind + 3 * torch.rand(count))[:, None]
    return ((2 * math.pi * (pitch * time + torch.rand(count, 1))).sin() + 0.3 * torch.randn(count, 256), kind)


class HealthySequences(Programs):
    """Healthy programs on sequences and graphs of time: text, audio, forecasts, differential equations."""

    @healthy
    def char_gru_truncated(self) -> None:
        """A character model with truncated backpropagation: the state is carried over, detached; always clipped."""
        text, vocab = data.library_text()
        rows = text[: len(text) // 16 * 16].view(16, -1)
        model = _CharGRU(vocab)
        for _ in self.watched(range(7), model, adamw(model, 0.003)):
            h = None
            for at in range(0, rows.shape[1] - 25, 24):
                x, y = rows[:, at : at + 24], rows[:, at + 1 : at + 25]
                h = h.detach() if h is not None else None
                logits, h = model(x, h)
                self.update(F.cross_entropy(logits.transpose(1, 2), y), clip=0.25)

    @healthy
    def tiny_gpt_warmup_cosine(self) -> None:
        """A causal transformer: tied embeddings, zero-initialised projections, warm-up from 0, a cosine to 0."""
        text, vocab = data.library_text()
        model = _TinyGPT(vocab)
        decay = [p for p in model.parameters() if p.dim() > 1]
        rest = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = optim.AdamW(groups, lr=0.004, betas=(0.9, 0.95))
        steps, warmup = 320, 40

        def factor(step: int) -> float:
            if step < warmup:
                return step / warmup
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))

        scheduler = optim.lr_scheduler.LambdaLR(optimizer, factor)
        for _ in self.watched(range(steps), model, optimizer, scheduler=scheduler, total_steps=steps):
            x, y = data.text_windows(text, 12, 32)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

    @healthy
    def skipgram_negative_sampling(self) -> None:
        """Embeddings of characters by negative sampling, logsigmoid by hand, output vectors that start at 0."""
        text, vocab = data.library_text()
        inside, outside = nn.Embedding(vocab, 16), nn.Embedding(vocab, 16)
        nn.init.uniform_(inside.weight, -0.5 / 16, 0.5 / 16)
        nn.init.zeros_(outside.weight)
        opt = optim.Adam([*inside.parameters(), *outside.parameters()], lr=0.02)
        noise = text.bincount(minlength=vocab).float() ** 0.75
        first = None
        for _ in self.watched(range(600), {"inside": inside, "outside": outside}, opt):
            at = torch.randint(2, len(text) - 2, (128,))
            near = text[at + torch.randint(1, 3, (128,))]
            far = torch.multinomial(noise, 128 * 5, replacement=True).view(128, 5)
            v = inside(text[at])
            good = F.logsigmoid((v * outside(near)).sum(-1))
            bad = F.logsigmoid(-(v[:, None] * outside(far)).sum(-1)).sum(-1)
            loss = update(opt, -(good + bad).mean())
            first = first or loss.item()

    @healthy
    def forecast_tcn_onecycle(self) -> None:
        """Causal dilated convolutions with weight norm on a seasonal series, Huber loss, OneCycleLR."""
        series = data.seasons(200, 65)
        model = _TCN()
        optimizer = adam(model, 0.001)
        total = 300
        scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=total)
        for step in self.watched(range(total), model, optimizer, scheduler=scheduler, total_steps=total):
            batch = series[torch.randint(150, (16,))][:, None]
            update(optimizer, F.huber_loss(model(batch[..., :-1]), batch[..., 1:], delta=0.5))
            scheduler.step()
            if step % 50 == 49:
                held = series[150:, None]
                with torch.no_grad():
                    self.watching.validated(F.huber_loss(model(held[..., :-1]), held[..., 1:], delta=0.5).item())

    @healthy
    def audio_tones_conv1d(self) -> None:
        """Raw tones into strided 1-d convolutions, bf16 autocast, a cosine with warm restarts."""
        net = nn.Sequential(
            nn.Conv1d(1, 12, 16, 4),
            nn.GroupNorm(3, 12),
            nn.ReLU(),
            nn.Conv1d(12, 24, 8, 4),
            nn.ReLU(),
            nn.AdaptiveMaxPool1d(1),
            nn.Flatten(),
            nn.Linear(24, 4),
        )
        opt = sgd(net, 0.05, momentum=0.9)
        sched = optim.lr_scheduler.CosineAnnealingWarmRestarts(opt, T_0=60, T_mult=2)
        for _ in self.watched(range(400), net, opt, scheduler=sched):
            wave, kind = _tones(32)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(net(wave[:, None]), kind)
            update(opt, loss)
            sched.step()

    @healthy
    def addition_curriculum(self) -> None:
        """Sums of marked numbers by an LSTM; the sequences grow, so the loss jumps up at each stage."""
        lstm, head = nn.LSTM(2, 32), nn.Linear(32, 1)
        model = nn.ModuleList([lstm, head])
        optimizer = adam(model, 0.008)

        def batches(length: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
            for _ in range(count):
                value = torch.rand(length, 48)
                mark = torch.zeros(length, 48)
                for column in range(48):
                    mark[torch.randperm(length)[:2], column] = 1
                yield (torch.stack([value, mark], 2), (value * mark).sum(0))

        for length in self.watched((2, 4, 8, 12), model, optimizer):
            for x, y in batches(length, 120):
                _, (h, _) = lstm(x)
                loss = (head(h[-1]).squeeze(-1) - y).square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_value_(model.parameters(), 0.5)
                optimizer.step()

    @healthy
    def spiral_ode_unrolled(self) -> None:
        """A neural differential equation, unrolled by Runge-Kutta, on a spiral; mean absolute error."""
        matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
        start = torch.randn(64, 2)
        truth = torch.stack([start @ torch.matrix_exp(matrix * 0.1 * k).T for k in range(1, 11)])
        func = parts.mlp(2, 32, 2, act=nn.Tanh)
        nn.init.normal_(func[2].weight, std=0.1)
        optimizer = optim.RAdam(func.parameters(), lr=0.01)

        def solve(y: Tensor, dt: float = 0.1) -> Tensor:
            path = []
            for _ in range(10):
                k1 = func(y)
                k2 = func(y + dt * k1 / 2)
                y = y + dt * k2
                path.append(y)
            return torch.stack(path)

        for _ in self.watched(range(300), func, optimizer):
            i = torch.randperm(64)[:20]
            update(optimizer, torch.mean(torch.abs(solve(start[i]) - truth[:, i])))

    @healthy
    def physics_informed_poisson(self) -> None:
        """A physics-informed network: the loss holds second derivatives by double backward and is never a label's."""
        net = parts.mlp(1, 24, 24, 1, act=nn.Tanh)
        opt = adam(net, 0.003)
        scheduler = optim.lr_scheduler.ExponentialLR(opt, 0.997)
        edge = torch.tensor([[0.0], [1.0]])
        for _ in self.watched(range(800), net, opt, scheduler=scheduler):
            x = torch.rand(64, 1, requires_grad=True)
            u = net(x)
            du = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
            ddu = torch.autograd.grad(du.sum(), x, create_graph=True)[0]
            residual = ddu + math.pi**2 * torch.sin(math.pi * x)
            update(opt, residual.square().mean() + 20 * net(edge).square().mean())
            scheduler.step()

    @healthy
    def ctc_strokes(self) -> None:
        """A recogniser trained by CTC, which first learns to say blank; float64 throughout."""
        shapes = torch.randn(5, 6, dtype=torch.float64)
        net = nn.Sequential(nn.Conv1d(6, 32, 3, padding=1), nn.ReLU(), nn.Conv1d(32, 6, 1)).double()

        def sample(count: int) -> tuple[Tensor, Tensor]:
            word = torch.randint(5, (count, 4))
            frames = shapes[word].repeat_interleave(3, 1)
            return ((frames + 0.3 * torch.randn(count, 12, 6, dtype=torch.float64)).transpose(1, 2), word)

        ctc = nn.CTCLoss(blank=5, zero_infinity=True)
        first = None
        for _ in self.watched(range(400), net, adam(net, 0.01)):
            x, word = sample(24)
            logp = net(x).permute(2, 0, 1).log_softmax(-1)
            loss = self.update(ctc(logp, word, torch.full((24,), 12), torch.full((24,), 4)))
            first = first or loss.item()


def _mlp(*sizes: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


class _RealNVP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(_mlp(1, 32, 32, 2, act=nn.Tanh) for _ in range(6))

    def log_prob(self, x: Tensor) -> Tensor:
        log_det = torch.zeros(len(x))
        for k, net in enumerate(self.nets):
            keep, move = (x[:, :1], x[:, 1:]) if k % 2 else (x[:, 1:], x[:, :1])
            s, t = net(keep).chunk(2, 1)
            s = s.tanh() * 2
            move = move * s.exp() + t
            x = torch.cat([keep, move], 1) if k % 2 else torch.cat([move, keep], 1)
            log_det = log_det + s[:, 0]
        return -0.5 * x.square().sum(1) - math.log(2 * math.pi) + log_det


class _VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = _mlp(64, 96, 16), _mlp(8, 96, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mu, logvar = self.enc(x).chunk(2, 1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return (torch.sigmoid(self.dec(z)), mu, logvar)


def _ring(count: int) -> Tensor:
    angle = torch.randint(8, (count,)) * (math.pi / 4)
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.2 * torch.randn(count, 2)


class _Corridor:
    """Nine cells; the right end pays 1, the left end 0.1."""

    def reset(self) -> int:
        self.cell = 4
        return self.cell

    def step(self, action: int) -> tuple[int, float, bool]:
        self.cell += 1 if action else -1
        return (self.cell, {0: 0.1, 8: 1.0}.get(self.cell, 0.0), self.cell in (0, 8))


class HealthyGenerative(Programs):
    """Healthy programs that generate or act: flows, diffusion, adversarial pairs, energies, reinforcement."""

    @healthy
    def flow_on_small_moons(self) -> None:
        """A normalising flow on data of small scale: its negative log-likelihood goes well below 0."""
        flow = _RealNVP()
        for _ in self.watched(range(400), flow, adam(flow, 0.005), total_steps=400):
            x, _ = data.moons(128)
            self.update(-flow.log_prob(0.3 * x).mean(), clip=5.0)

    @healthy
    def diffusion_of_points(self) -> None:
        """Denoising diffusion in the plane with a running average of the weights: the loss soon stays where it is."""
        beta = torch.linspace(0.001, 0.2, 40)
        keep = (1 - beta).cumprod(0)
        net = _mlp(3, 96, 96, 2, act=nn.SiLU)
        ema = copy.deepcopy(net)
        for _ in self.watched(range(700), net, adam(net, 0.002)):
            x = 1.5 * data.moons(128)[0]
            t = torch.randint(40, (128,))
            a = keep[t][:, None]
            noise = torch.randn_like(x)
            guess = net(torch.cat([a.sqrt() * x + (1 - a).sqrt() * noise, t[:, None] / 40], 1))
            self.update(F.mse_loss(guess, noise))
            with torch.no_grad():
                for e, p in zip(ema.parameters(), net.parameters(), strict=True):
                    e.mul_(0.99).add_(p, alpha=0.01)

    @healthy
    def vae_summed_losses(self) -> None:
        """A VAE whose losses are summed over the batch, as in the well-known example: values in the thousands."""
        x, _, held, _ = data.digit_images(self.seed)
        x, held = x.flatten(1), held.flatten(1)
        model = _VAE()
        for _ in self.watched(range(20), model, adam(model, 0.002)):
            for rows in torch.randperm(len(x)).split(64):
                recon, mu, logvar = model(x[rows])
                bce = F.binary_cross_entropy(recon, x[rows], reduction="sum")
                kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
                self.update(bce + kld)
            with torch.no_grad():
                self.watching.validated(F.binary_cross_entropy(model(held)[0], held).item())

    @healthy
    def gan_on_a_ring(self) -> None:
        """An adversarial pair, alternating; the generator's backward also fills the discriminator's gradients."""
        gen, disc = _mlp(8, 64, 64, 2), _mlp(2, 64, 64, 1, act=nn.LeakyReLU)
        opt_g = adam(gen, 0.001, betas=(0.5, 0.999))
        opt_d = adam(disc, 0.001, betas=(0.5, 0.999))
        bce = nn.BCEWithLogitsLoss()
        one, zero = torch.ones(128, 1), torch.zeros(128, 1)
        for _ in self.watched(
            range(900), {"gen": gen, "disc": disc}, {"gen": opt_g, "disc": opt_d}, objective="adversarial"
        ):
            disc.zero_grad()
            fake = gen(torch.randn(128, 8))
            bce(disc(_ring(128)), one * 0.9).backward()
            bce(disc(fake.detach()), zero).backward()
            opt_d.step()
            gen.zero_grad()
            bce(disc(fake), one).backward()
            opt_g.step()

    @healthy
    def wasserstein_with_penalty(self) -> None:
        """A critic with a gradient penalty, three critic updates per generator update, losses of any sign."""
        gen, critic = _mlp(4, 48, 48, 2), _mlp(2, 48, 48, 1)
        opt_g = adam(gen, 0.001, betas=(0.5, 0.9))
        opt_c = adam(critic, 0.003, betas=(0.5, 0.9))
        for step in self.watched(
            range(900), {"gen": gen, "critic": critic}, {"g": opt_g, "c": opt_c}, objective="adversarial"
        ):
            real, fake = data.moons(64)[0], gen(torch.randn(64, 4))
            mix = torch.rand(64, 1)
            at = (mix * real + (1 - mix) * fake.detach()).requires_grad_()
            slope = torch.autograd.grad(critic(at).sum(), at, create_graph=True)[0]
            penalty = (slope.norm(dim=1) - 1).square().mean()
            update(opt_c, critic(fake.detach()).mean() - critic(real).mean() + penalty)
            if step % 3 == 2:
                update(opt_g, -critic(gen(torch.randn(64, 4))).mean())

    @healthy
    def energy_by_langevin(self) -> None:
        """An energy model by contrastive divergence: the loss hovers about 0; samples by gradients."""
        energy = _mlp(2, 64, 64, 1, act=nn.SiLU)
        opt = adam(energy, 0.002, betas=(0.0, 0.999))
        buffer = torch.randn(512, 2)
        for _ in self.watched(range(300), energy, opt, objective="adversarial"):
            i = torch.randint(512, (64,))
            x = buffer[i]
            for _ in range(8):
                x = x.detach().requires_grad_()
                slope = torch.autograd.grad(energy(x).sum(), x)[0]
                x = x - 0.05 * slope + 0.1 * torch.randn_like(x)
            x = x.detach()
            buffer[i] = x
            real = 1.5 * data.moons(64)[0]
            e_real, e_fake = energy(real), energy(x)
            update(opt, e_real.mean() - e_fake.mean() + 0.1 * (e_real.square() + e_fake.square()).mean())

    @healthy
    def reinforce_contextual(self) -> None:
        """REINFORCE with a running mean as baseline: the loss has any sign and does not fall."""
        rule = torch.randn(4, 5)
        policy = _mlp(4, 32, 5, act=nn.Tanh)
        baseline, history = 0.0, []
        for _ in self.watched(range(500), policy, adam(policy, 0.005), objective="reinforcement"):
            state = torch.randn(32, 4)
            dist = torch.distributions.Categorical(logits=policy(state))
            action = dist.sample()
            reward = ((state @ rule).argmax(1) == action).float()
            baseline = 0.95 * baseline + 0.05 * reward.mean().item()
            self.update(-(dist.log_prob(action) * (reward - baseline)).mean() - 0.01 * dist.entropy().mean())
            history.append(reward.mean().item())

    @healthy
    def q_learning_with_target(self) -> None:
        """Deep Q-learning with replay and a copy refreshed now and then: targets move, the loss rises and falls."""
        random.seed(self.seed)
        rng = np.random.default_rng(self.seed)
        q = _mlp(9, 32, 2)
        target = copy.deepcopy(q)
        opt = optim.RMSprop(q.parameters(), lr=0.002)
        eye, memory, step = torch.eye(9), [], 0
        env = _Corridor()
        for episode in self.watched(
            range(70), {"q": q, "target": target}, opt, objective="reinforcement", frozen=("target",)
        ):
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
                update(opt, F.smooth_l1_loss(q(eye[bs]).gather(1, ba[:, None])[:, 0], goal))
                if step % 40 == 0:
                    target.load_state_dict(q.state_dict())

    @healthy
    def actor_critic_pendulum(self) -> None:
        """An actor and a critic on a toy of control with Gaussian actions: two optimizers, one backward."""
        actor, critic = _mlp(2, 32, 1, act=nn.Tanh), _mlp(2, 32, 1, act=nn.Tanh)
        log_std = nn.Parameter(torch.tensor(-0.5))
        actor.register_parameter("log_std", log_std)
        opt_a, opt_c = adam(actor, 0.003), adam(critic, 0.01)
        returns = []
        for _ in self.watched(
            range(120), {"actor": actor, "critic": critic}, {"a": opt_a, "c": opt_c}, objective="reinforcement"
        ):
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
            adv = (adv - adv.mean()) / (adv.std() + 1e-08)
            loss = -(torch.stack(logps) * adv).mean() + F.mse_loss(v, g) - 0.001 * log_std
            opt_a.zero_grad()
            opt_c.zero_grad()
            loss.backward()
            opt_a.step()
            opt_c.step()
            returns.append(torch.stack(rewards).mean().item())
