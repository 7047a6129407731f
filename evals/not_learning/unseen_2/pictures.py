"""Healthy programs about images: classification, segmentation, reconstruction and pretext tasks.

Where the loss does not show how much was learned, a program leaves its result in `score`.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from evals.not_learning.data import digit_images, digits, discs, loader
from evals.not_learning.parts import mlp, small_cnn
from evals.not_learning.program import Programs, follow, healthy


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the share of rows whose largest logit is that of the label."""
    return (logits.argmax(dim=1) == labels).float().mean().item()


class ResidualBlock(nn.Module):
    """Two convolutions around a skip; the last scale starts at zero, so it starts as identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(width)
        nn.init.zeros_(self.second_norm.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input plus what the convolutions add to it."""
        hidden = self.first_norm(self.first(x)).relu()
        return (x + self.second_norm(self.second(hidden))).relu()


class PatchTransformer(nn.Module):
    """A small vision transformer with a class token over 16 patches of 2 by 2 pixels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits of shape (n, 10)."""
        patches = self.embed(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1)
        encoded = self.encoder(tokens + self.position)
        return self.head(self.norm(encoded[:, 0]))


class Pictures(Programs):
    """Healthy programs about images."""

    @healthy
    def residual_net_with_one_cycle(self) -> None:
        """Residual blocks that start as the identity, and a rate that rises before it falls."""
        images, labels, held_images, held_labels = digit_images(self.seed)
        model = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            ResidualBlock(12),
            nn.MaxPool2d(2),
            ResidualBlock(12),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(12, 10),
        )
        epochs = 5
        train_loader = loader(images, labels, size=64)
        optimizer = optim.SGD(
            model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        scheduler = optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.3, epochs=epochs, steps_per_epoch=len(train_loader)
        )
        with self.watch(model, optimizer, scheduler=scheduler):
            for _ in range(epochs):
                model.train()
                for batch, target in train_loader:
                    loss = functional.cross_entropy(model(batch), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    scheduler.step()
                model.eval()
                with torch.no_grad():
                    self.score = accuracy(model(held_images), held_labels)

    @healthy
    def patch_transformer(self) -> None:
        """A vision transformer on few images, with AdamW, linear warm-up and cosine decay."""
        images, labels, held_images, held_labels = digit_images(self.seed)
        model = PatchTransformer()
        optimizer = optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
        total = 200
        warmup = 20

        def factor(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))

        scheduler = optim.lr_scheduler.LambdaLR(optimizer, factor)
        with self.watch(model, optimizer, scheduler=scheduler, total_steps=total):
            for _ in range(total):
                rows = torch.randint(len(images), (64,))
                loss = functional.cross_entropy(model(images[rows]), labels[rows])
                optimizer.zero_grad(set_to_none=False)
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
        with torch.no_grad():
            self.score = accuracy(model(held_images), held_labels)

    @healthy
    def discs_by_dice(self) -> None:
        """Segmentation by the soft Dice loss alone, which lies between 0 and 1."""
        model = nn.Sequential(
            nn.Conv2d(1, 12, 5, padding=2),
            nn.SiLU(),
            nn.Conv2d(12, 12, 5, padding=2),
            nn.SiLU(),
            nn.Conv2d(12, 1, 1),
        )
        optimizer = optim.Adam(model.parameters(), lr=5e-3)

        def dice_loss(logits: Tensor, mask: Tensor) -> Tensor:
            probability = logits.sigmoid().flatten(1)
            mask = mask.flatten(1)
            overlap = (probability * mask).sum(dim=1)
            return 1 - ((2 * overlap + 1) / (probability.sum(1) + mask.sum(1) + 1)).mean()

        with self.watch(model, optimizer):
            for _ in range(180):
                images, masks = discs(24)
                loss = dice_loss(model(images), masks)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    @healthy
    def mixup_with_soft_labels(self) -> None:
        """Pairs of images are blended, so that the loss stays far above zero by design."""
        images, labels, held_images, held_labels = digit_images(self.seed)
        model = small_cnn()
        optimizer = optim.Adam(model.parameters(), lr=4e-3)
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        with self.watch(model, optimizer):
            for _ in range(6):
                for batch, target in loader(images, labels, size=64):
                    share = torch.distributions.Beta(0.4, 0.4).sample()
                    partner = torch.randperm(len(batch))
                    mixed = share * batch + (1 - share) * batch[partner]
                    output = model(mixed)
                    loss = share * criterion(output, target)
                    loss = loss + (1 - share) * criterion(output, target[partner])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        model.eval()
        self.score = accuracy(model(held_images), held_labels)

    @healthy
    def super_resolution(self) -> None:
        """Pixel shuffle learns the difference to a bilinear upsampling, by the absolute error."""
        images = digit_images(self.seed).x
        small = functional.avg_pool2d(images, 2)
        model = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1),
            nn.PReLU(),
            nn.Conv2d(24, 24, 3, padding=1),
            nn.PReLU(),
            nn.Conv2d(24, 4, 3, padding=1),
            nn.PixelShuffle(2),
        )
        optimizer = optim.Adam(model.parameters(), lr=2e-3)
        with self.watch(model, optimizer):
            for _ in range(10):
                for low, high in loader(small, images, size=64):
                    blurred = functional.interpolate(low, scale_factor=2, mode="bilinear")
                    loss = (blurred + model(low) - high).abs().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()

    @healthy
    def masked_patches(self) -> None:
        """A masked autoencoder: only hidden pixels count, and a small share is visible."""
        images = digits(self.seed).x
        model = mlp(128, 192, 192, 64, act=nn.GELU)
        optimizer = optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        with self.watch(model, optimizer):
            for _ in range(400):
                batch = images[torch.randint(len(images), (128,))]
                visible = (torch.rand_like(batch) < 0.3).float()
                guess = model(torch.cat([batch * visible, visible], dim=1))
                error = (guess - batch).square() * (1 - visible)
                loss = error.sum() / (1 - visible).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def distilled_student(self) -> None:
        """A student learns only from a teacher's softened outputs, never from labels."""
        x, y, held_x, held_y = digits(self.seed)
        teacher = mlp(64, 128, 10)
        teacher_optimizer = optim.Adam(teacher.parameters(), lr=3e-3)
        for _ in range(150):
            rows = torch.randint(len(x), (128,))
            functional.cross_entropy(teacher(x[rows]), y[rows]).backward()
            teacher_optimizer.step()
            teacher_optimizer.zero_grad()
        teacher.requires_grad_(False).eval()
        student = mlp(64, 24, 10)
        optimizer = optim.RMSprop(student.parameters(), lr=2e-3)
        temperature = 4.0
        with self.watch(student, optimizer):
            for _ in range(300):
                batch = x[torch.randint(len(x), (64,))]
                soft = functional.log_softmax(student(batch) / temperature, dim=1)
                with torch.no_grad():
                    target = functional.log_softmax(teacher(batch) / temperature, dim=1)
                loss = functional.kl_div(soft, target, reduction="batchmean", log_target=True)
                optimizer.zero_grad()
                (temperature**2 * loss).backward()
                optimizer.step()
        self.score = accuracy(student(held_x), held_y)

    @healthy
    def new_head_on_frozen_trunk(self) -> None:
        """A trained trunk is frozen, kept in eval mode, and gets a new head for odd and even."""
        images, labels, held_images, held_labels = digit_images(self.seed)
        model = small_cnn()
        pretraining = optim.Adam(model.parameters(), lr=5e-3)
        for batch, target in loader(images, labels, size=64):
            pretraining.zero_grad()
            functional.cross_entropy(model(batch), target).backward()
            pretraining.step()
        for parameter in model.parameters():
            parameter.requires_grad = False
        model[-1] = nn.Linear(model[-1].in_features, 2)
        optimizer = optim.SGD(model[-1].parameters(), lr=0.05, momentum=0.9)
        model.eval()
        with self.watch(model, optimizer):
            for _ in range(5):
                for batch, target in loader(images, labels % 2, size=32):
                    loss = functional.cross_entropy(model(batch), target)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        self.score = accuracy(model(held_images), held_labels % 2)

    @healthy
    def focal_loss_on_rare_pixels(self) -> None:
        """One pixel in 64 is a centre to find; focal loss starts small and remains small."""
        model = nn.Sequential(
            nn.Conv2d(1, 16, 5, padding=2),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 1, 5, padding=2),
        )
        nn.init.constant_(model[-1].bias, -math.log((1 - 0.02) / 0.02))
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(250):
                heat = torch.zeros(32, 1, 8, 8)
                row = torch.randint(1, 7, (32,))
                column = torch.randint(1, 7, (32,))
                heat[torch.arange(32), 0, row, column] = 1
                blob = functional.conv2d(heat, torch.ones(1, 1, 3, 3), padding=1)
                logits = model(blob + 0.3 * torch.randn_like(blob))
                entropy = functional.binary_cross_entropy_with_logits(
                    logits, heat, reduction="none"
                )
                missed = (heat - logits.sigmoid()).abs()
                weight = torch.where(heat == 1, 0.75, 0.25)
                loss = (weight * missed**2 * entropy).sum() / heat.sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def mean_teacher_on_few_labels(self) -> None:
        """Forty labels and a consistency term with a moving average of the model itself."""
        x, y, held_x, held_y = digits(self.seed)
        labelled = torch.cat([(y == digit).nonzero()[:4, 0] for digit in range(10)])
        student = mlp(64, 64, 64, 10)
        teacher = copy.deepcopy(student).requires_grad_(False)
        optimizer = optim.Adam(student.parameters(), lr=2e-3)
        with self.watch(student, optimizer):
            for step in range(350):
                batch = x[torch.randint(len(x), (64,))]
                noisy = batch + 0.1 * torch.randn_like(batch)
                target = teacher(batch + 0.1 * torch.randn_like(batch)).softmax(1)
                consistency = (student(noisy).softmax(1) - target).square().mean()
                supervised = functional.cross_entropy(student(x[labelled]), y[labelled])
                ramp = min(1.0, step / 150)
                loss = supervised + 20 * ramp * consistency
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                follow(teacher, student, 0.02)
        self.score = accuracy(teacher(held_x), held_y)

    @healthy
    def rotation_as_pretext(self) -> None:
        """Self-supervision: which of four turns was an image given? No label is used."""
        images = digit_images(self.seed).x
        model = small_cnn(classes=4, width=16)
        optimizer = optim.Adam(model.parameters(), lr=3e-3)
        with self.watch(model, optimizer):
            for _ in range(160):
                batch = images[torch.randint(len(images), (48,))]
                turns = torch.randint(4, (48,))
                turned = torch.stack(
                    [
                        torch.rot90(image, int(turn), dims=(1, 2))
                        for image, turn in zip(batch, turns, strict=True)
                    ]
                )
                loss = functional.cross_entropy(model(turned), turns)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @healthy
    def sixteen_images_by_heart(self) -> None:
        """The usual sanity check: one small batch, over and over, until the loss is nothing."""
        images, labels = digit_images(self.seed)[:2]
        batch = images[:16]
        target = labels[:16]
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8 * 36, 10),
        )
        optimizer = optim.Adam(model.parameters(), lr=1e-2)
        with self.watch(model, optimizer):
            for _ in range(200):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(batch), target)
                loss.backward()
                optimizer.step()
