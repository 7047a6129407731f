"""Healthy programs on images: classifiers of all kinds, segmentation, detection, and learnt distances."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.not_learning.held_out.data import blobs, digits
from benchmarks.not_learning.held_out.entry import error_score, healthy, squared_score
from benchmarks.not_learning.held_out_2.parts import class_score, conv_block, endless, loader, mlp, picked, small_cnn
from benchmarks.not_learning.program import Watch


def digits_one_cycle(watch: Watch, seed: int) -> float:
    """A small network with momentum under the one-cycle policy."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=300)
    with watch(model, optimizer, scheduler=scheduler, total_steps=300):
        for a, b in endless(loader(x, y, size=64), 300):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            optimizer.step()
            scheduler.step()
    return class_score(model, held_x, held_y)


class _Residual(nn.Module):
    """A block of group norm whose last scale starts at zero, so that it starts as the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList([nn.GroupNorm(4, channels) for _ in range(2)])
        nn.init.zeros_(self.norms[1].weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Any:
        inner = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(x + self.norms[1](self.second(inner)))


def digits_resnet_zero_gamma_label_smoothing(watch: Watch, seed: int) -> float:
    """A residual network with group norm, label smoothing, linear warm-up and cosine decay."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    blocks = [_Residual(16) for _ in range(3)]
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=40)
    down = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 260)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, down], [40])
    with watch(model, optimizer, scheduler=scheduler):
        for a, b in endless(loader(x, y, size=48), 300):
            loss = functional.cross_entropy(model(a), b, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    return class_score(model, held_x, held_y)


def digits_frozen_backbone(watch: Watch, seed: int) -> float:
    """A head on features that were trained before on other classes and are frozen now, in evaluation mode."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    backbone = small_cnn()[:-1]
    before = nn.Sequential(backbone, nn.Linear(96, 2))
    first = torch.optim.Adam(before.parameters(), lr=3e-3)
    for a, b in endless(loader(x, (y > 4).long(), size=64), 150):
        first.zero_grad()
        functional.cross_entropy(before(a), b).backward()
        first.step()
    backbone.eval().requires_grad_(False)
    model = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(96, 10)})
    optimizer = torch.optim.Adam(model["head"].parameters(), lr=1e-2)
    with watch(model, optimizer, frozen=("backbone",)):
        for a, b in endless(loader(x, y, size=64), 300):
            with torch.no_grad():
                known = backbone(a)
            optimizer.zero_grad()
            functional.cross_entropy(model["head"](known), b).backward()
            optimizer.step()
    return class_score(nn.Sequential(backbone, model["head"]), held_x, held_y)


def digits_distilled(watch: Watch, seed: int) -> float:
    """A small student of a large teacher: soft targets at a temperature, and a share of the hard ones."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    teacher, student = small_cnn(width=16), nn.Sequential(nn.Flatten(), mlp(64, 24, 10))
    first = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for a, b in endless(loader(x, y, size=64), 150):
        first.zero_grad()
        functional.cross_entropy(teacher(a), b).backward()
        first.step()
    teacher.eval()
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    with watch(student, optimizer):
        for a, b in endless(loader(x, y, size=64), 500):
            with torch.no_grad():
                soft = (teacher(a) / 3).softmax(1)
            scores = student(a)
            apart = functional.kl_div((scores / 3).log_softmax(1), soft, reduction="batchmean")
            loss = 0.9 * 9 * apart + 0.1 * functional.cross_entropy(scores, b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return class_score(student, held_x, held_y)


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = conv_block(1, 8), conv_block(8, 16)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Any:
        down = self.down(x)
        deep = self.deep(functional.max_pool2d(down, 2))
        return self.out(torch.cat([down, self.up(deep).relu()], 1))


def disc_segmentation_dice(watch: Watch, seed: int) -> float:
    """Segmentation with the sum of a soft dice loss and cross-entropy by pixel."""
    torch.manual_seed(seed)
    x, mask = blobs(500)
    model = _UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:400], mask[:400], size=16), 250):
            scores = model(a)
            share = scores.sigmoid()
            both = 2 * (share * b).sum((1, 2, 3)) + 1
            dice = 1 - both / (share.sum((1, 2, 3)) + b.sum((1, 2, 3)) + 1)
            loss = dice.mean() + functional.binary_cross_entropy_with_logits(scores, b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    return squared_score(model(x[400:]).sigmoid(), mask[400:])


def disc_centre_soft_argmax(watch: Watch, seed: int) -> float:
    """Coordinates as the mean under a softmax over the positions of an image."""
    torch.manual_seed(seed)
    x, mask = blobs(500)
    grid = torch.stack(torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij"), -1)
    flat = mask.flatten(1)
    centre = flat @ grid.reshape(-1, 2) / flat.sum(1, keepdim=True)
    model = nn.Sequential(conv_block(1, 8), conv_block(8, 8), nn.Conv2d(8, 1, 1), nn.Flatten())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x[:400], centre[:400], size=20), 300):
            found = model(a).softmax(1) @ grid.reshape(-1, 2)
            optimizer.zero_grad()
            functional.mse_loss(found, b).backward()
            optimizer.step()
    model.eval()
    return squared_score(model(x[400:]).softmax(1) @ grid.reshape(-1, 2), centre[400:])


@torch.no_grad()
def _by_neighbours(encoder: nn.Module, x: Tensor, y: Tensor, held_x: Tensor, held_y: Tensor) -> float:
    """Return the error of the nearest class centre among the embeddings."""
    encoder.eval()
    known, asked = encoder(x), encoder(held_x)
    centres = torch.stack([known[y == label].mean(0) for label in range(10)])
    return error_score(-torch.cdist(asked, centres), held_y)


def digits_siamese_contrastive(watch: Watch, seed: int) -> float:
    """Pairs, half of them of one class, with the contrastive loss of distances."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    encoder = nn.Sequential(nn.Flatten(), mlp(64, 64, 16))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=2e-3)
    with watch(encoder, optimizer):
        for _ in range(500):
            one, other = picked(len(x), 64), picked(len(x), 64)
            for row in range(0, 64, 2):
                mates = (y == y[one[row]]).nonzero().squeeze(1)
                other[row] = mates[picked(len(mates), 1)]
            same = (y[one] == y[other]).float()
            far = functional.pairwise_distance(encoder(x[one]), encoder(x[other]))
            loss = (same * far**2 + (1 - same) * functional.relu(1.5 - far) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return _by_neighbours(encoder, x, y, held_x, held_y)


def digits_simclr(watch: Watch, seed: int) -> float:
    """Two noisy shifted views of each image and the loss of SimCLR; the right answer is the other view."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    encoder = nn.Sequential(conv_block(1, 16), nn.MaxPool2d(2), conv_block(16, 32), nn.Flatten(), nn.Linear(512, 32))
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    with watch(encoder, optimizer):
        for (a,) in endless(loader(x, size=64, drop_last=True), 250):
            shift = int(torch.randint(-1, 2, (1,)))
            views = torch.cat([a, a.roll(shift, 3)]) + 0.15 * torch.randn(128, 1, 8, 8)
            codes = functional.normalize(encoder(views))
            alike = (codes @ codes.T / 0.2).masked_fill(torch.eye(128, dtype=torch.bool), -torch.inf)
            loss = functional.cross_entropy(alike, torch.arange(128).roll(64))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return _by_neighbours(encoder, x, y, held_x, held_y)


class _ArcFace(nn.Module):
    """Cosines to class centres, the right one with a margin of angle."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.centres = nn.Sequential(nn.Flatten(), mlp(64, 64, 16)), nn.Parameter(torch.randn(10, 16))

    def forward(self, x: Tensor, label: Tensor | None = None) -> Any:
        cosine = functional.normalize(self.body(x)) @ functional.normalize(self.centres).T
        if label is None:
            return 10 * cosine
        margin = 0.2 * functional.one_hot(label, 10)
        return 10 * (cosine.clamp(-0.999, 0.999).acos() + margin).cos()


def digits_arc_margin(watch: Watch, seed: int) -> float:
    """Classification by angles with an additive margin."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = _ArcFace()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=64), 350):
            optimizer.zero_grad()
            functional.cross_entropy(model(a, b), b).backward()
            optimizer.step()
    return class_score(model, held_x, held_y)


class _PatchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Conv2d(1, 32, 2, stride=2), nn.Parameter(0.02 * torch.randn(17, 32))
        self.token = nn.Parameter(torch.zeros(1, 1, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Any:
        patches = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.place
        return self.head(self.body(tokens)[:, 0])


def digits_vision_transformer(watch: Watch, seed: int) -> float:
    """Patches, a class token that starts at zero, and two layers of attention."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = _PatchTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x, y, size=64), 260):
            optimizer.zero_grad()
            functional.cross_entropy(model(a), b).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return class_score(model, held_x, held_y)


def digits_checkpointed_bfloat16(watch: Watch, seed: int) -> float:
    """Forward under bfloat16 autocast, with the middle recomputed in the backward pass."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    stem, middle, head = mlp(64, 64), mlp(64, 64, 64, act=nn.GELU), nn.Linear(64, 10)
    model = nn.ModuleList([stem, middle, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for a, b in endless(loader(x.flatten(1), y, size=64), 300):
            with torch.autocast("cpu", torch.bfloat16):
                hidden = checkpoint(middle, stem(a).relu(), use_reentrant=False)
                scores = head(hidden)
            optimizer.zero_grad()
            functional.cross_entropy(scores.float(), b).backward()
            optimizer.step()
    return class_score(nn.Sequential(stem, nn.ReLU(), middle, head), held_x.flatten(1), held_y)


def digits_mean_of_weights(watch: Watch, seed: int) -> float:
    """Stochastic weight averaging at a constant rate in the last third, batch norm updated after."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = small_cnn()
    mean = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    swa = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    batches = loader(x, y, size=48)
    with watch(model, optimizer, scheduler=swa):
        for epoch in range(9):
            for a, b in batches:
                optimizer.zero_grad()
                functional.cross_entropy(model(a), b).backward()
                optimizer.step()
            if epoch >= 6:
                mean.update_parameters(model)
                swa.step()
    torch.optim.swa_utils.update_bn(batches, mean)
    return class_score(mean, held_x, held_y)


def digits_mean_teacher(watch: Watch, seed: int) -> float:
    """A tenth of the labels; the rest teaches by agreement with a moving average of the model."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    model = nn.Sequential(nn.Flatten(), mlp(64, 64, 10))
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer):
        for step in range(400):
            at, free = picked(130, 32), picked(len(x), 64)
            answer = model(x[free] + 0.1 * torch.randn(64, 1, 8, 8)).softmax(1)
            agree = functional.mse_loss(answer, teacher(x[free]).softmax(1))
            loss = functional.cross_entropy(model(x[at]), y[at]) + min(1, step / 100) * 5 * agree
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast.detach(), 0.05)
    return class_score(teacher, held_x, held_y)


PROGRAMS = [
    healthy(train)
    for train in (
        digits_one_cycle,
        digits_resnet_zero_gamma_label_smoothing,
        digits_frozen_backbone,
        digits_distilled,
        disc_segmentation_dice,
        disc_centre_soft_argmax,
        digits_siamese_contrastive,
        digits_simclr,
        digits_arc_margin,
        digits_vision_transformer,
        digits_checkpointed_bfloat16,
        digits_mean_of_weights,
        digits_mean_teacher,
    )
]
