"""Healthy programs of the set: tables, images."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, adamw, follow, healthy, sgd, update


class _Factors(nn.Module):
    def __init__(self, users: int, films: int) -> None:
        super().__init__()
        self.user = nn.Embedding(users, 8, sparse=True)
        self.film = nn.Embedding(films, 8, sparse=True)
        self.user_bias = nn.Embedding(users, 1, sparse=True)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.film.weight, std=0.1)
        nn.init.zeros_(self.user_bias.weight)

    def forward(self, user: Tensor, film: Tensor) -> Tensor:
        return 3.5 + torch.einsum("bd,bd->b", self.user(user), self.film(film)) + self.user_bias(user)[:, 0]


class HealthyTables(Programs):
    """Healthy programs on tables: regression, classification, ranking, recommendation, survival."""

    @healthy
    def wine_selu(self) -> None:
        """Full-batch SGD on a small table, log-probabilities into CrossEntropyLoss (which is harmless)."""
        x, y, *_ = data.table("wine", self.seed)
        net = nn.Sequential(
            nn.Linear(13, 24), nn.SELU(), nn.AlphaDropout(0.1), nn.Linear(24, 3), nn.LogSoftmax(dim=1)
        )
        opt = sgd(net, 0.05, momentum=0.9)
        criterion = nn.CrossEntropyLoss()
        self.descend(net, opt, range(300), lambda _: criterion(net(x), y), total_steps=300)

    @healthy
    def diabetes_quantiles(self) -> None:
        """A pinball loss written by hand, three quantiles at once, RMSprop, targets left in their own units."""
        x, y, held_x, held_y = data.table("diabetes", self.seed)
        quantiles = torch.tensor([0.1, 0.5, 0.9])
        net = parts.mlp(10, 32, 3)
        opt = optim.RMSprop(net.parameters(), lr=0.02)

        def pinball(guess: Tensor, target: Tensor) -> Tensor:
            error = target[:, None] - guess
            return torch.maximum(quantiles * error, (quantiles - 1) * error).mean()

        for epoch in self.watched(range(60), net, opt):
            for rows in torch.randperm(len(x)).split(64):
                update(opt, pinball(net(x[rows]), y[rows]))
            if epoch % 10 == 9:
                with torch.no_grad():
                    self.watching.validated(pinball(net(held_x), held_y).item())

    @healthy
    def iris_prototypes(self) -> None:
        """Distances to learnt prototypes as logits, Adagrad with a rate that would be high for others."""
        model = parts.Wired(
            lambda self, x: -torch.cdist(self.encoder(x), self.centres),
            encoder=parts.mlp(4, 16, 4, act=nn.Tanh),
            centres=nn.Parameter(torch.randn(3, 4)),
        )
        optimizer = optim.Adagrad(model.parameters(), lr=0.1)
        self.fit(model, optimizer, data.epochs(data.table("iris", self.seed), 16, 60), F.cross_entropy)

    @healthy
    def rare_positives_focal(self) -> None:
        """Three per cent of positives, a focal loss on sigmoids by hand, NAdam; most batches hold few positives."""
        x = torch.randn(4000, 12)
        y = (x[:, 0] * x[:, 1] + x[:, 2] > 2.6).float()
        net = parts.mlp(12, 48, 48, 1, act=nn.GELU)
        net[-1].bias.data.fill_(-math.log(0.97 / 0.03))
        opt = optim.NAdam(net.parameters(), lr=0.003)

        def focal(logit: Tensor, target: Tensor, gamma: float = 2.0) -> Tensor:
            p = logit.sigmoid()
            pt = p * target + (1 - p) * (1 - target)
            return (-((1 - pt) ** gamma) * pt.clamp_min(1e-06).log()).mean()

        self.descend(net, opt, data.epochs((x, y), 64, 8), lambda a, b: focal(net(a).squeeze(1), b))

    @healthy
    def cancer_pos_weight_accumulated(self) -> None:
        """Four micro-batches per update, each divided by four; Nesterov SGD, PolynomialLR, class weights."""
        x, y, *_ = data.table("breast_cancer", self.seed)
        model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Mish(), nn.Linear(20, 1))
        optimizer = sgd(model, 0.1, momentum=0.9, nesterov=True, weight_decay=0.0001)
        accum, epochs = 4, 60
        scheduler = optim.lr_scheduler.PolynomialLR(optimizer, total_iters=epochs * 3, power=1.0)
        criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(0.6))
        for _ in self.watched(range(epochs), model, optimizer, scheduler=scheduler, total_steps=epochs * 3):
            model.train()
            for i, rows in enumerate(torch.randperm(len(x))[:384].split(32)):
                loss = criterion(model(x[rows]).flatten(), y[rows].float()) / accum
                loss.backward()
                if (i + 1) % accum == 0:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()

    @healthy
    def recommender_sparse(self) -> None:
        """Matrix factorisation with sparse gradients and SparseAdam; most rows get no gradient in a batch."""
        user, film, score = data.ratings(self.seed)
        model = _Factors(120, 80)
        optimizer = optim.SparseAdam(model.parameters(), lr=0.02)
        for _ in self.watched(range(12), model, optimizer):
            for rows in torch.randperm(5000).split(128):
                update(optimizer, F.mse_loss(model(user[rows], film[rows]), score[rows]))

    @healthy
    def graph_full_batch(self) -> None:
        """A graph network in matrix form: every step sees the same whole graph, half the features dropped."""
        adjacency, features, labels = data.community(self.seed)
        known = torch.randperm(len(labels))[:60]
        first, second = nn.Linear(16, 16), nn.Linear(16, 3)
        net = nn.ModuleDict({"first": first, "second": second})

        def forward(*, training: bool) -> Tensor:
            hidden = F.dropout(features, 0.5, training)
            hidden = F.relu(first(adjacency @ hidden))
            return F.log_softmax(adjacency @ second(F.dropout(hidden, 0.5, training)), dim=1)

        for _ in self.watched(range(200), net, adam(net, 0.01, weight_decay=0.0005), total_steps=200):
            net.train()
            self.update(F.nll_loss(forward(training=True)[known], labels[known]))

    @healthy
    def ranking_pairs(self) -> None:
        """A margin ranking of pairs, learnt so well that many batches end with a loss and gradients of exactly 0."""
        x = torch.randn(600, 8)
        worth = x @ torch.linspace(-1, 1, 8) + x[:, 0].clamp_min(0)
        scorer = parts.mlp(8, 32, 1)
        for _ in self.watched(range(500), scorer, adam(scorer, 0.005)):
            left, right = torch.randint(600, (2, 32))
            keep = (worth[left] - worth[right]).abs() > 0.5
            left, right = left[keep], right[keep]
            sign = (worth[left] - worth[right]).sign()
            self.update(F.margin_ranking_loss(scorer(x[left])[:, 0], scorer(x[right])[:, 0], sign, margin=0.1))

    @healthy
    def bike_counts_poisson(self) -> None:
        """Counts by a Poisson likelihood, whose value is negative for large counts; Adamax, StepLR per epoch."""
        x = torch.rand(1500, 3) * torch.tensor([24.0, 7.0, 30.0])
        rate = (2 + (x[:, 0] * math.pi / 12).sin() + 0.03 * x[:, 2]).exp()
        counts = torch.poisson(rate)
        inputs = (x - x.mean(0)) / x.std(0)
        model = parts.mlp(3, 32, 32, 1, act=nn.SiLU)
        optimizer = optim.Adamax(model.parameters(), lr=0.01)
        scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
        loss_fn = nn.PoissonNLLLoss(log_input=True)
        for _ in self.watched(range(30), model, optimizer, scheduler=scheduler):
            for rows in torch.randperm(1200).split(80):
                update(optimizer, loss_fn(model(inputs[rows]).view(-1), counts[rows]))
            scheduler.step()

    @healthy
    def survival_cox(self) -> None:
        """Cox's partial likelihood: a logsumexp over the batch, as it has to be there; Adam on whole batches."""
        x = torch.randn(500, 6)
        risk = x[:, 0] - 0.7 * x[:, 1] + x[:, 2] * x[:, 3]
        time = torch.empty(500).exponential_() / risk.exp()
        seen = torch.rand(500) < 0.7
        net = parts.mlp(6, 24, 1, act=nn.Tanh)
        for _ in self.watched(range(300), net, adamw(net, 0.005)):
            rows = torch.randperm(500)[:200]
            rows = rows[time[rows].argsort(descending=True)]
            guess = net(x[rows])[:, 0]
            self.update(-(guess - guess.logcumsumexp(0))[seen[rows]].mean())

    @healthy
    def exact_line_long_after(self) -> None:
        """A line fitted exactly within a hundred steps, and then trained for seven hundred more at a loss near 0."""
        x = torch.randn(64, 3)
        y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 3
        model = nn.Linear(3, 1)
        self.descend(model, sgd(model, 0.1), range(800), lambda _: F.mse_loss(model(x), y))

    @healthy
    def two_tasks_weighed_by_uncertainty(self) -> None:
        """Two regressions weighed by learnt uncertainties, whose sum falls below 0; a parameter is a scalar."""
        x = torch.rand(1000, 5)
        first, second = x[:, 0] * x[:, 1] * 10, (x[:, 2] * 6).sin() * 0.1
        body = nn.Sequential(*parts.mlp(5, 64, 64), nn.ReLU())
        model = nn.ModuleDict({"body": body, "a": nn.Linear(64, 1), "b": nn.Linear(64, 1)})
        log_var = nn.Parameter(torch.zeros(2))
        model.register_parameter("log_var", log_var)
        for _ in self.watched(range(700), model, adamw(model, 0.002)):
            i = torch.randint(1000, (64,))
            h = body(x[i])
            mse_a = (model["a"](h)[:, 0] - first[i]).pow(2).mean()
            mse_b = (model["b"](h)[:, 0] - second[i]).pow(2).mean()
            self.update(mse_a * (-log_var[0]).exp() + mse_b * (-log_var[1]).exp() + log_var.sum())

    @healthy
    def noisy_labels_smoothed(self) -> None:
        """Three labels in ten are wrong, labels are smoothed: the loss stays high although the model is good."""
        x, y, held_x, held_y = data.table("digits", self.seed)
        noisy = torch.where(torch.rand(len(y)) < 0.3, torch.randint(10, (len(y),)), y)
        net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Dropout(0.5), nn.Linear(48, 10))
        criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        for _ in self.watched(range(15), net, adamw(net, 0.002, weight_decay=0.05)):
            net.train()
            for rows in torch.randperm(len(x)).split(32):
                self.update(criterion(net(x[rows]), noisy[rows]))
            net.eval()
            with torch.no_grad():
                self.watching.validated(criterion(net(held_x), held_y).item())


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.mid = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.out(torch.cat([skip, self.up(self.mid(skip))], 1))


class _LoRA(nn.Module):
    def __init__(self, frozen: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(frozen.in_features, rank) / math.sqrt(frozen.in_features))
        self.b = nn.Parameter(torch.zeros(rank, frozen.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + 2 * (x @ self.a @ self.b)


class _Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x >= 0, 1.0, -1.0)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1)


class HealthyImages(Programs):
    """Healthy programs on images and embeddings: segmentation, detection, contrast, transfer, distillation."""

    @healthy
    def segment_discs_dice(self) -> None:
        """A small U-Net on noisy discs, soft Dice plus cross-entropy, batches of four, both modes in turn."""
        images, masks = data.discs(160)
        model = _UNet()

        def dice(logits: Tensor, target: Tensor) -> Tensor:
            p = logits.sigmoid()
            both = (p * target).sum((1, 2, 3))
            return (1 - (2 * both + 1) / (p.sum((1, 2, 3)) + target.sum((1, 2, 3)) + 1)).mean()

        for _ in self.watched(range(6), model, adam(model, 0.002)):
            model.train()
            for rows in torch.randperm(128).split(4):
                logits = model(images[rows])
                self.update(dice(logits, masks[rows]) + F.binary_cross_entropy_with_logits(logits, masks[rows]))
            model.eval()
            with torch.no_grad():
                self.watching.validated(dice(model(images[128:]), masks[128:]).item())

    @healthy
    def detect_discs(self) -> None:
        """Objectness on a grid plus boxes where there is an object: most cells do not see one of two losses."""
        images, masks = data.discs(300)
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
        for _ in self.watched(range(15), net, adamw(net, 0.004)):
            for i in torch.randperm(300).split(20):
                objectness, size = net(images[i]).flatten(2).unbind(1)
                conf_loss = F.binary_cross_entropy_with_logits(objectness, cells[i], reduction="sum") / len(i)
                holds = cells[i] > 0
                size_loss = F.smooth_l1_loss(size[holds], area[i][:, None].expand(-1, 16)[holds])
                self.update(conf_loss + 5.0 * size_loss)

    @healthy
    def contrast_two_views(self) -> None:
        """SimCLR: cross-entropy over the batch with a temperature, both ways; targets are the rows themselves."""
        images, *_ = data.digit_images(self.seed)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32))
        opt = sgd(net, 0.3, momentum=0.9, weight_decay=0.0001)
        warm = optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=20)
        scheduler = optim.lr_scheduler.SequentialLR(
            opt, [warm, optim.lr_scheduler.CosineAnnealingLR(opt, 230)], milestones=[20]
        )

        def view(x: Tensor) -> Tensor:
            x = torch.roll(x, (int(torch.randint(-1, 2, ())), int(torch.randint(-1, 2, ()))), (2, 3))
            return x * (torch.rand_like(x) > 0.2) + 0.1 * torch.randn_like(x)

        for _ in self.watched(range(250), net, opt, scheduler=scheduler, total_steps=250):
            x = images[torch.randint(len(images), (128,))]
            a, b = F.normalize(net(view(x)), dim=1), F.normalize(net(view(x)), dim=1)
            sim = a @ b.T / 0.2
            same = torch.arange(len(x))
            update(opt, (F.cross_entropy(sim, same) + F.cross_entropy(sim.T, same)) / 2)
            scheduler.step()

    @healthy
    def bootstrap_without_negatives(self) -> None:
        """BYOL: the loss pulls towards a slow copy of the model, which no optimizer holds; the loss may rise."""
        images, *_ = data.digit_images(self.seed)
        online = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32))
        predictor = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32))
        target = copy.deepcopy(online).requires_grad_(False)
        opt = optim.Adam([*online.parameters(), *predictor.parameters()], lr=0.002)
        for _ in self.watched(
            range(300), {"online": online, "predictor": predictor, "target": target}, opt, frozen=("target",)
        ):
            x = images[torch.randint(len(images), (64,))]
            a, b = x + 0.15 * torch.randn_like(x), x * (torch.rand_like(x) > 0.15)
            with torch.no_grad():
                goal = target(b)
            update(opt, 2 - 2 * F.cosine_similarity(predictor(online(a)), goal, dim=-1).mean())
            follow(target, online, 0.02)

    @healthy
    def distil_frozen_teacher(self) -> None:
        """A student learns from a frozen, well-trained teacher by KL at a temperature, in two stages."""
        x, y, *_ = data.digit_images(self.seed)
        teacher = nn.Sequential(nn.Flatten(), *parts.mlp(64, 128, 10))
        fit = adam(teacher, 0.003)
        for _ in range(200):
            i = torch.randint(len(x), (64,))
            update(fit, F.cross_entropy(teacher(x[i]), y[i]))
        teacher.eval()
        student = nn.Sequential(nn.Flatten(), *parts.mlp(64, 16, 10))
        kl = nn.KLDivLoss(reduction="batchmean", log_target=False)
        for a, b in self.watched(data.draws((x, y), 64, 400), student, adam(student, 0.005)):
            with torch.no_grad():
                soft = F.softmax(teacher(a) / 4, dim=1)
            out = student(a)
            self.update(kl(F.log_softmax(out / 4, dim=1), soft) * 16 * 0.7 + F.cross_entropy(out, b) * 0.3)

    @healthy
    def adapters_of_low_rank(self) -> None:
        """Low-rank adapters over frozen layers: one factor starts at 0, so the other has no gradient at first."""
        one, two = nn.Linear(64, 64), nn.Linear(64, 10)
        model = nn.Sequential(nn.Flatten(), _LoRA(one), nn.ReLU(), _LoRA(two))
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = optim.AdamW(trainable, lr=0.005)
        self.fit(model, optimizer, data.draws(data.digit_images(self.seed), 32, 400), F.cross_entropy)

    @healthy
    def fine_tune_thawed_in_stages(self) -> None:
        """Discriminative rates on a network from a neighbouring task; the stem stays frozen."""
        x, y, *_ = data.digit_images(self.seed)
        stem = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        body = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(256, 32), nn.ReLU())
        model = nn.Sequential()
        model.add_module("stem", stem)
        model.add_module("body", body)
        model.add_module("head", nn.Linear(32, 2))
        for goal, steps in ((y % 2, 150), (y, 350)):
            if steps == 150:
                pre = adam(model, 0.003)
                for _ in range(steps):
                    i = torch.randint(len(x), (32,))
                    update(pre, F.cross_entropy(model(x[i]), goal[i]))
                model.head = nn.Linear(32, 10)
                model.stem.requires_grad_(False)
                continue
            groups = [{"params": body.parameters(), "lr": 0.0002}, {"params": model.head.parameters(), "lr": 0.004}]
            optimizer = optim.AdamW(groups)
            with self.watch(model, optimizer, frozen=("stem",)):
                for _ in range(steps):
                    model.train()
                    stem.eval()
                    i = torch.randint(len(x), (32,))
                    update(optimizer, F.cross_entropy(model(x[i]), goal[i]))

    @healthy
    def mixup_soft_targets(self) -> None:
        """Mixup: soft targets by CrossEntropyLoss, a high floor of the loss; Adadelta at rate 1."""
        x, y, *_ = data.digit_images(self.seed)
        net = nn.Sequential(
            nn.Conv2d(1, 16, 3, 1, 1),
            nn.BatchNorm2d(16),
            nn.ELU(),
            nn.Conv2d(16, 32, 3, 2),
            nn.ELU(),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(288, 10),
        )
        opt = optim.Adadelta(net.parameters(), lr=1.0)
        one_hot = F.one_hot(y, 10).float()
        for _ in self.watched(range(300), net, opt):
            i, lam = torch.randint(len(x), (32,)), float(torch.distributions.Beta(0.4, 0.4).sample())
            j = i[torch.randperm(32)]
            update(
                opt,
                nn.CrossEntropyLoss()(net(lam * x[i] + (1 - lam) * x[j]), lam * one_hot[i] + (1 - lam) * one_hot[j]),
            )

    @healthy
    def triplets_until_silent(self) -> None:
        """A triplet loss that many late batches leave at exactly 0, as it should be."""
        x, y, *_ = data.digit_images(self.seed)
        net = nn.Sequential(nn.Flatten(), *parts.mlp(64, 64, 16, act=nn.PReLU))
        criterion = nn.TripletMarginLoss(margin=1.0)
        by_label = [torch.nonzero(y == k)[:, 0] for k in range(10)]
        for _ in self.watched(range(500), net, adam(net, 0.002)):
            kind = torch.randint(10, (16,)).tolist()
            pick = [by_label[k][torch.randint(len(by_label[k]), (2,))] for k in kind]
            other = [by_label[(k + int(torch.randint(1, 10, ()))) % 10] for k in kind]
            stranger = torch.stack([o[int(torch.randint(len(o), ()))] for o in other])
            a, p = torch.stack(pick).unbind(1)
            self.update(criterion(net(x[a]), net(x[p]), net(x[stranger])))

    @healthy
    def binarised_straight_through(self) -> None:
        """Activations are signs; a custom Function passes gradients straight through where they are small."""
        x, y, *_ = data.digit_images(self.seed)
        one, norm, two = nn.Linear(64, 96), nn.BatchNorm1d(96), nn.Linear(96, 10)
        model = nn.ModuleList([one, norm, two])
        optimizer = adam(model, 0.005)

        def forward(batch: Tensor) -> Tensor:
            return two(_Sign.apply(norm(one(batch.flatten(1)))))

        stream = data.draws((x, y), 48, 400)
        self.descend(model, optimizer, stream, lambda a, b: F.multi_margin_loss(forward(a), b))

    @healthy
    def denoise_small_steps(self) -> None:
        """A residual denoiser whose loss falls little, as most of the noise cannot be told from the picture."""
        x, *_ = data.digit_images(self.seed)
        net = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 1, 3, padding=1))
        for _ in self.watched(range(400), net, adamw(net, 0.002, amsgrad=True)):
            clean = x[torch.randint(len(x), (32,))]
            noisy = clean + 0.3 * torch.randn_like(clean)
            self.update(F.l1_loss(noisy - net(noisy), clean))
