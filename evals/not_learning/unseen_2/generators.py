"""Healthy generative programs: adversarial, variational, flows, diffusion and energies."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from evals.not_learning.data import digits, moons
from evals.not_learning.parts import mlp
from evals.not_learning.program import Programs, adam, healthy


def ring(count: int) -> Tensor:
    """Return points around eight places on a circle, ``(count, 2)``."""
    angle = torch.randint(8, (count,)) * (math.pi / 4)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2)


class Coupling(nn.Module):
    """One affine coupling layer of a flow over two dimensions."""

    def __init__(self, *, swap: bool) -> None:
        super().__init__()
        self.swap = swap
        self.net = mlp(1, 32, 2)
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the transformed points and the log determinants, shape (n,)."""
        if self.swap:
            x = x.flip(1)
        kept, changed = x.chunk(2, dim=1)
        log_scale, shift = self.net(kept).chunk(2, dim=1)
        log_scale = 2 * torch.tanh(log_scale)
        return torch.cat([kept, changed * log_scale.exp() + shift], dim=1), log_scale.squeeze(1)


class MaskedLinear(nn.Linear):
    """A linear layer some of whose weights are held at zero by a mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the masked weight."""
        return functional.linear(x, self.weight * self.mask, self.bias)


class Generators(Programs):
    """Healthy generative programs."""

    @healthy
    def adversarial_ring(self) -> None:
        """A non-saturating GAN; both losses hover around those of a coin toss."""
        generator = mlp(4, 32, 32, 2)
        critic = mlp(2, 32, 32, 1, act=nn.SiLU)
        optimizer_g = optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
        optimizer_d = optim.Adam(critic.parameters(), lr=3e-3, betas=(0.5, 0.999))
        criterion = nn.BCEWithLogitsLoss()
        ones = torch.ones(64, 1)
        zeros = torch.zeros(64, 1)
        with self.watch(
            {"generator": generator, "discriminator": critic},
            {"generator": optimizer_g, "discriminator": optimizer_d},
            objective="adversarial",
        ):
            for _ in range(350):
                optimizer_d.zero_grad()
                fake = generator(torch.randn(64, 4))
                loss_d = criterion(critic(ring(64)), ones) + criterion(critic(fake.detach()), zeros)
                loss_d.backward()
                optimizer_d.step()
                optimizer_g.zero_grad()
                loss_g = criterion(critic(fake), ones)
                loss_g.backward()
                optimizer_g.step()
        self.score = generator(torch.randn(500, 4)).norm(dim=1).mean().item()

    @healthy
    def wasserstein_with_gradient_penalty(self) -> None:
        """Five critic steps per generator step; the critic's loss is negative and unbounded."""
        generator = mlp(2, 32, 2)
        critic = mlp(2, 64, 1, act=nn.LeakyReLU)
        optimizer_g = optim.Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.9))
        optimizer_c = optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.9))
        with self.watch(
            {"generator": generator, "critic": critic},
            {"generator": optimizer_g, "critic": optimizer_c},
            objective="adversarial",
        ):
            for _ in range(120):
                for _ in range(5):
                    real = moons(64)[0] + 0.5
                    fake = generator(torch.randn(64, 2)).detach()
                    share = torch.rand(64, 1)
                    between = (share * real + (1 - share) * fake).requires_grad_()
                    slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
                    penalty = (slope[0].norm(dim=1) - 1).square().mean()
                    loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
                    optimizer_c.zero_grad()
                    loss.backward()
                    optimizer_c.step()
                optimizer_g.zero_grad()
                (-critic(generator(torch.randn(64, 2))).mean()).backward()
                optimizer_g.step()
        self.score = generator(torch.randn(500, 2)).mean().item()

    @healthy
    def hinge_gan_with_spectral_norm(self) -> None:
        """The discriminator learns at four times the generator's rate; its loss nears two."""
        generator = nn.Sequential(mlp(8, 64, 64), nn.Sigmoid())
        discriminator = nn.Sequential(
            spectral_norm(nn.Linear(64, 64)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(64, 1)),
        )
        slow = optim.Adam(generator.parameters(), lr=5e-4, betas=(0.0, 0.99))
        fast = optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.0, 0.99))
        images = digits(self.seed).x
        with self.watch(
            {"generator": generator, "discriminator": discriminator},
            {"generator": slow, "discriminator": fast},
            objective="adversarial",
        ):
            for _ in range(250):
                real = images[torch.randint(len(images), (64,))]
                fake = generator(torch.randn(64, 8))
                loss = (1 - discriminator(real)).relu().mean()
                loss = loss + (1 + discriminator(fake.detach())).relu().mean()
                fast.zero_grad()
                loss.backward()
                fast.step()
                slow.zero_grad()
                discriminator(fake).mean().neg().backward()
                slow.step()
        self.score = (fake.mean(0) - images.mean(0)).abs().mean().item()

    @healthy
    def variational_with_annealed_divergence(self) -> None:
        """The weight of the divergence grows from 0 to 1, so the total rises meanwhile."""
        images = digits(self.seed).x
        encoder = mlp(64, 96, 16)
        decoder = mlp(8, 96, 64)
        model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
        optimizer = adam(model, 2e-3)
        with self.watch(model, optimizer):
            for step in range(350):
                batch = images[torch.randint(len(images), (64,))]
                mean, log_variance = encoder(batch).chunk(2, dim=1)
                latent = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
                entropy = functional.binary_cross_entropy_with_logits(
                    decoder(latent), batch, reduction="none"
                ).sum(dim=1)
                divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(dim=1)
                loss = (entropy + min(1.0, step / 200) * divergence).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def coupling_flow_on_moons(self) -> None:
        """Exact likelihood by couplings that start as the identity; the loss turns negative."""
        flow = nn.ModuleList([Coupling(swap=bool(layer)) for layer in (0, 1, 1, 1, 1, 1)])
        optimizer = optim.AdamW(flow.parameters(), lr=3e-3, weight_decay=1e-5)
        scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=300)
        with self.watch(flow, optimizer, scheduler=scheduler):
            for _ in range(300):
                points = moons(128, noise=0.03)[0]
                log_determinant = torch.zeros(128)
                for layer in flow:
                    points, change = layer(points)
                    log_determinant = log_determinant + change
                log_normal = -0.5 * points.square().sum(dim=1) - math.log(2 * math.pi)
                loss = -(log_normal + log_determinant).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()

    @healthy
    def diffusion_of_points(self) -> None:
        """Noise prediction: after a quick fall the loss stays on its noisy floor near 0.3."""
        steps = 50
        beta = torch.linspace(1e-3, 0.15, steps)
        kept = (1 - beta).cumprod(0)
        model = mlp(2 + 16, 64, 64, 2, act=nn.SiLU)
        frequency = torch.arange(1, 9)
        optimizer = optim.AdamW(model.parameters(), lr=2e-3)
        with self.watch(model, optimizer):
            for _ in range(500):
                clean = ring(128)
                time = torch.randint(steps, (128,))
                noise = torch.randn_like(clean)
                level = kept[time, None]
                noisy = level.sqrt() * clean + (1 - level).sqrt() * noise
                phase = time[:, None] / steps * frequency * math.pi
                condition = torch.cat([phase.sin(), phase.cos()], dim=1)
                guess = model(torch.cat([noisy, condition], dim=1))
                loss = functional.mse_loss(guess, noise)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def vector_quantised_codes(self) -> None:
        """Straight-through codes: gradients jump over an argmin, the codebook has its own loss."""
        images = digits(self.seed).x
        encoder = mlp(64, 64, 16)
        decoder = mlp(16, 64, 64)
        codebook = nn.Embedding(32, 4)
        nn.init.uniform_(codebook.weight, -0.5, 0.5)
        model = nn.ModuleDict({"encoder": encoder, "codebook": codebook, "decoder": decoder})
        optimizer = adam(model, 2e-3)
        with self.watch(model, optimizer):
            for _ in range(300):
                batch = images[torch.randint(len(images), (64,))]
                vectors = encoder(batch).view(-1, 4)
                nearest = torch.cdist(vectors, codebook.weight).argmin(dim=1)
                codes = codebook(nearest)
                passed = vectors + (codes - vectors).detach()
                reconstruction = functional.mse_loss(decoder(passed.view(64, 16)), batch)
                commitment = functional.mse_loss(vectors, codes.detach())
                codebook_loss = functional.mse_loss(codes, vectors.detach())
                loss = reconstruction + codebook_loss + 0.25 * commitment
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def autoregressive_pixels(self) -> None:
        """Masked layers model each binary pixel given those before it; sums, not means."""
        pixels = (digits(self.seed).x > 0.5).float()
        degree = torch.arange(64)
        hidden = torch.arange(128) % 63
        model = nn.Sequential(
            MaskedLinear((hidden[:, None] >= degree).float()),
            nn.ReLU(),
            MaskedLinear((degree[:, None] > hidden).float()),
        )
        optimizer = adam(model, 4e-3)
        with self.watch(model, optimizer):
            for _ in range(350):
                batch = pixels[torch.randint(len(pixels), (64,))]
                loss = functional.binary_cross_entropy_with_logits(
                    model(batch), batch, reduction="sum"
                )
                optimizer.zero_grad()
                (loss / len(batch)).backward()
                optimizer.step()

    @healthy
    def mixture_density_for_an_inverse(self) -> None:
        """A relation with several answers: the negative log likelihood of a mixture."""
        model = mlp(1, 48, 48, 15, act=nn.Tanh)
        optimizer = adam(model, 4e-3)
        with self.watch(model, optimizer):
            for _ in range(400):
                y = torch.rand(128, 1) * 2 - 1
                x = y + 0.6 * (math.pi * y).sin() + 0.03 * torch.randn_like(y)
                weight, mean, log_std = model(x).chunk(3, dim=1)
                parts = torch.distributions.Normal(mean, log_std.clamp(-4, 2).exp())
                joint = weight.log_softmax(dim=1) + parts.log_prob(y)
                loss = -joint.logsumexp(dim=1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def energy_by_contrast_with_noise(self) -> None:
        """Noise-contrastive estimation of an energy whose normalizer is a parameter as well."""
        energy = mlp(2, 64, 64, 1, act=nn.SiLU)
        energy.register_parameter("log_normalizer", nn.Parameter(torch.zeros(1)))
        optimizer = optim.Adam(energy.parameters(), lr=4e-3)
        noise = torch.distributions.Normal(0.0, 1.0)

        def log_odds(points: Tensor) -> Tensor:
            density = -energy(points).squeeze(1) - energy.log_normalizer
            return density - noise.log_prob(points).sum(dim=1)

        with self.watch(energy, optimizer):
            for _ in range(400):
                real = log_odds(ring(128))
                drawn = log_odds(noise.sample((128, 2)))
                loss = functional.softplus(-real).mean() + functional.softplus(drawn).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        self.score = (energy(torch.zeros(1, 2)) - energy(ring(200)).mean()).item()
