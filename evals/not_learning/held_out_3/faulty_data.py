"""Faults in data, labels, preprocessing, augmentation and sampling."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from evals.not_learning import data, parts
from evals.not_learning.held_out_3 import shared
from evals.not_learning.program import adam, adamw, faulty, sgd, update


class FaultyData(shared.Twins):
    """Something is wrong with what the network is given."""

    @faulty("", shows="H828")  # accuracy: 0.95 without the fault, 0.20 with it
    def digits_filtered_without_labels(self) -> None:
        """Incomplete rows are dropped from the inputs and not from the labels, which no longer
        belong to them.
        """
        x, y, held_x, held_y = data.digits(self.seed)
        kept = torch.rand(len(x)) > 0.04
        x, y = x[kept], y[: kept.sum()] if self.broken else y[kept]
        model = parts.mlp(64, 64, 10)
        self.fit(model, adam(model, 0.002), data.batches((x, y), 32, 500), F.cross_entropy)
        self.score = shared.accuracy(model, held_x, held_y)

    @faulty("")  # accuracy: 0.97 without the fault, 0.18 with it
    def digits_shards_encoded_apart(self) -> None:
        """Each file's class names are turned into numbers in the order in which that file shows
        them.
        """
        x, y, held_x, held_y = data.digits(self.seed)

        def encoded(names: torch.Tensor, order: list[int]) -> torch.Tensor:
            return torch.tensor([order.index(name) for name in names.tolist()])

        orders = [list(dict.fromkeys(part.tolist())) for part in y.split(200)]
        y = torch.cat(
            [encoded(p, orders[i if self.broken else 0]) for i, p in enumerate(y.split(200))]
        )
        model = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 10))
        self.fit(model, adamw(model, 0.003), data.epochs((x, y), 50, 15), F.cross_entropy)
        self.score = shared.accuracy(model, held_x, encoded(held_y, orders[0]))

    @faulty("", shows="H828")  # accuracy: 1.00 without the fault, 0.52 with it
    def arrows_flipped(self) -> None:
        """Images are flipped at random, though the class is the direction in which the arrow
        points.
        """
        x, y = shared.arrows(1200)
        model = nn.Sequential(
            parts.conv_block(1, 12),
            nn.MaxPool2d(2),
            parts.conv_block(12, 16),
            nn.Flatten(),
            nn.Linear(16 * 25, 2),
        )
        optimizer = sgd(model, 0.05, momentum=0.9)
        for a, b in self.watched(data.epochs((x[:800], y[:800]), 32, 8), model, optimizer):
            turned = (
                torch.rand(len(a)) < 0.5 if self.broken else torch.zeros(len(a), dtype=torch.bool)
            )
            self.update(
                F.cross_entropy(model(torch.where(turned[:, None, None, None], a.flip(3), a)), b)
            )
        self.score = shared.accuracy(model, x[800:], y[800:])

    @faulty("")  # squared error: 0.033 without the fault, 0.079 with it
    def denoiser_noise_drawn_once(self) -> None:
        """The noise to be removed is drawn once, before the loop, and is the same in every
        batch.
        """
        x, _, held_x, _ = data.digits(self.seed)
        model = parts.mlp(64, 128, 128, 64)
        noise = 0.5 * torch.randn(64, 64)
        optimizer = adam(model, 0.002)
        for a, _ in self.watched(data.batches((x, x), 64, 500), model, optimizer):
            self.update(
                F.mse_loss(model(a + (noise if self.broken else 0.5 * torch.randn_like(a))), a)
            )
        found = shared.outputs(model, held_x + 0.5 * torch.randn_like(held_x))
        self.score = -F.mse_loss(found, held_x).item()

    @faulty("")  # IoU: 0.87 without the fault, 0.34 with it
    def discs_shifted_without_masks(self) -> None:
        """The random shift moves the image and leaves its mask where it was."""
        model = nn.Sequential(
            parts.conv_block(1, 16), parts.conv_block(16, 16), nn.Conv2d(16, 1, 3, padding=1)
        )
        x, mask = data.discs(600)
        held_x, held = data.discs(200)
        optimizer = adam(model, 0.005)
        for a, b in self.watched(data.batches((x, mask), 32, 150), model, optimizer):
            shift = torch.randint(-5, 6, (2,)).tolist()
            moved = b if self.broken else b.roll(shift, (2, 3))
            self.update(F.binary_cross_entropy_with_logits(model(a.roll(shift, (2, 3))), moved))
        self.score = shared.overlap(shared.outputs(model, held_x) > 0, held > 0.5)

    @faulty("", shows="H828")  # accuracy: 1.00 without the fault, 0.32 with it
    def sentences_of_unknown_words(self) -> None:
        """The vocabulary is lower case and the text is not, so that the words that matter are
        all unknown.
        """
        names = ["Hund", "Katze", "Maus", *(f"wort{i}" for i in range(60))]
        place = {name.lower(): i + 1 for i, name in enumerate(names)}
        said, y = torch.randint(3, len(names), (1500, 12)), torch.randint(3, (1500,))
        said[:, 4] = y
        texts = [[names[i] for i in row] for row in said.tolist()]
        x = torch.tensor(
            [[place.get(w if self.broken else w.lower(), 0) for w in text] for text in texts]
        )
        model = nn.Sequential(nn.EmbeddingBag(len(names) + 1, 24), nn.Linear(24, 3))
        self.fit(
            model, adam(model, 0.01), data.batches((x[:1000], y[:1000]), 32, 400), F.cross_entropy
        )
        self.score = shared.accuracy(model, x[1000:], y[1000:])

    @faulty("")  # R2: 0.88 without the fault, -0.11 with it
    def friedman_with_its_target(self) -> None:
        """A column that is computed from the target, and unknown when the model is used, is
        among the inputs.
        """
        x, y = data.friedman(1500)
        x = torch.cat([x, (y[:, None] * 3 + 1) if self.broken else torch.zeros(len(x), 1)], 1)
        model = parts.mlp(11, 48, 48, 1)
        self.fit(
            model, adam(model, 0.003), data.batches((x[:1000], y[:1000, None]), 50, 500), F.mse_loss
        )
        used = x[1000:].clone()
        used[:, -1] = 0
        self.score = shared.r2(shared.outputs(model, used), y[1000:])

    @faulty("", shows="H828")  # accuracy: 0.95 without the fault, 0.35 with it
    def series_each_standardised(self) -> None:
        """Every series is standardised by itself, though the class is how strong it swings."""
        y = torch.randint(3, (1200,))
        x = data.seasons(1200, 40) * (0.6 + 0.4 * y[:, None] + 0.1 * torch.randn(1200, 1))
        x = (
            (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
            if self.broken
            else (x - x.mean()) / x.std()
        )
        model = nn.Sequential(
            nn.Conv1d(1, 16, 5),
            nn.ReLU(),
            nn.Conv1d(16, 16, 5, 2),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
            nn.Linear(64, 3),
        )
        self.fit(
            model,
            adam(model, 0.003),
            data.batches((x[:900, None], y[:900]), 32, 400),
            F.cross_entropy,
        )
        self.score = shared.accuracy(model, x[900:, None], y[900:])

    @faulty("")  # accuracy: 0.99 without the fault, 0.83 with it
    def blobs_sampled_by_class_weights(self) -> None:
        """The weighted sampler is given a weight per class, not per sample, so only the first
        few samples occur.
        """
        x, y = data.blobs(self.seed, 2400)
        keep = (y > 1) | (torch.rand(len(y)) < 0.3)
        x, y = x[keep], y[keep]
        held_x, held_y, x, y = x[1200:], y[1200:], x[:1200], y[:1200]
        weight = 1 / y.bincount().float()
        sampler = WeightedRandomSampler((weight if self.broken else weight[y]).tolist(), len(y))
        model = parts.mlp(20, 64, 5)
        loader = DataLoader(TensorDataset(x, y), 32, sampler=sampler)
        self.fit(model, adam(model, 0.002), data.endless(loader, 400), F.cross_entropy)
        self.score = shared.accuracy(model, held_x, held_y)

    @faulty("")  # accuracy: 0.97 without the fault, 0.90 with it
    def digits_same_batches_each_epoch(self) -> None:
        """Each short epoch begins by seeding the generator, so that it draws the same five
        batches again.
        """
        x, y, held_x, held_y = data.digits(self.seed)
        model = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), parts.small_cnn())
        optimizer = adam(model, 0.003)
        for step in self.watched(range(200), model, optimizer):
            if step % 5 == 0:
                if self.broken:
                    torch.manual_seed(self.seed)
                order = torch.randperm(len(x))
            at = order[step % 5 * 16 :][:16]
            self.update(F.cross_entropy(model(x[at]), y[at]))
        self.score = shared.accuracy(model, held_x, held_y)

    @faulty("", shows="H828")  # cross-entropy: 0.19 without the fault, 1.75 with it
    def digits_mixed_the_other_way(self) -> None:
        """Mixup weighs the inputs by a share and their labels by one minus that share."""
        x, y, held_x, held_y = data.digits(self.seed)
        model = parts.mlp(64, 96, 10)
        optimizer = adamw(model, 0.003)
        for a, b in self.watched(data.batches((x, y), 64, 400), model, optimizer):
            share, other = (
                torch.distributions.Beta(0.2, 0.2).sample().item(),
                torch.randperm(len(a)),
            )
            share = max(share, 1 - share)
            found = model(share * a + (1 - share) * a[other])
            of = 1 - share if self.broken else share
            self.update(
                of * F.cross_entropy(found, b) + (1 - of) * F.cross_entropy(found, b[other])
            )
        self.score = -F.cross_entropy(shared.outputs(model, held_x), held_y).item()

    @faulty("")  # accuracy: 0.97 without the fault, 0.09 with it
    def digits_augmented_in_place(self) -> None:
        """Noise is added in place to slices of the data set itself, which drowns in it epoch by
        epoch.
        """
        x, y, held_x, held_y = (part.clone() for part in data.digits(self.seed))
        model = parts.mlp(64, 64, 10)
        optimizer = sgd(model, 0.1, momentum=0.9)
        for at in self.watched(((torch.randperm(28) * 50).tolist())[:28] * 30, model, optimizer):
            a = x[at : at + 50] if self.broken else x[at : at + 50].clone()
            a += 0.4 * torch.randn_like(a)
            self.update(F.cross_entropy(model(a), y[at : at + 50]))
        self.score = shared.accuracy(model, held_x, held_y)

    @faulty("")  # accuracy: 1.00 without the fault, 0.51 with it
    def graph_edges_counted_from_one(self) -> None:
        """The file of edges counts nodes from one and the tables of features and labels from
        zero.
        """
        edges, x, y = shared.graph()
        a = shared.adjacency((edges + 1) % 200 if self.broken else edges, 200)
        first, second = nn.Linear(16, 24), nn.Linear(24, 3)
        model = parts.Wired(
            lambda m, h: m.b(a @ F.dropout(F.relu(m.a(a @ h)), 0.3, m.training)), a=first, b=second
        )
        known = torch.rand(200) < 0.3
        self.descend(
            model,
            adam(model, 0.01, weight_decay=5e-4),
            [()] * 150,
            lambda: F.cross_entropy(model(x)[known], y[known]),
        )
        self.score = (shared.outputs(model, x).argmax(1) == y)[~known].float().mean().item()

    @faulty("")  # mean error: 0.041 without the fault, 0.096 with it
    def boxes_of_two_conventions(self) -> None:
        """Half of the boxes are two corners, the other half, from another tool, a corner and a
        size.
        """
        (x, y), (held_x, held_y) = shared.boxes(1200), shared.boxes(300)
        if self.broken:
            y[600:, 2:] -= y[600:, :2]
        model = parts.mlp(144, 96, 4)
        self.fit(model, adam(model, 0.002), data.batches((x, y), 32, 600), F.smooth_l1_loss)
        self.score = -(shared.outputs(model, held_x) - held_y).abs().mean().item()

    @faulty("")  # mean error: 0.103 without the fault, 0.44 with it
    def angles_in_degrees(self) -> None:
        """A direction is regressed in degrees, so that 359 and 1 are as far apart as can be."""
        turn = 2 * torch.pi * torch.rand(1500)
        x = torch.stack([turn.cos(), turn.sin()], 1) @ torch.randn(2, 8) + 0.3 * torch.randn(
            1500, 8
        )
        y = (
            turn.rad2deg()[:, None] / 180 - 1
            if self.broken
            else torch.stack([turn.cos(), turn.sin()], 1)
        )
        model = parts.mlp(8, 32, y.shape[1])
        self.fit(model, adam(model, 0.003), data.batches((x[:1000], y[:1000]), 50, 500), F.mse_loss)
        found = shared.outputs(model, x[1000:])
        found = (
            (found[:, 0] + 1) * torch.pi if self.broken else torch.atan2(found[:, 1], found[:, 0])
        )
        self.score = (
            -(torch.atan2((found - turn[1000:]).sin(), (found - turn[1000:]).cos()))
            .abs()
            .mean()
            .item()
        )

    @faulty("", shows="H828")  # accuracy: 0.95 without the fault, 0.10 with it
    def teacher_cached_by_batch_number(self) -> None:
        """What the teacher said is cached by the number of the batch, and the next epoch
        shuffles anew.
        """
        x, y, held_x, held_y = data.digits(self.seed)
        teacher, model = parts.mlp(64, 128, 10), parts.mlp(64, 32, 10)
        warm = adam(teacher, 0.003)
        for a, b in data.batches((x, y), 64, 300):
            update(warm, F.cross_entropy(teacher(a), b))
        cache: dict[int, torch.Tensor] = {}
        optimizer = adam(model, 0.003)
        parts_of = (part for _ in range(20) for part in enumerate(torch.randperm(1400).split(50)))
        for number, at in self.watched(parts_of, model, optimizer):
            if not self.broken or number not in cache:
                cache[number] = shared.outputs(teacher, x[at]).softmax(1)
            self.update(F.cross_entropy(model(x[at]), cache[number]))
        self.score = shared.accuracy(model, held_x, held_y)
