"""Healthy programs of the set: tables, images."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, adamw, healthy, sgd, update


class _Store(nn.Module):
    """Entity embeddings of two categories beside numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.shop, self.day = nn.Embedding(50, 6), nn.Embedding(7, 3)
        self.drop, self.net = nn.Dropout(0.05), parts.mlp(13, 64, 1)

    def forward(self, shop: Tensor, day: Tensor, x: Tensor) -> Any:
        known = self.drop(torch.cat([self.shop(shop), self.day(day)], 1))
        return self.net(torch.cat([known, x], 1)).squeeze(1)


class HealthyTables(Programs):
    """Healthy programs on tables.

    Regressions, counts, ranks, survival, and losses that are not the usual two.
    """

    @healthy
    def wine_softmax_regression(self) -> None:
        """A linear classifier with plain gradient descent."""
        model = nn.Linear(13, 3)
        self.fit(
            model,
            sgd(model, 0.1),
            data.stream(data.table("wine", self.seed), 16, 400),
            F.cross_entropy,
        )

    @healthy
    def cancer_raw_features_batchnorm(self) -> None:
        """Raw features of very different size; a batch norm in front scales them."""
        x, y, *_ = data.table("breast_cancer", self.seed, raw=True)
        model = nn.Sequential(nn.BatchNorm1d(30), parts.mlp(30, 32, 1))
        for a, b in self.watched(
            data.stream((x, y), 64, 400, drop_last=True), model, adam(model, 0.002)
        ):
            self.update(F.binary_cross_entropy_with_logits(model(a).squeeze(1), b.float()))

    @healthy
    def diabetes_huber_adamw(self) -> None:
        """A small noisy regression with a robust loss and cosine decay by epochs."""
        x, y, *_ = data.scaled_diabetes(self.seed)
        model = parts.mlp(10, 32, 1, act=nn.SiLU)
        optimizer = adamw(model, 0.003, weight_decay=0.05)
        scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)
        for _ in self.watched(range(30), model, optimizer, scheduler=scheduler):
            for a, b in data.loader(x, y, size=32):
                update(optimizer, nn.HuberLoss()(model(a), b[:, None]))
            scheduler.step()

    @healthy
    def prices_in_logarithms(self) -> None:
        """Prices over three decades, learnt as their logarithm."""
        x = torch.randn(1500, 8)
        price = (12 + 0.8 * x[:, 0] + 0.5 * x[:, 1] * x[:, 2] + 0.3 * torch.randn(1500)).exp()
        target = price.log1p()
        model = parts.mlp(8, 64, 64, 1, act=nn.GELU)
        nn.init.constant_(model[-1].bias, float(target[:1200].mean()))
        for _ in self.watched(range(500), model, adam(model, 0.003)):
            at = data.picked(1200, 64)
            self.update(F.mse_loss(model(x[at]).squeeze(1), target[at]))

    @healthy
    def friedman_self_normalising(self) -> None:
        """A deep network of SELU with alpha dropout and LeCun's initialisation."""
        x, y = data.friedman(1600)
        layers: list[nn.Module] = []
        for wide in (10, 48, 48, 48):
            layers += [nn.Linear(wide, 48), nn.SELU(), nn.AlphaDropout(0.02)]
        model = nn.Sequential(*layers, nn.Linear(48, 1))
        for layer in model:
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
                nn.init.zeros_(layer.bias)
        optimizer = optim.RMSprop(model.parameters(), lr=0.001)
        stream = data.stream((x[:1300], y[:1300]), 64, 600)
        self.descend(model, optimizer, stream, lambda a, b: F.mse_loss(model(a).squeeze(1), b))

    @healthy
    def sales_with_entity_embeddings(self) -> None:
        """Sales from categories by embeddings and a few numbers."""
        shop, day, x = torch.randint(50, (3000,)), torch.randint(7, (3000,)), torch.randn(3000, 4)
        y = (
            torch.randn(50)[shop]
            + 0.7 * torch.randn(7)[day]
            + 0.5 * x[:, 0]
            + 0.2 * torch.randn(3000)
        )
        model = _Store()
        optimizer = adam(model, 0.01)
        stream = data.stream((shop[:2400], day[:2400], x[:2400], y[:2400]), 64, 500)
        self.descend(model, optimizer, stream, lambda s, d, a, b: F.mse_loss(model(s, d, a), b))

    @healthy
    def ratings_sparse_adam(self) -> None:
        """Matrix factorisation with sparse gradients.

        One optimizer for the tables, one for the bias.
        """
        user, film, rating = data.ratings(self.seed)
        model = parts.Wired(
            lambda self, user, film: (self.user(user) * self.film(film)).sum(1) + self.bias,
            user=nn.Embedding(120, 6, sparse=True),
            film=nn.Embedding(80, 6, sparse=True),
            bias=nn.Parameter(torch.tensor(3.5)),
        )
        sparse = optim.SparseAdam([*model.user.parameters(), *model.film.parameters()], lr=0.02)
        dense = optim.SGD([model.bias], lr=0.01)
        for u, f, r in self.watched(
            data.stream((user[:5000], film[:5000], rating[:5000]), 128, 700),
            model,
            {"tables": sparse, "bias": dense},
        ):
            sparse.zero_grad()
            dense.zero_grad()
            F.mse_loss(model(u, f), r).backward()
            sparse.step()
            dense.step()

    @healthy
    def quantile_bands(self) -> None:
        """Three quantiles at once by the pinball loss; noise grows with the input."""
        x = 4 * torch.rand(2000, 1) - 2
        truth = (2 * x).sin()
        y = truth + 0.15 * x.abs() * torch.randn(2000, 1)
        levels = torch.tensor([0.1, 0.5, 0.9])
        model = parts.mlp(1, 48, 48, 3, act=nn.Tanh)
        for _ in self.watched(range(500), model, adam(model, 0.005)):
            at = data.picked(2000, 128)
            short = y[at] - model(x[at])
            self.update(torch.maximum(levels * short, (levels - 1) * short).mean())

    @healthy
    def ordinal_grades(self) -> None:
        """Grades 0 to 4 as four cumulative yes-or-no questions with shared weights."""
        x, y = data.friedman(2000, noise=0.1)
        grade = torch.bucketize(y, torch.tensor([-1.0, -0.3, 0.3, 1.0]))
        body = parts.mlp(10, 48, 1)
        model = nn.ModuleDict({"body": body, "steps": nn.ParameterList([torch.linspace(1, -1, 4)])})
        optimizer = adam(model, 0.005)
        with self.watch(model, optimizer):
            for _ in range(600):
                at = data.picked(1600, 64)
                scores = body(x[at]) + model["steps"][0]
                above = (grade[at][:, None] > torch.arange(4)).float()
                update(optimizer, F.binary_cross_entropy_with_logits(scores, above))

    @healthy
    def survival_cox(self) -> None:
        """Cox's partial likelihood over a batch of censored lives, whose level depends on the
        batch.
        """
        x = torch.randn(1200, 6)
        risk = x[:, 0] - 0.8 * x[:, 1] + 0.5 * x[:, 2] ** 2
        life = torch.empty(1200).exponential_() * (-risk).exp()
        limit = torch.empty(1200).exponential_() * 2
        seen, time = (life <= limit).float(), torch.minimum(life, limit)
        model = parts.mlp(6, 32, 1)
        for _ in self.watched(range(400), model, adam(model, 0.005)):
            at = data.picked(1000, 128)
            at = at[time[at].argsort(descending=True)]
            score = model(x[at]).squeeze(1)
            self.update(-((score - score.logcumsumexp(0)) * seen[at]).sum() / seen[at].sum())

    @healthy
    def counts_poisson(self) -> None:
        """Counts by the Poisson likelihood, whose loss goes below zero."""
        x = torch.randn(1500, 5)
        rate = (1.5 + 0.6 * x[:, 0] - 0.4 * x[:, 1]).exp()
        y = torch.poisson(rate)
        model = parts.mlp(5, 32, 1)
        optimizer = adam(model, 0.003)
        stream = data.stream((x, y), 50, 600)
        self.descend(
            model, optimizer, stream, lambda a, b: F.poisson_nll_loss(model(a).squeeze(1), b)
        )

    @healthy
    def heteroscedastic_gaussian(self) -> None:
        """Mean and variance together; the loss becomes negative."""
        x = 6 * torch.rand(1500, 1) - 3
        truth = x.sin()
        y = truth + (0.02 + 0.06 * (x > 0).float()) * torch.randn(1500, 1)
        model = parts.mlp(1, 64, 64, 2, act=nn.Tanh)
        for _ in self.watched(range(700), model, adam(model, 0.003)):
            at = data.picked(1500, 100)
            mean, raw = model(x[at]).chunk(2, 1)
            self.update(F.gaussian_nll_loss(mean, y[at], F.softplus(raw) + 0.0001), clip=5.0)

    @healthy
    def multi_task_learnt_weights(self) -> None:
        """A regression and a classification, weighed by learnt uncertainties that live outside
        the network.
        """
        x, y = data.friedman(1600)
        label = (x[:, 5] * x[:, 6] > 0).long()
        body, value, kind = parts.mlp(10, 64, 64), nn.Linear(64, 1), nn.Linear(64, 2)
        spread = nn.ParameterList([torch.zeros(2)])
        model = nn.ModuleDict(
            {"body": nn.Sequential(body, nn.ReLU()), "value": value, "kind": kind, "spread": spread}
        )
        for _ in self.watched(range(700), model, adam(model, 0.003)):
            at = data.picked(1300, 64)
            hidden = model["body"](x[at])
            first = F.mse_loss(value(hidden).squeeze(1), y[at])
            second = F.cross_entropy(kind(hidden), label[at])
            losses = torch.stack([first, second])
            self.update(((-spread[0]).exp() * losses + spread[0]).sum())

    @healthy
    def little_to_learn(self) -> None:
        """Targets with three times more noise than signal.

        The loss falls by little, and rightly.
        """
        x = torch.randn(4000, 6)
        truth = 0.6 * x[:, 0] - 0.5 * x[:, 3]
        y = truth + 1.4 * torch.randn(4000)
        model = nn.Linear(6, 1)
        optimizer = adam(model, 0.003)
        stream = data.stream((x, y), 64, 500)
        self.descend(model, optimizer, stream, lambda a, b: F.mse_loss(model(a).squeeze(1), b))


class _Residual(nn.Module):
    """A block of group norm whose last scale starts at zero, so that it starts as the identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList([nn.GroupNorm(4, channels) for _ in range(2)])
        nn.init.zeros_(self.norms[1].weight)

    def forward(self, x: Tensor) -> Any:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(x + self.norms[1](self.second(inner)))


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = parts.conv_block(1, 8), parts.conv_block(8, 16)
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, stride=2), nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Any:
        down = self.down(x)
        deep = self.deep(F.max_pool2d(down, 2))
        return self.out(torch.cat([down, self.up(deep).relu()], 1))


class _ArcFace(nn.Module):
    """Cosines to class centres, the right one with a margin of angle."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.centres = (
            nn.Sequential(nn.Flatten(), parts.mlp(64, 64, 16)),
            nn.Parameter(torch.randn(10, 16)),
        )

    def forward(self, x: Tensor, label: Tensor | None = None) -> Any:
        cosine = F.normalize(self.body(x)) @ F.normalize(self.centres).T
        if label is None:
            return 10 * cosine
        margin = 0.2 * F.one_hot(label, 10)
        return 10 * (cosine.clamp(-0.999, 0.999).acos() + margin).cos()


class _PatchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = (
            nn.Conv2d(1, 32, 2, stride=2),
            nn.Parameter(0.02 * torch.randn(17, 32)),
        )
        self.token = nn.Parameter(torch.zeros(1, 1, 32))
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Any:
        patches = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.place
        return self.head(self.body(tokens)[:, 0])


class HealthyImages(Programs):
    """Healthy programs on images.

    Classifiers of all kinds, segmentation, detection, and learnt distances.
    """

    @healthy
    def digits_one_cycle(self) -> None:
        """A small network with momentum under the one-cycle policy."""
        x, y, *_ = data.digit_images(self.seed)
        model = parts.small_cnn()
        optimizer = sgd(model, 0.01, momentum=0.9, nesterov=True, weight_decay=0.0005)
        scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=300)
        stream = data.stream((x, y), 64, 300)
        self.fit(model, optimizer, stream, F.cross_entropy, scheduler=scheduler, total_steps=300)

    @healthy
    def digits_resnet_zero_gamma_label_smoothing(self) -> None:
        """A residual network with group norm, label smoothing, linear warm-up and cosine decay."""
        x, y, *_ = data.digit_images(self.seed)
        blocks = [_Residual(16) for _ in range(3)]
        model = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            *blocks,
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(64, 10),
        )
        optimizer = adamw(model, 0.004, weight_decay=0.01)
        warm = optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=40)
        down = optim.lr_scheduler.CosineAnnealingLR(optimizer, 260)
        scheduler = optim.lr_scheduler.SequentialLR(optimizer, [warm, down], [40])
        for a, b in self.watched(
            data.stream((x, y), 48, 300), model, optimizer, scheduler=scheduler
        ):
            update(optimizer, F.cross_entropy(model(a), b, label_smoothing=0.1))
            scheduler.step()

    @healthy
    def digits_frozen_backbone(self) -> None:
        """A head on features that were trained before on other classes and are frozen now, in
        evaluation mode.
        """
        x, y, *_ = data.digit_images(self.seed)
        backbone = parts.small_cnn()[:-1]
        before = nn.Sequential(backbone, nn.Linear(96, 2))
        first = adam(before, 0.003)
        for a, b in data.stream((x, (y > 4).long()), 64, 150):
            update(first, F.cross_entropy(before(a), b))
        backbone.eval().requires_grad_(False)
        model = nn.ModuleDict({"backbone": backbone, "head": nn.Linear(96, 10)})
        optimizer = adam(model["head"], 0.01)
        for a, b in self.watched(
            data.stream((x, y), 64, 300), model, optimizer, frozen=("backbone",)
        ):
            with torch.no_grad():
                known = backbone(a)
            update(optimizer, F.cross_entropy(model["head"](known), b))

    @healthy
    def digits_distilled(self) -> None:
        """A small student of a large teacher.

        Soft targets at a temperature, and a share of the hard ones.
        """
        x, y, *_ = data.digit_images(self.seed)
        teacher, student = (
            parts.small_cnn(width=16),
            nn.Sequential(nn.Flatten(), parts.mlp(64, 24, 10)),
        )
        first = adam(teacher, 0.003)
        for a, b in data.stream((x, y), 64, 150):
            update(first, F.cross_entropy(teacher(a), b))
        teacher.eval()
        for a, b in self.watched(data.stream((x, y), 64, 500), student, adam(student, 0.003)):
            with torch.no_grad():
                soft = (teacher(a) / 3).softmax(1)
            scores = student(a)
            apart = F.kl_div((scores / 3).log_softmax(1), soft, reduction="batchmean")
            self.update(0.9 * 9 * apart + 0.1 * F.cross_entropy(scores, b))

    @healthy
    def disc_segmentation_dice(self) -> None:
        """Segmentation with the sum of a soft dice loss and cross-entropy by pixel."""
        x, mask = data.discs(500)
        model = _UNet()
        for a, b in self.watched(
            data.stream((x[:400], mask[:400]), 16, 250), model, adam(model, 0.003)
        ):
            scores = model(a)
            share = scores.sigmoid()
            both = 2 * (share * b).sum((1, 2, 3)) + 1
            dice = 1 - both / (share.sum((1, 2, 3)) + b.sum((1, 2, 3)) + 1)
            self.update(dice.mean() + F.binary_cross_entropy_with_logits(scores, b))

    @healthy
    def disc_centre_soft_argmax(self) -> None:
        """Coordinates as the mean under a softmax over the positions of an image."""
        x, mask = data.discs(500)
        grid = torch.stack(
            torch.meshgrid(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 16), indexing="ij"), -1
        )
        flat = mask.flatten(1)
        centre = flat @ grid.reshape(-1, 2) / flat.sum(1, keepdim=True)
        model = nn.Sequential(
            parts.conv_block(1, 8), parts.conv_block(8, 8), nn.Conv2d(8, 1, 1), nn.Flatten()
        )
        for a, b in self.watched(
            data.stream((x[:400], centre[:400]), 20, 300), model, adam(model, 0.005)
        ):
            found = model(a).softmax(1) @ grid.reshape(-1, 2)
            self.update(F.mse_loss(found, b))

    @healthy
    def digits_siamese_contrastive(self) -> None:
        """Pairs, half of them of one class, with the contrastive loss of distances."""
        x, y, *_ = data.digit_images(self.seed)
        encoder = nn.Sequential(nn.Flatten(), parts.mlp(64, 64, 16))
        for _ in self.watched(range(500), encoder, adam(encoder, 0.002)):
            one, other = data.picked(len(x), 64), data.picked(len(x), 64)
            for row in range(0, 64, 2):
                mates = (y == y[one[row]]).nonzero().squeeze(1)
                other[row] = mates[data.picked(len(mates), 1)]
            same = (y[one] == y[other]).float()
            far = F.pairwise_distance(encoder(x[one]), encoder(x[other]))
            self.update((same * far**2 + (1 - same) * F.relu(1.5 - far) ** 2).mean())

    @healthy
    def digits_simclr(self) -> None:
        """Two noisy shifted views of each image and the loss of SimCLR.

        The right answer is the other view.
        """
        x, *_ = data.digit_images(self.seed)
        encoder = nn.Sequential(
            parts.conv_block(1, 16),
            nn.MaxPool2d(2),
            parts.conv_block(16, 32),
            nn.Flatten(),
            nn.Linear(512, 32),
        )
        for (a,) in self.watched(
            data.stream((x,), 64, 250, drop_last=True), encoder, adam(encoder, 0.001)
        ):
            shift = int(torch.randint(-1, 2, (1,)))
            views = torch.cat([a, a.roll(shift, 3)]) + 0.15 * torch.randn(128, 1, 8, 8)
            codes = F.normalize(encoder(views))
            alike = (codes @ codes.T / 0.2).masked_fill(
                torch.eye(128, dtype=torch.bool), -torch.inf
            )
            self.update(F.cross_entropy(alike, torch.arange(128).roll(64)))

    @healthy
    def digits_arc_margin(self) -> None:
        """Classification by angles with an additive margin."""
        x, y, *_ = data.digit_images(self.seed)
        model = _ArcFace()
        optimizer = adam(model, 0.003)
        stream = data.stream((x, y), 64, 350)
        self.descend(model, optimizer, stream, lambda a, b: F.cross_entropy(model(a, b), b))

    @healthy
    def digits_vision_transformer(self) -> None:
        """Patches, a class token that starts at zero, and two layers of attention."""
        x, y, *_ = data.digit_images(self.seed)
        model = _PatchTransformer()
        self.fit(
            model, adamw(model, 0.002), data.stream((x, y), 64, 260), F.cross_entropy, clip=1.0
        )

    @healthy
    def digits_checkpointed_bfloat16(self) -> None:
        """Forward under bfloat16 autocast, with the middle recomputed in the backward pass."""
        x, y, *_ = data.digit_images(self.seed)
        stem, middle, head = (
            parts.mlp(64, 64),
            parts.mlp(64, 64, 64, act=nn.GELU),
            nn.Linear(64, 10),
        )
        model = nn.ModuleList([stem, middle, head])
        for a, b in self.watched(
            data.stream((x.flatten(1), y), 64, 300), model, adam(model, 0.002)
        ):
            with torch.autocast("cpu", torch.bfloat16):
                hidden = checkpoint(middle, stem(a).relu(), use_reentrant=False)
                scores = head(hidden)
            self.update(F.cross_entropy(scores.float(), b))

    @healthy
    def digits_mean_of_weights(self) -> None:
        """Stochastic weight averaging at a constant rate in the last third, batch norm updated
        after.
        """
        x, y, *_ = data.digit_images(self.seed)
        model = parts.small_cnn()
        mean = optim.swa_utils.AveragedModel(model)
        optimizer = sgd(model, 0.1, momentum=0.9)
        swa = optim.swa_utils.SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
        batches = data.loader(x, y, size=48)
        for epoch in self.watched(range(9), model, optimizer, scheduler=swa):
            for a, b in batches:
                update(optimizer, F.cross_entropy(model(a), b))
            if epoch >= 6:
                mean.update_parameters(model)
                swa.step()

    @healthy
    def digits_mean_teacher(self) -> None:
        """A tenth of the labels.

        The rest teaches by agreement with a moving average of the model.
        """
        x, y, *_ = data.digit_images(self.seed)
        model = nn.Sequential(nn.Flatten(), parts.mlp(64, 64, 10))
        teacher = copy.deepcopy(model).requires_grad_(False)
        for step in self.watched(range(400), model, adam(model, 0.002)):
            at, free = data.picked(130, 32), data.picked(len(x), 64)
            answer = model(x[free] + 0.1 * torch.randn(64, 1, 8, 8)).softmax(1)
            agree = F.mse_loss(answer, teacher(x[free]).softmax(1))
            self.update(F.cross_entropy(model(x[at]), y[at]) + min(1, step / 100) * 5 * agree)
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast.detach(), 0.05)
