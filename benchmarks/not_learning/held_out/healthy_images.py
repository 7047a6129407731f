"""Healthy programs on images and embeddings: segmentation, detection, contrast, transfer, distillation."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.not_learning.held_out.data import blobs, digits
from benchmarks.not_learning.held_out.entry import error_score, healthy, squared_score
from benchmarks.not_learning.program import Watch


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.mid = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(self.mid(skip))], 1))


def segment_discs_dice(watch: Watch, seed: int) -> float:
    """A small U-Net on noisy discs, soft Dice plus cross-entropy, batches of four, both modes in turn."""
    torch.manual_seed(seed)
    images, masks = blobs(160)
    model = _UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def dice(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        p = logits.sigmoid()
        both = (p * target).sum((1, 2, 3))
        return (1 - (2 * both + 1) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)).mean()

    with watch(model, optimizer) as watching:
        for _ in range(6):
            model.train()
            for rows in torch.randperm(128).split(4):
                logits = model(images[rows])
                loss = dice(logits, masks[rows]) + F.binary_cross_entropy_with_logits(logits, masks[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                watching.validated(dice(model(images[128:]), masks[128:]).item())
    return dice(model(images[128:]), masks[128:]).item()


def detect_discs(watch: Watch, seed: int) -> float:
    """Objectness on a grid plus boxes where there is an object: two losses, one of which most cells do not see."""
    torch.manual_seed(seed)
    images, masks = blobs(300)
    present = torch.rand(300) < 0.7
    images = images - masks * (~present).float()[:, None, None, None]
    cells = F.max_pool2d(masks, 4).flatten(1) * present[:, None]
    area = masks.sum((1, 2, 3)) / 30
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, 2, 1),
        nn.LeakyReLU(0.1),
        nn.Conv2d(16, 24, 3, 2, 1),
        nn.LeakyReLU(0.1),
        nn.Conv2d(24, 2, 1),
    )
    opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
    with watch(net, opt):
        for _ in range(15):
            for i in torch.randperm(300).split(20):
                objectness, size = net(images[i]).flatten(2).unbind(1)
                conf_loss = F.binary_cross_entropy_with_logits(objectness, cells[i], reduction="sum") / len(i)
                holds = cells[i] > 0
                size_loss = F.smooth_l1_loss(size[holds], area[i][:, None].expand(-1, 16)[holds])
                total = conf_loss + 5.0 * size_loss
                opt.zero_grad()
                total.backward()
                opt.step()
    wrong = ((net(images)[:, 0].flatten(1) > 0) != (cells > 0)).float().mean()
    return float(wrong / cells.mean())


def contrast_two_views(watch: Watch, seed: int) -> float:
    """SimCLR: cross-entropy over the batch with a temperature, both ways, whose targets are the rows themselves."""
    torch.manual_seed(seed)
    images, labels, held, held_labels = digits(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32))
    opt = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=20)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        opt, [warm, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 230)], milestones=[20]
    )

    def view(x: torch.Tensor) -> torch.Tensor:
        x = torch.roll(x, (int(torch.randint(-1, 2, ())), int(torch.randint(-1, 2, ()))), (2, 3))
        return x * (torch.rand_like(x) > 0.2) + 0.1 * torch.randn_like(x)

    with watch(net, opt, scheduler=scheduler, total_steps=250):
        for _ in range(250):
            x = images[torch.randint(len(images), (128,))]
            a, b = F.normalize(net(view(x)), dim=1), F.normalize(net(view(x)), dim=1)
            sim = a @ b.T / 0.2
            same = torch.arange(len(x))
            loss = (F.cross_entropy(sim, same) + F.cross_entropy(sim.T, same)) / 2
            opt.zero_grad()
            loss.backward()
            opt.step()
            scheduler.step()
    net.eval()
    near = F.normalize(net(held), dim=1) @ F.normalize(net(images), dim=1).T
    return float((labels[near.argmax(1)] != held_labels).float().mean() / 0.9)


def bootstrap_without_negatives(watch: Watch, seed: int) -> float:
    """BYOL: the loss pulls towards a slow copy of the model, which no optimizer holds; the loss may rise."""
    torch.manual_seed(seed)
    images, labels, held, held_labels = digits(seed)
    online = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
    predictor = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32))
    target = copy.deepcopy(online).requires_grad_(False)
    opt = torch.optim.Adam([*online.parameters(), *predictor.parameters()], lr=2e-3)
    with watch({"online": online, "predictor": predictor, "target": target}, opt, frozen=("target",)):
        for _ in range(300):
            x = images[torch.randint(len(images), (64,))]
            a, b = x + 0.15 * torch.randn_like(x), x * (torch.rand_like(x) > 0.15)
            with torch.no_grad():
                goal = target(b)
            loss = 2 - 2 * F.cosine_similarity(predictor(online(a)), goal, dim=-1).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
                    slow.lerp_(fast, 0.02)
    online.eval()
    near = F.normalize(online(held), dim=1) @ F.normalize(online(images), dim=1).T
    return float((labels[near.argmax(1)] != held_labels).float().mean() / 0.9)


def distil_frozen_teacher(watch: Watch, seed: int) -> float:
    """A student learns from a frozen, well-trained teacher by KL at a temperature, in two stages."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    fit = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(200):
        i = torch.randint(len(x), (64,))
        fit.zero_grad()
        F.cross_entropy(teacher(x[i]), y[i]).backward()
        fit.step()
    teacher.eval()
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    optimizer = torch.optim.Adam(student.parameters(), lr=5e-3)
    kl = nn.KLDivLoss(reduction="batchmean", log_target=False)
    with watch(student, optimizer):
        for _ in range(400):
            i = torch.randint(len(x), (64,))
            with torch.no_grad():
                soft = F.softmax(teacher(x[i]) / 4, dim=1)
            out = student(x[i])
            loss = kl(F.log_softmax(out / 4, dim=1), soft) * 16 * 0.7 + F.cross_entropy(out, y[i]) * 0.3
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return error_score(student(held_x), held_y)


class _LoRA(nn.Module):
    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(frozen.in_features, rank) / math.sqrt(frozen.in_features))
        self.b = nn.Parameter(torch.zeros(rank, frozen.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + 2 * (x @ self.a @ self.b)


def adapters_of_low_rank(watch: Watch, seed: int) -> float:
    """Low-rank adapters over frozen layers: one factor starts at 0, so the other gets a gradient of 0 at first."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    one, two = nn.Linear(64, 64), nn.Linear(64, 10)
    model = nn.Sequential(nn.Flatten(), _LoRA(one), nn.ReLU(), _LoRA(two))
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3)
    with watch(model, optimizer):
        for _ in range(400):
            i = torch.randint(len(x), (32,))
            loss = F.cross_entropy(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return error_score(model(held_x), held_y)


def fine_tune_thawed_in_stages(watch: Watch, seed: int) -> float:
    """Discriminative rates on a network from a neighbouring task; the stem stays frozen."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    stem = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    body = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 32), nn.ReLU())
    model = nn.Sequential()
    model.add_module("stem", stem)
    model.add_module("body", body)
    model.add_module("head", nn.Linear(32, 2))
    for goal, steps in ((y % 2, 150), (y, 350)):
        if steps == 150:
            pre = torch.optim.Adam(model.parameters(), lr=3e-3)
            for _ in range(steps):
                i = torch.randint(len(x), (32,))
                pre.zero_grad()
                F.cross_entropy(model(x[i]), goal[i]).backward()
                pre.step()
            model.head = nn.Linear(32, 10)
            for p in model.stem.parameters():
                p.requires_grad = False
            continue
        groups = [{"params": body.parameters(), "lr": 2e-4}, {"params": model.head.parameters(), "lr": 4e-3}]
        optimizer = torch.optim.AdamW(groups)
        with watch(model, optimizer, frozen=("stem",)):
            for _ in range(steps):
                model.train()
                stem.eval()
                i = torch.randint(len(x), (32,))
                loss = F.cross_entropy(model(x[i]), goal[i])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    model.eval()
    return error_score(model(held_x), held_y)


def mixup_soft_targets(watch: Watch, seed: int) -> float:
    """Mixup: soft targets by CrossEntropyLoss, a high floor of the loss; strided convolutions, Adadelta at rate 1."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ELU(), nn.Conv2d(16, 32, 3, 2), nn.ELU(),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(288, 10),
    )  # fmt: skip
    opt = torch.optim.Adadelta(net.parameters(), lr=1.0)
    one_hot = F.one_hot(y, 10).float()
    with watch(net, opt):
        for _ in range(300):
            i, lam = torch.randint(len(x), (32,)), float(torch.distributions.Beta(0.4, 0.4).sample())
            j = i[torch.randperm(32)]
            loss = nn.CrossEntropyLoss()(
                net(lam * x[i] + (1 - lam) * x[j]), lam * one_hot[i] + (1 - lam) * one_hot[j]
            )
            opt.zero_grad()
            loss.backward()
            opt.step()
    net.eval()
    return error_score(net(held_x), held_y)


def triplets_until_silent(watch: Watch, seed: int) -> float:
    """A triplet loss that many late batches leave at exactly 0, as it should be."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.PReLU(), nn.Linear(64, 16))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    criterion = nn.TripletMarginLoss(margin=1.0)
    by_label = [torch.nonzero(y == k)[:, 0] for k in range(10)]
    with watch(net, opt):
        for _ in range(500):
            kind = torch.randint(10, (16,)).tolist()
            pick = [by_label[k][torch.randint(len(by_label[k]), (2,))] for k in kind]
            other = [by_label[(k + int(torch.randint(1, 10, ()))) % 10] for k in kind]
            stranger = torch.stack([o[int(torch.randint(len(o), ()))] for o in other])
            a, p = torch.stack(pick).unbind(1)
            loss = criterion(net(x[a]), net(x[p]), net(x[stranger]))
            opt.zero_grad()
            loss.backward()
            opt.step()
    near = torch.cdist(net(held_x), net(x)).argmin(1)
    return float((y[near] != held_y).float().mean() / 0.9)


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


def binarised_straight_through(watch: Watch, seed: int) -> float:
    """Activations are signs; a custom Function passes gradients straight through where they are small."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    one, norm, two = nn.Linear(64, 96), nn.BatchNorm1d(96), nn.Linear(96, 10)
    model = nn.ModuleList([one, norm, two])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def forward(batch: torch.Tensor) -> torch.Tensor:
        return two(_Sign.apply(norm(one(batch.flatten(1)))))

    with watch(model, optimizer):
        for _ in range(400):
            i = torch.randint(len(x), (48,))
            loss = F.multi_margin_loss(forward(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    return error_score(forward(held_x), held_y)


def denoise_small_steps(watch: Watch, seed: int) -> float:
    """A residual denoiser whose loss falls little, as most of the noise cannot be told from the picture."""
    torch.manual_seed(seed)
    x, _, held, _ = digits(seed)
    net = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 1, 3, padding=1))
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, amsgrad=True)
    with watch(net, opt):
        for _ in range(400):
            clean = x[torch.randint(len(x), (32,))]
            noisy = clean + 0.3 * torch.randn_like(clean)
            loss = F.l1_loss(noisy - net(noisy), clean)
            opt.zero_grad()
            loss.backward()
            opt.step()
    noisy = held + 0.3 * torch.randn_like(held)
    return squared_score(noisy - net(noisy), held)


PROGRAMS = [
    healthy(segment_discs_dice),
    healthy(detect_discs),
    healthy(contrast_two_views),
    healthy(bootstrap_without_negatives),
    healthy(distil_frozen_teacher),
    healthy(adapters_of_low_rank),
    healthy(fine_tune_thawed_in_stages),
    healthy(mixup_soft_targets),
    healthy(triplets_until_silent),
    healthy(binarised_straight_through),
    healthy(denoise_small_steps),
]
