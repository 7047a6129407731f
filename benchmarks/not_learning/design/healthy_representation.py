"""Healthy programs without labels, or with losses whose level means little: generative, contrastive, adversarial."""

# ruff: noqa: D101, D102, N812 - the programs are written as users write theirs

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from benchmarks.not_learning.data import batches, digits
from benchmarks.not_learning.program import Program, Watch


def autoencoder(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    decoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
    model = nn.Sequential(encoder, decoder)
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for images, _ in batches(x, y, 64, 600):
            loss = F.mse_loss(model(images), images)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 64)
        self.fc21 = nn.Linear(64, 6)
        self.fc22 = nn.Linear(64, 6)
        self.fc3 = nn.Linear(6, 64)
        self.fc4 = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def vae(watch: Watch, seed: int) -> None:
    """As in the well-known example: summed binary cross-entropy plus divergence, in the thousands."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = VAE()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    with watch(model, optimizer):
        for data, _ in batches(x, y, 64, 600):
            optimizer.zero_grad()
            recon, mu, logvar = model(data)
            bce = F.binary_cross_entropy(recon, data, reduction="sum")
            kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss = bce + kld
            loss.backward()
            optimizer.step()


def denoising_diffusion(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    net = nn.Sequential(nn.Linear(65, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 64))
    optimizer = optim.AdamW(net.parameters(), lr=2e-3)
    kept = torch.linspace(0.999, 0.01, 50)
    with watch(net, optimizer):
        for images, _ in batches(2 * x - 1, y, 64, 600):
            t = torch.randint(0, 50, (len(images), 1))
            noise = torch.randn_like(images)
            noisy = kept[t].sqrt() * images + (1 - kept[t]).sqrt() * noise
            predicted = net(torch.cat([noisy, t / 50], dim=1))
            loss = F.mse_loss(predicted, noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def dcgan(watch: Watch, seed: int) -> None:
    """As in the tutorial: D is cleared before its own pass only, so G's pass leaves gradients in it."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    netG = nn.Sequential(  # noqa: N806 - the tutorial's names
        nn.ConvTranspose2d(16, 32, 4, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True),
        nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    netD = nn.Sequential(  # noqa: N806
        nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(16, 1, 4), nn.Flatten(0)
    )
    optimizerD = optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.999))  # noqa: N806
    optimizerG = optim.Adam(netG.parameters(), lr=1e-3, betas=(0.5, 0.999))  # noqa: N806
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(32), torch.zeros(32)
    with watch({"G": netG, "D": netD}, {"G": optimizerG, "D": optimizerD}, objective="adversarial"):
        for real, _ in batches(2 * x.view(-1, 1, 8, 8) - 1, y, 32, 300):
            netD.zero_grad()
            criterion(netD(real), ones).backward()
            fake = netG(torch.randn(32, 16, 1, 1))
            criterion(netD(fake.detach()), zeros).backward()
            optimizerD.step()
            netG.zero_grad()
            criterion(netD(fake), ones).backward()
            optimizerG.step()


def wgan_clipping(watch: Watch, seed: int) -> None:
    """The critic's weights are clamped after each of its five steps for one of the generator."""
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer_g = optim.RMSprop(generator.parameters(), lr=1e-3)
    optimizer_c = optim.RMSprop(critic.parameters(), lr=1e-3)
    models = {"generator": generator, "critic": critic}
    with watch(models, {"generator": optimizer_g, "critic": optimizer_c}, objective="adversarial"):
        for _ in range(150):
            for _ in range(5):
                angle = torch.rand(64) * 2 * torch.pi
                real = torch.stack([angle.cos(), angle.sin()], 1) + 1
                fake = generator(torch.randn(64, 4)).detach()
                loss_c = critic(fake).mean() - critic(real).mean()
                optimizer_c.zero_grad()
                loss_c.backward()
                optimizer_c.step()
                with torch.no_grad():
                    for weight in critic.parameters():
                        weight.clamp_(-0.1, 0.1)
            loss_g = -critic(generator(torch.randn(64, 4))).mean()
            optimizer_g.zero_grad()
            loss_g.backward()
            optimizer_g.step()


def wgan_gradient_penalty(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    opt_g = optim.Adam(generator.parameters(), lr=5e-4, betas=(0.0, 0.9))
    opt_c = optim.Adam(critic.parameters(), lr=3e-3, betas=(0.0, 0.9))
    models = {"generator": generator, "critic": critic}
    with watch(models, {"generator": opt_g, "critic": opt_c}, objective="adversarial"):
        for step in range(1000):
            real = torch.randn(48, 2) @ torch.tensor([[1.0, 0.6], [0.0, 0.5]]) + 1
            fake = generator(torch.randn(48, 2))
            between = torch.lerp(real, fake.detach(), torch.rand(48, 1)).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = 2 * ((slope.norm(dim=1) - 1) ** 2).mean()
            opt_c.zero_grad()
            (critic(fake.detach()).mean() - critic(real).mean() + penalty).backward()
            opt_c.step()
            if step % 3 == 0:
                opt_g.zero_grad()
                (-critic(fake).mean()).backward()
                opt_g.step()


def contrastive_info_nce(watch: Watch, seed: int) -> None:
    """Two noisy views of each digit; the label of row i is i."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    optimizer = optim.Adam(encoder.parameters(), lr=1e-3)

    def view(images: Tensor) -> Tensor:
        return (images + 0.2 * torch.randn_like(images)) * (torch.rand_like(images) > 0.2)

    with watch(encoder, optimizer):
        for images, _ in batches(x, y, 64, 400):
            first = F.normalize(encoder(view(images)), dim=1)
            second = F.normalize(encoder(view(images)), dim=1)
            similarity = first @ second.T / 0.2
            labels = torch.arange(len(images))
            loss = (F.cross_entropy(similarity, labels) + F.cross_entropy(similarity.T, labels)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def triplet(watch: Watch, seed: int) -> None:
    """More and more triplets are satisfied, so that batches with a loss of 0 become normal."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    of_class = [torch.nonzero(y == c).flatten() for c in range(10)]
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    criterion = nn.TripletMarginLoss(margin=1.0)
    optimizer = optim.Adam(net.parameters(), lr=1e-3)
    with watch(net, optimizer):
        for _ in range(500):
            classes = torch.rand(32, 10).argsort(1)[:, :2].tolist()
            pick = [of_class[a][torch.randint(len(of_class[a]), (2,))] for a, _ in classes]
            others = torch.stack([of_class[b][torch.randint(len(of_class[b]), ())] for _, b in classes])
            pairs = torch.stack(pick)
            loss = criterion(net(x[pairs[:, 0]]), net(x[pairs[:, 1]]), net(x[others]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def byol_like(watch: Watch, seed: int) -> None:
    """The target network never has gradients and follows as an exponential average."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    online = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 32))
    predictor = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
    target = copy.deepcopy(online)
    model = nn.ModuleDict({"online": online, "predictor": predictor, "target": target})
    optimizer = optim.Adam([*online.parameters(), *predictor.parameters()], lr=1e-3)
    with watch(model, optimizer):
        for images, _ in batches(x, y, 64, 400):
            one, two = (images + 0.3 * torch.randn_like(images) for _ in range(2))
            with torch.no_grad():
                wanted = F.normalize(target(two), dim=1)
            loss = 2 - 2 * (F.normalize(predictor(online(one)), dim=1) * wanted).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                    slow.mul_(0.99).add_(fast, alpha=0.01)


class ForwardForwardLayer(nn.Linear):
    """Trains itself, as in the published example; gradients of the other layers do not exist."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.optimizer = optim.Adam(self.parameters(), lr=0.03)

    def forward(self, x: Tensor) -> Tensor:
        direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return torch.relu(direction @ self.weight.T + self.bias)

    def train_once(self, positive: Tensor, negative: Tensor) -> tuple[Tensor, Tensor]:
        good = self.forward(positive).pow(2).mean(1)
        bad = self.forward(negative).pow(2).mean(1)
        loss = F.softplus(torch.cat([2 - good, bad - 2])).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return self.forward(positive).detach(), self.forward(negative).detach()


def forward_forward(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    layers = nn.ModuleList([ForwardForwardLayer(74, 64), ForwardForwardLayer(64, 64)])
    with watch(layers, {f"layer{number}": layer.optimizer for number, layer in enumerate(layers)}):
        for images, labels in batches(x, y, 64, 300):
            wrong = (labels + torch.randint(1, 10, labels.shape)) % 10
            positive = torch.cat([4.0 * F.one_hot(labels, 10), images], 1)
            negative = torch.cat([4.0 * F.one_hot(wrong, 10), images], 1)
            for layer in layers:
                positive, negative = layer.train_once(positive, negative)


def variance_invariance_covariance(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    with watch(net, optimizer):
        for images, _ in batches(x, y, 128, 300):
            a, b = (net(images + 0.1 * torch.randn_like(images)) for _ in range(2))
            spread = sum(F.relu(1 - z.std(0)).mean() for z in (a, b))
            off = sum((torch.cov(z.T) - torch.diag(z.var(0))).pow(2).sum() / 16 for z in (a, b))
            loss = 25 * F.mse_loss(a, b) + 25 * spread + off
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            optimizer.step()


PROGRAMS = [
    Program(name=train.__name__, healthy=True, train=train)
    for train in (
        autoencoder,
        vae,
        denoising_diffusion,
        dcgan,
        wgan_clipping,
        wgan_gradient_penalty,
        contrastive_info_nce,
        triplet,
        byol_like,
        forward_forward,
        variance_invariance_covariance,
    )
]
