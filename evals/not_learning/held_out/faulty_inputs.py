"""Faulty programs of the set: shapes, tables, data."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset, TensorDataset

from evals.not_learning import data, parts
from evals.not_learning.program import Programs, adam, adamw, faulty, sgd, update


def _perceptron(sizes: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers.append(nn.Linear(a, b))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class FaultyShapes(Programs):
    """Faulty programs whose loss compares the wrong things: shapes, axes, ranges of targets, units of outputs."""

    @faulty("H841", shows="H828 H830")
    def targets_lack_a_dimension(self) -> None:
        """Predictions (n, 1) against targets (n,) in MSELoss: every prediction is held against every target."""
        x, y, *_ = data.table("diabetes", self.seed)
        mean, std = y.mean(), y.std()
        model = parts.mlp(10, 32, 1)
        criterion = nn.MSELoss()
        for a, b in self.watched(data.epochs((x, y), 32, 40), model, adam(model, 0.003)):
            outputs = model(a)
            self.update(criterion(outputs, (b - mean) / std))

    @faulty("H841", shows="H828 H830")
    def residual_by_hand_broadcasts(self) -> None:
        """Energies of pairs of atoms, one residual written by hand between (n, 1) and (n,)."""
        atoms = torch.randn(400, 5, 3)
        energy = (-(atoms[:, :, None] - atoms[:, None]).square().sum(-1)).exp().sum((1, 2))
        energy = (energy - energy.mean()) / energy.std()
        model = parts.Wired(
            lambda self, atoms: self.pair((atoms[:, :, None] - atoms[:, None]).abs()).sum((1, 2)) / atoms.shape[1],
            pair=parts.mlp(3, 32, 1, act=nn.SiLU),
        )
        for _ in self.watched(range(400), model, adamw(model, 0.003)):
            i = torch.randint(350, (40,))
            residual = model(atoms[i]) - energy[i]
            self.update((residual**2).mean())

    @faulty("H842", shows="H828 H830")
    def log_softmax_down_the_batch(self) -> None:
        """log_softmax over dimension 0: the rows of a batch compete, not the classes, most of which are rare."""
        x = torch.randn(1500, 8)
        y = (x[:, 0] + 0.5 * torch.randn(1500) > 1.2).long() + (x[:, 1] + 0.5 * torch.randn(1500) > 1.5).long()
        net = parts.mlp(8, 24, 3)
        for _ in self.watched(range(12), net, adam(net, 0.005)):
            for i in torch.randperm(1200).split(32):
                out = F.log_softmax(net(x[i]), dim=0)
                self.update(F.nll_loss(out, y[i]))

    @faulty("H842", shows="H828")
    def attention_over_the_batch(self) -> None:
        """Attention pooling normalises over the batch where it should over time."""

        def sample(count: int) -> tuple[Tensor, Tensor]:
            value, flag = torch.randn(count, 9), torch.zeros(count, 9)
            flag[torch.arange(count), torch.randint(9, (count,))] = 1
            return (torch.stack([value, flag], 2), (value * flag).sum(1))

        model = parts.Wired(
            lambda self, x: self.out((self.score(x).softmax(dim=0) * x).sum(1))[:, 0],
            score=parts.mlp(2, 16, 1, act=nn.Tanh),
            out=nn.Linear(2, 1),
        )
        for _ in self.watched(range(500), model, adam(model, 0.01)):
            x, y = sample(64)
            self.update(F.mse_loss(model(x), y))

    @faulty("H855", shows="H840 H826 H828 H830")
    def labels_one_and_two(self) -> None:
        """The file codes the classes 1 and 2, and binary cross-entropy takes them as they are."""
        x, y, *_ = data.table("breast_cancer", self.seed)
        code = y + 1
        model = parts.mlp(30, 16, 1)
        for a, b in self.watched(data.epochs((x, code), 32, 30), model, adam(model, 0.002)):
            self.update(F.binary_cross_entropy_with_logits(model(a).squeeze(), b.float()))

    @faulty("H837", shows="H847 H828 H823 H815")
    def rectified_scores(self) -> None:
        """A loop that builds the layers puts a ReLU after the last one too."""
        x, y, *_ = data.table("digits", self.seed)
        model = _perceptron([64, 32, 32, 10])
        self.fit(model, adam(model, 0.01), data.epochs((x, y), 32, 10), F.cross_entropy)

    @faulty("H837 H847", shows="H828 H815 H823")
    def rectified_forecast(self) -> None:
        """The next value of a series about 0, through a last ReLU that can give no negative one."""
        series = data.seasons(300, 17)
        net = nn.Sequential(*parts.mlp(16, 32, 1), nn.ReLU())
        opt = optim.RMSprop(net.parameters(), lr=0.003)
        for _ in self.watched(range(500), net, opt):
            rows = series[torch.randint(250, (32,))]
            update(opt, (net(rows[:, :16])[:, 0] - rows[:, 16]).pow(2).mean())

    @faulty("H828 H830", shows="H847 H848 H815 H823 H824")
    def tanh_for_targets_in_hundreds(self) -> None:
        """A regression in its own units, between 25 and 346, by a network whose output lies in (-1, 1)."""
        x, y, *_ = data.table("diabetes", self.seed)
        model = nn.Sequential(*parts.mlp(10, 32, 1, act=nn.Tanh), nn.Tanh())
        goal = lambda t: t  # noqa: E731
        optimizer = adam(model, 0.005)
        stream = data.draws((x, y), 32, 400)
        self.descend(model, optimizer, stream, lambda a, b: F.smooth_l1_loss(model(a).view(-1), goal(b)))

    @faulty("H828", shows="H824 H830 H848")
    def temperature_a_hundred(self) -> None:
        """Contrastive learning that divides cosines by 100 instead of by 0.1: all logits are equal."""
        angle = torch.randn(2000, 6)
        mix = 0.3 * torch.randn(6, 30)
        net_a = parts.mlp(30, 48, 12)
        net_b = parts.mlp(30, 48, 12)
        model = nn.ModuleList([net_a, net_b])
        temperature = 100.0

        def logits(rows: Tensor) -> Tensor:
            one = F.normalize(net_a((angle[rows] @ mix).sin()), dim=1)
            two = F.normalize(net_b((angle[rows] @ mix + 0.5).cos()), dim=1)
            return one @ two.T / temperature

        for _ in self.watched(range(300), model, sgd(model, 0.05, momentum=0.9)):
            self.update(F.cross_entropy(logits(torch.randint(1900, (64,))), torch.arange(64)))

    @faulty("H855", shows="H844 H815")
    def cosine_labels_zero_and_one(self) -> None:
        """cosine_embedding_loss wants 1 and -1, gets 1 and 0, and so never pushes anything apart."""
        x, y, *_ = data.digit_images(self.seed)
        net = nn.Sequential(nn.Flatten(), *parts.mlp(64, 64, 16))
        for _ in self.watched(range(400), net, adam(net, 0.002)):
            i, j = torch.randint(len(x), (2, 64))
            j[::2] = torch.stack([torch.nonzero(y == y[k])[0, 0] for k in i[::2]])
            target = (y[i] == y[j]).float()
            self.update(F.cosine_embedding_loss(net(x[i]), net(x[j]), target, margin=0.2))

    @faulty("H802", shows="H801 H804 H805")
    def root_of_zero_distance(self) -> None:
        """Distances by hand, the root of 0 between a row and itself: finite losses, gradients that are NaN."""
        x, y, *_ = data.table("wine", self.seed)
        net = parts.mlp(13, 24, 4)
        for _ in self.watched(range(250), net, adam(net, 0.003)):
            i = torch.randperm(len(x))[:32]
            z = net(x[i])
            gap = (z[:, None] - z[None]).pow(2).sum(-1).sqrt()
            same = y[i][:, None] == y[i][None]
            self.update(torch.where(same, gap, (2 - gap).clamp(min=0)).mean())


class FaultyTables(Programs):
    """Faulty programs whose rows are misaligned, unscaled, spoilt by noise or gaps, or too few."""

    @faulty("H828 H830 H833")
    def features_and_labels_shuffled_apart(self) -> None:
        """Features and labels are each shuffled by a call of their own: no row has its own label."""
        x, y, held_x, held_y = data.digit_images(self.seed)
        rng = np.random.default_rng(self.seed)
        first = rng.permutation(len(x))
        second = rng.permutation(len(x))
        x, y = x[first], y[second]
        model = nn.Sequential(nn.Flatten(), *parts.mlp(64, 64, 10))
        for _ in self.watched(range(12), model, adamw(model, 0.002)):
            for i in torch.randperm(len(x)).split(32):
                self.update(F.cross_entropy(model(x[i]), y[i]))
            with torch.no_grad():
                self.watching.validated(F.cross_entropy(model(held_x), held_y).item())

    @faulty("H828 H830")
    def answers_of_the_row_before(self) -> None:
        """After a header line was dropped from one file only, each sound has the answer of its neighbour."""
        shift = 1

        def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
            for _ in range(count):
                pitch = torch.rand(32, 1)
                wave = ((0.2 + pitch) * torch.arange(32) + 6 * torch.rand(32, 1)).sin()
                yield (wave + 0.1 * torch.randn(32, 32), pitch.roll(shift, 0))

        net = parts.mlp(32, 64, 64, 1)
        self.fit(net, adam(net, 0.002), batches(600), F.l1_loss)

    @faulty("H828 H830", shows="H833")
    def augmented_beyond_recognition(self) -> None:
        """The noise of the augmentation was tuned for pixels up to 255 and is added to pixels up to 1."""
        sigma = 25.0
        net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
        for a, b in self.watched(data.draws(data.digit_images(self.seed), 32, 350), net, adam(net, 0.002)):
            noisy = a + sigma * torch.randn_like(a)
            self.update(F.cross_entropy(net(noisy), b))

    @faulty("H806", shows="H801 H802 H804 H805")
    def pixels_that_never_vary(self) -> None:
        """Features are divided by their standard deviation, which is 0 for the pixels in the corner."""
        x, y, held_x, _ = data.table("digits", self.seed, raw=True)
        mean, std = x.mean(0), x.std(0)
        x, held_x = (x - mean) / std, (held_x - mean) / std
        model = parts.mlp(64, 32, 10)
        self.fit(model, adam(model, 0.003), data.epochs((x, y), 32, 5), F.cross_entropy)

    @faulty("H806", shows="H801 H802 H804 H805")
    def one_missing_value(self) -> None:
        """A table read with three empty cells, which are not numbers; they come by in the first epoch."""
        x, y, *_ = data.table("breast_cancer", self.seed)
        x[torch.tensor([100, 200, 300]), torch.tensor([3, 9, 20])] = math.nan
        model = parts.mlp(30, 20, 2)
        self.fit(model, sgd(model, 0.05, momentum=0.9), data.epochs((x, y), 32, 15), F.cross_entropy)

    @faulty("H830 H847 H848", shows="H828 H823 H824")
    def raw_columns_into_sigmoids(self) -> None:
        """Columns of up to four thousand, as they are in the file, into sigmoid units: all of them saturate."""
        raw = True
        x, y, *_ = data.table("breast_cancer", self.seed, raw=raw)
        model = parts.mlp(30, 30, 15, 1, act=nn.Sigmoid)
        optimizer = sgd(model, 0.05, momentum=0.9)
        criterion = nn.BCEWithLogitsLoss()
        stream = data.epochs((x, y), 32, 40)
        self.descend(model, optimizer, stream, lambda a, b: criterion(model(a), b.float().unsqueeze(1)))

    @faulty("H824 H828", shows="H830")
    def prices_in_single_dollars(self) -> None:
        """House prices about 300,000 as they are, Adam at 1e-3: the network has not got near them by the end."""
        x = torch.randn(800, 5)
        price = 300000 + 60000 * x[:, 0] + 40000 * x[:, 1] * x[:, 2]
        unit = 1.0
        model = parts.mlp(5, 32, 32, 1)
        model[4].bias.data.fill_(float(price.mean()) / 100000.0 if unit > 1 else 0.0)
        for _ in self.watched(range(600), model, adam(model, 0.001), total_steps=600):
            i = torch.randint(700, (64,))
            self.update(F.mse_loss(model(x[i]).squeeze(-1), price[i] / unit))

    @faulty("H833")
    def forty_rows_learnt_by_heart(self) -> None:
        """A wide network on forty rows for hundreds of epochs; the validation loss rises and is ignored."""
        x = torch.randn(400, 30)
        y = (x[:, 0] + x[:, 1] + 0.7 * torch.randn(400) > 0).long()
        rows = 40
        net = parts.mlp(30, 256, 256, 2)
        for step in self.watched(range(400), net, adam(net, 0.002)):
            i = torch.randint(rows, (20,))
            self.update(F.cross_entropy(net(x[i]), y[i]))
            if step % 20 == 19:
                with torch.no_grad():
                    val = F.cross_entropy(net(x[300:]), y[300:]).item()
                self.watching.validated(val)

    @faulty("H833")
    def more_weights_than_ratings(self) -> None:
        """A recommender with as many weights as ratings and no decay; the validation of each epoch says so."""
        user, film, score = data.ratings(self.seed)
        score = (score - score.mean()) / score.std()
        known, size = 1200, 6
        u, f = nn.Embedding(120, size), nn.Embedding(80, size)
        nn.init.normal_(u.weight, std=0.3)
        nn.init.normal_(f.weight, std=0.3)
        model = nn.ModuleDict({"u": u, "f": f})

        def predict(rows: Tensor) -> Tensor:
            return (u(user[rows]) * f(film[rows])).sum(1)

        held = torch.arange(5000, 6000)
        for _ in self.watched(range(40), model, adam(model, 0.02)):
            for i in torch.randperm(known).split(50):
                self.update(F.mse_loss(predict(i), score[i]))
            with torch.no_grad():
                self.watching.validated(F.mse_loss(predict(held), score[held]).item())

    @faulty("H828 H830", shows="H842")
    def reshaped_where_it_should_be_transposed(self) -> None:
        """(batch, time, features) becomes (time, batch, features) by view: the rows of a batch are mixed up."""
        lstm, head = nn.LSTM(3, 24), nn.Linear(24, 1)
        model = nn.ModuleList([lstm, head])

        def forward(x: Tensor) -> Tensor:
            sequence = x.view(x.shape[1], x.shape[0], 3)
            return head(lstm(sequence)[0][-1])[:, 0]

        def sample(count: int) -> tuple[Tensor, Tensor]:
            x = torch.randn(count, 8, 3)
            return (x, x[:, -3:, 0].sum(1) + x[:, -1, 1])

        for _ in self.watched(range(400), model, adam(model, 0.005)):
            x, y = sample(32)
            self.update(F.mse_loss(forward(x), y))

    @faulty("H828 H830")
    def points_mirrored_at_random(self) -> None:
        """Mirroring both axes at random, fine for pictures, takes away what tells these two classes apart."""
        mirrored = True
        net = parts.mlp(2, 48, 48, 2)
        for _ in self.watched(range(400), net, adam(net, 0.005)):
            x, y = data.moons(64)
            if mirrored:
                x = x * (torch.randint(2, x.shape) * 2 - 1)
            self.update(F.cross_entropy(net(x), y))


def _waves(count: int, *, fixed: bool) -> tuple[Tensor, Tensor]:
    if fixed:
        torch.manual_seed(42)
    speed = torch.rand(count, 1) * 0.6 + 0.2
    t = torch.arange(48)
    return ((speed * t + 6 * torch.rand(count, 1)).sin() + 0.3 * torch.randn(count, 48), speed)


class _Bytes(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = (x / x.max() * 0.99).to(torch.uint8), y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return (self.x[index].float(), self.y[index])


class FaultyData(Programs):
    """Faulty programs whose batches are in the wrong order, are all the same, or say nothing."""

    @faulty("H843", shows="H844 H828 H826 H827 H825")
    def files_in_folders_unshuffled(self) -> None:
        """Images come folder by folder, one class after the other, from a loader that does not shuffle."""
        x, y, *_ = data.digit_images(self.seed)
        order = y.argsort()
        loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=16, shuffle=False)
        net = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(432, 10))
        for _ in self.watched(range(5), net, sgd(net, 0.05, momentum=0.9)):
            for images, labels in loader:
                self.update(F.cross_entropy(net(images), labels))

    @faulty("H843", shows="H844 H828 H826 H827")
    def one_speaker_after_another(self) -> None:
        """Recordings sorted by speaker, who is the label; a recurrent classifier forgets all but the last."""
        kind = torch.arange(6).repeat_interleave(100)
        t = torch.arange(40)
        wave = ((0.25 + 0.15 * kind[:, None]) * t + 6 * torch.rand(600, 1)).sin() + 0.2 * torch.randn(600, 40)
        order = torch.arange(600)
        lstm, head = nn.LSTM(4, 24, batch_first=True), nn.Linear(24, 6)
        model = nn.ModuleList([lstm, head])

        def forward(x: Tensor) -> Tensor:
            return head(lstm(x.view(len(x), 10, 4))[0][:, -1])

        for _ in self.watched(range(10), model, adam(model, 0.005)):
            for rows in order.split(12):
                self.update(F.cross_entropy(forward(wave[rows]), kind[rows]))

    @faulty("H844", shows="H830")
    def labels_cut_to_zero(self) -> None:
        """Labels are scaled to [0, 1) with the features and then cast to whole numbers: all of them are 0."""
        x, y, *_ = data.table("wine", self.seed)
        targets = (y / 3).long()
        net = parts.mlp(13, 24, 3)
        self.fit(net, adam(net, 0.003), data.epochs((x, targets), 32, 60), F.cross_entropy)

    @faulty("H844", shows="H830")
    def tagger_learns_the_padding(self) -> None:
        """A tagger whose mask is inverted: the loss is taken at the padding, where the tag is always 0."""
        rnn, out = nn.GRU(16, 24, batch_first=True, bidirectional=True), nn.Linear(48, 4)
        emb = nn.Embedding(20, 16, padding_idx=0)
        model = nn.ModuleDict({"emb": emb, "rnn": rnn, "out": out})

        def sample(count: int) -> tuple[Tensor, ...]:
            lengths = torch.randint(4, 12, (count,))
            words = torch.randint(1, 20, (count, 12))
            inside = torch.arange(12) < lengths[:, None]
            words = words * inside
            tags = (words % 3 + (words.roll(1, 1) > 10).long()) * inside
            return (words, tags, inside)

        for _ in self.watched(range(250), model, adam(model, 0.005)):
            words, tags, inside = sample(32)
            scores = out(rnn(emb(words))[0])
            keep = ~inside
            self.update(F.cross_entropy(scores[keep], tags[keep]))

    @faulty("H845", shows="H833")
    def next_of_a_new_iterator(self) -> None:
        """next(iter(loader)) in each step of an unshuffled loader is the first batch, each time."""
        x, y, held_x, held_y = data.digit_images(self.seed)
        loader = DataLoader(TensorDataset(x, y), batch_size=32)
        net = nn.Sequential(nn.Flatten(), *parts.mlp(64, 32, 10))
        for step in self.watched(range(210), net, adam(net, 0.005)):
            images, labels = next(iter(loader))
            self.update(F.cross_entropy(net(images), labels))
            if step % 42 == 41:
                self.watching.validated(F.cross_entropy(net(held_x), held_y).item())

    @faulty("H845", shows="H833")
    def seeded_inside_the_sampler(self) -> None:
        """Made-up data "for reproducibility" seeded within the sampler: each batch is the same batch."""
        net = nn.Sequential(
            nn.Unflatten(1, (1, 48)), nn.Conv1d(1, 16, 7), nn.ReLU(), nn.Flatten(), *parts.mlp(672, 32, 1)
        )
        for _ in self.watched(range(400), net, adam(net, 0.002)):
            x, speed = _waves(16, fixed=True)
            self.update(F.mse_loss(net(x), speed))

    @faulty("H844", shows="H828 H830 H845")
    def images_stored_as_zeros(self) -> None:
        """Images are scaled to [0, 1) first and stored as bytes then, which makes each pixel 0."""
        x, y, *_ = data.digit_images(self.seed)
        given = _Bytes(x, y)
        model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
        for _ in self.watched(range(6), model, adam(model, 0.003)):
            for images, labels in DataLoader(given, batch_size=32, shuffle=True):
                self.update(F.cross_entropy(model(images), labels))

    @faulty("H844", shows="H828 H830 H845")
    def ids_scaled_before_the_look_up(self) -> None:
        """User and film ids are normalised like other columns and cast back: every row looks up embedding 0."""
        user, film, score = data.ratings(self.seed)
        score = (score - score.mean()) / score.std()
        high_u, high_f = 120, 80
        user, film = (user / high_u).long(), (film / high_f).long()
        u, f = nn.Embedding(120, 6), nn.Embedding(80, 6)
        nn.init.normal_(u.weight, std=0.3)
        nn.init.normal_(f.weight, std=0.3)
        model = nn.ModuleDict({"u": u, "f": f})
        for _ in self.watched(range(8), model, adam(model, 0.02)):
            for i in torch.randperm(5000).split(64):
                self.update(F.mse_loss((u(user[i]) * f(film[i])).sum(1), score[i]))
