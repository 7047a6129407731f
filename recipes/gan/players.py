"""The two players: networks, optimizers, and the loss of each, over one batch.

Does not: make steps (``train``, or the notebook).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast
from holdfast.learning.learning_rate import Advice
from recipes.gan.model import Discriminator, Generator, Norm

Regularizer = Literal["r1", "spectral", "none"]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Players:
    """A generator, a discriminator, and the average of the generator that images are drawn with.

    Args:
        size: Pixels a side of an image.
        device: Where they live.
        latent: Numbers that an image is made from.
        width: Channels at full size.
        norm: Of the generator.
        regularizer: What keeps the discriminator smooth.
        r1_weight: Of the penalty on the gradient at real images (arXiv 1801.04406, where it is 10).
        lr: Of both.
        ema_decay: Of the average.
    """

    def __init__(
        self,
        *,
        size: int,
        device: torch.device,
        latent: int = 32,
        width: int = 32,
        norm: Norm = "group",
        regularizer: Regularizer = "r1",
        r1_weight: float = 1.0,
        lr: float = 1e-3,
        ema_decay: float = 0.99,
    ) -> None:
        self._r1_weight = r1_weight if regularizer == "r1" else 0.0
        self.latent = latent
        self.generator = Generator(latent=latent, size=size, width=width, norm=norm).to(device)
        self.discriminator = Discriminator(
            size=size, width=width, spectral=regularizer == "spectral"
        ).to(device)
        average = get_ema_multi_avg_fn(ema_decay)
        self.average = AveragedModel(self.generator, multi_avg_fn=average, use_buffers=True).eval()
        # DCGAN's first decay rate, 0.5; the second of StyleGAN (0.99), which follows changing
        # players faster
        self.optimizers = {
            name: torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.99))
            for name, model in (
                ("discriminator", self.discriminator),
                ("generator", self.generator),
            )
        }

    @property
    def models(self) -> dict[str, nn.Module]:
        """Return what is trained, by the name of its optimizer."""
        return {"discriminator": self.discriminator, "generator": self.generator}

    def all(self) -> nn.ModuleDict:
        """Return all weights as one module, for a digest."""
        return nn.ModuleDict({**self.models, "average": self.average})

    def _to_device(self, batch: Batch) -> list[torch.Tensor]:
        device = self.generator.project.weight.device  # a forecast moves the networks
        return [part.to(device, non_blocking=True) for part in batch]

    def discriminator_loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss of telling real from drawn images, a mean over samples."""
        images, noise, _ = self._to_device(batch)
        with torch.no_grad():  # no graph of the generator is built that nobody would free
            drawn = self.generator(noise)
        # The batch itself stays as it is
        images = images.detach().requires_grad_(self._r1_weight > 0)
        real = self.discriminator(images)
        loss = F.softplus(-real).mean() + F.softplus(self.discriminator(drawn)).mean()
        if self._r1_weight > 0:
            (slope,) = torch.autograd.grad(real.sum(), images, create_graph=True)
            loss = loss + 0.5 * self._r1_weight * slope.float().square().sum(dim=(1, 2, 3)).mean()
        return loss

    def generator_loss(self, batch: Batch) -> torch.Tensor:
        """Return the loss of being told from real images, a mean over samples.

        It does not saturate.
        """
        _, _, noise = self._to_device(batch)
        return F.softplus(-self.discriminator(self.generator(noise))).mean()

    def draw(self, count: int) -> torch.Tensor:
        """Return images of the averaged generator from noise that is always the same, shape
        ``(count, 1, s, s)``.
        """
        noise = torch.randn(count, self.latent, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            device = self.generator.project.weight.device
            return torch.cat(
                [self.average(part.to(device)).float().cpu() for part in noise.split(64)]
            )


def play(
    guard: holdfast.Guard, players: Players, batch: Batch
) -> tuple[holdfast.StepResult, holdfast.StepResult]:
    """Make one step of each player on a batch; gradients of one reach nothing of the other."""
    told = guard.step(batch, players.discriminator_loss, optimizer="discriminator")
    fooled = guard.step(batch, players.generator_loss, optimizer="generator")
    if not fooled.skipped:
        players.average.update_parameters(players.generator)
    return told, fooled


def rescale(optimizer: torch.optim.Optimizer, old_batch: int, new_batch: int) -> Advice:
    """Change an optimizer's rate, decay rates and eps by the rule that is published for its
    kind, and return it.
    """
    advice = holdfast.advise_learning_rate(optimizer, old_batch, new_batch, by="batch")
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] *= advice.factor
        if advice.betas:
            group["betas"] = advice.betas[number]
        if advice.eps:
            group["eps"] = advice.eps[number]
    return advice
