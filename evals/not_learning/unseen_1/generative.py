"""Programs that learn distributions."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from evals.not_learning.data import digit_images, moons
from evals.not_learning.parts import mlp
from evals.not_learning.program import Programs, faulty, healthy

LOG_TWO_PI = math.log(2 * math.pi)


def ring(count: int) -> Tensor:
    """Return points near a circle of radius two, shape ``(count, 2)``."""
    angle = 2 * math.pi * torch.rand(count)
    radius = 2 + 0.1 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)


def normal_log_density(z: Tensor) -> Tensor:
    """Return the log density of rows under a standard normal distribution."""
    return -0.5 * (z**2 + LOG_TWO_PI).sum(dim=1)


class VariationalAutoencoder(nn.Module):
    """An encoder to means and log variances of eight numbers, and a decoder."""

    def __init__(self, pixels: int = 64, codes: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(pixels, 64), nn.ReLU())
        self.mean = nn.Linear(64, codes)
        self.log_variance = nn.Linear(64, codes)
        self.decoder = nn.Sequential(nn.Linear(codes, 64), nn.ReLU(), nn.Linear(64, pixels))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return scores of the pixels, means and log variances."""
        hidden = self.encoder(x)
        mean = self.mean(hidden)
        log_variance = self.log_variance(hidden)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


class Coupling(nn.Module):
    """An affine coupling layer over points of the plane."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.network = mlp(1, 32, 32, 2, act=nn.Tanh)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the transformed points and the log determinant for each."""
        kept = x[:, self.first : self.first + 1]
        moved = x[:, 1 - self.first : 2 - self.first]
        scale, shift = self.network(kept).chunk(2, dim=1)
        scale = 2 * torch.tanh(scale)
        moved = moved * scale.exp() + shift
        parts = [kept, moved] if self.first == 0 else [moved, kept]
        return torch.cat(parts, dim=1), scale.squeeze(1)


class Flow(nn.Module):
    """Some coupling layers."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(number % 2) for number in range(layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return latent points and the log determinants."""
        total = torch.zeros(len(x))
        for layer in self.layers:
            x, log_determinant = layer(x)
            total = total + log_determinant
        return x, total


class NoisePredictor(nn.Module):
    """A network that predicts the noise in points at a time in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.network = mlp(2 + 8, 64, 64, 2, act=nn.SiLU)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Return a vector for each point."""
        frequency = 2.0 ** torch.arange(4)
        angle = time[:, None] * frequency * math.pi / 2
        return self.network(torch.cat([x, angle.sin(), angle.cos()], dim=1))


class QuantizedAutoencoder(nn.Module):
    """An autoencoder whose code is one vector out of a codebook for each of four parts."""

    def __init__(self, vectors: int = 32, size: int = 8) -> None:
        super().__init__()
        self.size = size
        self.encoder = mlp(64, 64, 4 * size)
        self.decoder = mlp(4 * size, 64, 64)
        self.codebook = nn.Embedding(vectors, size)
        nn.init.uniform_(self.codebook.weight, -0.3, 0.3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the reconstruction, and the losses of codebook and commitment."""
        z = self.encoder(x).view(-1, self.size)
        nearest = torch.cdist(z, self.codebook.weight).argmin(dim=1)
        code = self.codebook(nearest)
        commitment = functional.mse_loss(z, code.detach())
        follow = functional.mse_loss(code, z.detach())
        straight = z + (code - z).detach()
        return self.decoder(straight.view(len(x), -1)), follow + 0.25 * commitment


class Generative(Programs):
    """Adversaries, variational autoencoders, diffusion, flows and energies."""

    @healthy
    def adversarial_points(self) -> None:
        """A generator of points on a ring against a discriminator, with the usual losses."""
        generator = mlp(2, 32, 32, 2)
        discriminator = mlp(2, 32, 32, 1, act=nn.ReLU)
        generator_optimizer = optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
        discriminator_optimizer = optim.Adam(
            discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999)
        )
        criterion = nn.BCEWithLogitsLoss()
        ones = torch.ones(128, 1)
        zeros = torch.zeros(128, 1)
        with self.watch(
            {"generator": generator, "discriminator": discriminator},
            {"generator": generator_optimizer, "discriminator": discriminator_optimizer},
            objective="adversarial",
        ):
            for _ in range(400):
                real = ring(128)
                fake = generator(torch.randn(128, 2))
                discriminator_optimizer.zero_grad()
                loss = criterion(discriminator(real), ones)
                loss = loss + criterion(discriminator(fake.detach()), zeros)
                loss.backward()
                discriminator_optimizer.step()

                generator_optimizer.zero_grad()
                generator_loss = criterion(discriminator(fake), ones)
                generator_loss.backward()
                generator_optimizer.step()

    @healthy
    def wasserstein_with_gradient_penalty(self) -> None:
        """A critic with a gradient penalty, two of its steps for each one of the generator."""
        generator = mlp(2, 32, 32, 2)
        critic = mlp(2, 48, 48, 1, act=nn.LeakyReLU)
        generator_optimizer = optim.Adam(generator.parameters(), lr=5e-3, betas=(0.0, 0.9))
        critic_optimizer = optim.Adam(critic.parameters(), lr=5e-3, betas=(0.0, 0.9))
        with self.watch(
            {"generator": generator, "critic": critic},
            {"generator": generator_optimizer, "critic": critic_optimizer},
            objective="adversarial",
        ):
            for _ in range(200):
                for _ in range(2):
                    real = ring(64)
                    fake = generator(torch.randn(64, 2)).detach()
                    share = torch.rand(64, 1)
                    between = (share * real + (1 - share) * fake).requires_grad_()
                    slope = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[
                        0
                    ]
                    penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
                    critic_loss = critic(fake).mean() - critic(real).mean() + penalty
                    critic_optimizer.zero_grad()
                    critic_loss.backward()
                    critic_optimizer.step()
                generator_loss = -critic(generator(torch.randn(64, 2))).mean()
                generator_optimizer.zero_grad()
                generator_loss.backward()
                generator_optimizer.step()

    @healthy
    def hinge_adversaries_with_spectral_norm(self) -> None:
        """Hinge losses, a discriminator with spectral norm, and an average of the generator."""
        generator = mlp(4, 48, 48, 2)
        average = copy.deepcopy(generator)
        discriminator = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(2, 48)),
            nn.LeakyReLU(0.2),
            nn.utils.parametrizations.spectral_norm(nn.Linear(48, 48)),
            nn.LeakyReLU(0.2),
            nn.Linear(48, 1),
        )
        generator_optimizer = optim.Adam(generator.parameters(), lr=1e-3, betas=(0.0, 0.99))
        discriminator_optimizer = optim.Adam(discriminator.parameters(), lr=4e-3, betas=(0.0, 0.99))
        with self.watch(
            {"generator": generator, "discriminator": discriminator},
            {"generator": generator_optimizer, "discriminator": discriminator_optimizer},
            objective="adversarial",
        ):
            for _ in range(250):
                fake = generator(torch.randn(128, 4))
                loss = functional.relu(1 - discriminator(ring(128))).mean()
                loss = loss + functional.relu(1 + discriminator(fake.detach())).mean()
                discriminator_optimizer.zero_grad()
                loss.backward()
                discriminator_optimizer.step()

                generator_loss = -discriminator(fake).mean()
                generator_optimizer.zero_grad()
                generator_loss.backward()
                generator_optimizer.step()
                with torch.no_grad():
                    for slow, fast in zip(
                        average.parameters(), generator.parameters(), strict=True
                    ):
                        slow.lerp_(fast, 0.05)

    @healthy
    def variational_autoencoder_with_annealing(self) -> None:
        """A VAE of digits, with a weight of the divergence that grows from zero."""
        split = digit_images(self.seed)
        loader = DataLoader(TensorDataset(split.x.flatten(1)), batch_size=64, shuffle=True)
        model = VariationalAutoencoder()
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        step = 0
        with self.watch(model, optimizer):
            for _ in range(12):
                for (x,) in loader:
                    beta = min(1.0, step / 150)
                    scores, mean, log_variance = model(x)
                    reconstruction = functional.binary_cross_entropy_with_logits(
                        scores, x, reduction="sum"
                    )
                    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
                    loss = (reconstruction + beta * divergence) / len(x)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    step += 1

    @healthy
    def denoising_diffusion(self) -> None:
        """Noise is predicted in two moons: the loss soon stays near the best possible."""
        points, _ = moons(2000)
        points = 2 * points
        model = NoisePredictor()
        average = optim.swa_utils.AveragedModel(
            model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.99)
        )
        optimizer = optim.AdamW(model.parameters(), lr=2e-3)
        beta = torch.linspace(1e-4, 0.2, 50)
        kept = torch.cumprod(1 - beta, dim=0)
        with self.watch(model, optimizer):
            for _ in range(500):
                x = points[torch.randint(len(points), (256,))]
                t = torch.randint(50, (256,))
                noise = torch.randn_like(x)
                noisy = kept[t].sqrt()[:, None] * x + (1 - kept[t]).sqrt()[:, None] * noise
                loss = functional.mse_loss(model(noisy, t / 50), noise)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                average.update_parameters(model)

    @healthy
    def flow_matching(self) -> None:
        """A velocity field from noise to a ring; most of the loss cannot be learned."""
        model = NoisePredictor()
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.995)
        with self.watch(model, optimizer, scheduler=scheduler):
            for _ in range(400):
                target = ring(256)
                source = torch.randn_like(target)
                time = torch.rand(256)
                place = torch.lerp(source, target, time[:, None])
                loss = ((model(place, time) - (target - source)) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()

    @healthy
    def score_matching_over_scales(self) -> None:
        """Denoising score matching over noise of many scales, weighted by their squares."""
        points = ring(3000)
        model = mlp(3, 64, 64, 2, act=nn.Softplus)
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(400):
                x = points[torch.randint(len(points), (256,))]
                sigma = 10 ** (-1.2 + 1.5 * torch.rand(256, 1))
                noise = torch.randn_like(x)
                inputs = torch.cat([x + sigma * noise, sigma.log()], dim=1)
                score = model(inputs) / sigma
                loss = (sigma**2 * (score + noise / sigma) ** 2).sum(dim=1).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def normalizing_flow(self) -> None:
        """Coupling layers fit thin moons: the negative log likelihood falls below zero."""
        points, _ = moons(2000, noise=0.03)
        loader = DataLoader(TensorDataset(points), batch_size=200, shuffle=True)
        model = Flow()
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(18):
                for (x,) in loader:
                    z, log_determinant = model(x)
                    loss = -(normal_log_density(z) + log_determinant).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                    optimizer.step()

    @healthy
    def energy_with_langevin_samples(self) -> None:
        """An energy is lowered at data and raised at its own samples: the loss stays near zero."""
        energy = mlp(2, 48, 48, 1, act=nn.SiLU)
        optimizer = optim.Adam(energy.parameters(), lr=2e-3, betas=(0.0, 0.999))
        samples = 4 * torch.rand(128, 2) - 2
        with self.watch(energy, optimizer):
            for _ in range(120):
                for _ in range(10):
                    samples.requires_grad_(True)
                    slope = torch.autograd.grad(energy(samples).sum(), samples)[0]
                    samples = (samples - 0.1 * slope + 0.2 * torch.randn(128, 2)).detach()
                fresh = torch.rand(128, 1) < 0.05
                samples = torch.where(fresh, 4 * torch.rand(128, 2) - 2, samples)
                low = energy(ring(128))
                high = energy(samples)
                loss = low.mean() - high.mean()
                loss = loss + 0.05 * (low**2 + high**2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def quantized_autoencoder(self) -> None:
        """A codebook with straight-through gradients, of which only some vectors get used."""
        split = digit_images(self.seed)
        loader = DataLoader(TensorDataset(split.x.flatten(1)), batch_size=64, shuffle=True)
        model = QuantizedAutoencoder()
        optimizer = optim.AdamW(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(14):
                for (x,) in loader:
                    decoded, quantization = model(x)
                    loss = functional.mse_loss(decoded, x) + quantization
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def pixels_one_after_the_other(self) -> None:
        """A masked network predicts each binary pixel from those above and to the left of it."""

        class MaskedConv2d(nn.Conv2d):
            """A convolution that sees no pixel to come."""

            def __init__(self, channels: int, out: int, *, centre: bool) -> None:
                super().__init__(channels, out, 5, padding=2)
                mask = torch.ones(5, 5)
                mask[2, 2 + int(centre) :] = 0
                mask[3:] = 0
                self.register_buffer("mask", mask)

            def forward(self, x: Tensor) -> Tensor:
                """Return the maps of the visible pixels."""
                return functional.conv2d(x, self.weight * self.mask, self.bias, padding=2)

        split = digit_images(self.seed)
        loader = DataLoader(TensorDataset(split.x), batch_size=64, shuffle=True)
        model = nn.Sequential(
            MaskedConv2d(1, 12, centre=False),
            nn.ReLU(),
            MaskedConv2d(12, 12, centre=True),
            nn.ReLU(),
            nn.Conv2d(12, 1, 1),
        )
        optimizer = optim.Adamax(model.parameters(), lr=1e-2)
        with self.watch(model, optimizer):
            for _ in range(4):
                for (x,) in loader:
                    pixels = torch.bernoulli(x)
                    loss = functional.binary_cross_entropy_with_logits(model(pixels), pixels)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def sparse_denoising_autoencoder(self) -> None:
        """Noisy digits are cleaned by a wide code with an L1 penalty; the inputs are targets."""
        split = digit_images(self.seed)
        loader = DataLoader(TensorDataset(split.x.flatten(1)), batch_size=64, shuffle=True)
        encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU())
        decoder = nn.Linear(128, 64)
        model = nn.Sequential(encoder, decoder)
        optimizer = optim.Adam(model.parameters(), lr=2e-3)
        with self.watch(model, optimizer):
            for _ in range(10):
                for (x,) in loader:
                    code = encoder(x + 0.2 * torch.randn_like(x))
                    loss = functional.mse_loss(decoder(code), x) + 1e-3 * code.abs().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("H814", shows="H813 H853 H815")
    def generator_behind_a_detach(self) -> None:
        """The generator's loss is taken from the detached samples of the discriminator's step."""
        generator = mlp(2, 32, 32, 2)
        discriminator = mlp(2, 32, 32, 1)
        generator_optimizer = optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
        discriminator_optimizer = optim.Adam(
            discriminator.parameters(), lr=1e-3, betas=(0.5, 0.999)
        )
        criterion = nn.BCEWithLogitsLoss()
        with self.watch(
            {"generator": generator, "discriminator": discriminator},
            {"generator": generator_optimizer, "discriminator": discriminator_optimizer},
            objective="adversarial",
        ):
            for _ in range(400):
                real = ring(128)
                fake = generator(torch.randn(128, 2)).detach()
                discriminator_optimizer.zero_grad()
                real_scores = discriminator(real)
                fake_scores = discriminator(fake)
                loss = criterion(real_scores, torch.ones_like(real_scores))
                loss = loss + criterion(fake_scores, torch.zeros_like(fake_scores))
                loss.backward()
                discriminator_optimizer.step()

                generator_optimizer.zero_grad()
                scores = discriminator(fake)
                generator_loss = criterion(scores, torch.ones_like(scores))
                generator_loss.backward()
                generator_optimizer.step()

    @faulty("H831", shows="H826 H853")
    def critic_with_its_signs_exchanged(self) -> None:
        """The critic scores data low and samples high, and the generator still climbs."""
        generator = mlp(2, 32, 32, 2)
        critic = mlp(2, 32, 32, 1, act=nn.LeakyReLU)
        generator_optimizer = optim.RMSprop(generator.parameters(), lr=1e-3)
        critic_optimizer = optim.RMSprop(critic.parameters(), lr=1e-3)
        with self.watch(
            {"generator": generator, "critic": critic},
            {"generator": generator_optimizer, "critic": critic_optimizer},
            objective="adversarial",
        ):
            for _ in range(250):
                for _ in range(3):
                    real = ring(64)
                    fake = generator(torch.randn(64, 2)).detach()
                    critic_loss = critic(real).mean() - critic(fake).mean()
                    critic_optimizer.zero_grad()
                    critic_loss.backward()
                    critic_optimizer.step()
                    with torch.no_grad():
                        for parameter in critic.parameters():
                            parameter.clamp_(-0.2, 0.2)
                generator_loss = -critic(generator(torch.randn(64, 2))).mean()
                generator_optimizer.zero_grad()
                generator_loss.backward()
                generator_optimizer.step()

    @faulty("", shows="H828")
    def divergence_summed_reconstruction_averaged(self) -> None:
        """The reconstruction is a mean over pixels, the divergence a sum: the code collapses."""
        split = digit_images(self.seed)
        loader = DataLoader(TensorDataset(split.x.flatten(1)), batch_size=64, shuffle=True)
        model = VariationalAutoencoder()
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(12):
                for (x,) in loader:
                    scores, mean, log_variance = model(x)
                    reconstruction = functional.mse_loss(scores, x)
                    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
                    loss = reconstruction + divergence
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @faulty("", shows="H828")
    def noise_that_was_not_added(self) -> None:
        """The target of a diffusion model is drawn anew, instead of the noise that was added."""
        points, _ = moons(2000)
        points = 2 * points
        model = NoisePredictor()
        optimizer = optim.AdamW(model.parameters(), lr=2e-3)
        beta = torch.linspace(1e-4, 0.2, 50)
        kept = torch.cumprod(1 - beta, dim=0)
        with self.watch(model, optimizer):
            for _ in range(400):
                x = points[torch.randint(len(points), (256,))]
                t = torch.randint(50, (256,))
                noise = torch.randn_like(x)
                noisy = kept[t].sqrt()[:, None] * x + (1 - kept[t]).sqrt()[:, None] * noise
                guess = model(noisy, t / 50)
                loss = functional.mse_loss(guess, torch.randn_like(x))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @faulty("H856")
    def raw_time_steps(self) -> None:
        """The time step of a diffusion model, up to a thousand, goes in beside the coordinates."""
        points, _ = moons(2000)
        points = 2 * points
        model = mlp(3, 64, 64, 2, act=nn.SiLU)
        optimizer = optim.Adam(model.parameters(), lr=1e-3)
        beta = torch.linspace(1e-4, 0.02, 1000)
        kept = torch.cumprod(1 - beta, dim=0)
        with self.watch(model, optimizer):
            for _ in range(500):
                x = points[torch.randint(len(points), (256,))]
                t = torch.randint(1000, (256,))
                noise = torch.randn_like(x)
                noisy = kept[t].sqrt()[:, None] * x + (1 - kept[t]).sqrt()[:, None] * noise
                time = t[:, None].float()
                guess = model(torch.cat([noisy, time], dim=1))
                loss = functional.mse_loss(guess, noise)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @faulty("")
    def log_determinant_subtracted(self) -> None:
        """The log determinant of a flow has the wrong sign, and the points shrink to nothing."""
        points, _ = moons(2000, noise=0.05)
        loader = DataLoader(TensorDataset(points), batch_size=200, shuffle=True)
        model = Flow()
        optimizer = optim.Adam(model.parameters(), lr=5e-3)
        with self.watch(model, optimizer):
            for _ in range(20):
                for (x,) in loader:
                    z, log_determinant = model(x)
                    loss = -(normal_log_density(z) - log_determinant).mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
                    optimizer.step()

    @faulty("", shows="H828 H848 H856")
    def tanh_output_for_byte_pixels(self) -> None:
        """The decoder ends in a Tanh, and pixels are 0 to 255."""
        split = digit_images(self.seed)
        scale = 255.0
        loader = DataLoader(TensorDataset(scale * split.x.flatten(1)), batch_size=64, shuffle=True)
        model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64), nn.Tanh())
        optimizer = optim.Adam(model.parameters(), lr=1e-2)
        with self.watch(model, optimizer):
            for _ in range(10):
                for (x,) in loader:
                    loss = functional.mse_loss(model(x), x)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
