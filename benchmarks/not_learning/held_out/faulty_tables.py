"""Faulty programs whose rows are misaligned, unscaled, spoilt by noise or gaps, or too few."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.not_learning.held_out.data import digits, moons, ratings, table
from benchmarks.not_learning.held_out.entry import error_score, faulty, squared_score
from benchmarks.not_learning.program import Watch


def features_and_labels_shuffled_apart(watch: Watch, seed: int) -> float:
    """Features and labels are each shuffled by a call of their own: no row has its own label."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    rng = np.random.default_rng(seed)
    first = rng.permutation(len(x))
    second = rng.permutation(len(x))
    x, y = x[first], y[second]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with watch(model, optimizer) as watching:
        for _ in range(12):
            for i in torch.randperm(len(x)).split(32):
                loss = F.cross_entropy(model(x[i]), y[i])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                watching.validated(F.cross_entropy(model(held_x), held_y).item())
    return error_score(model(held_x), held_y)


def answers_of_the_row_before(watch: Watch, seed: int) -> float:
    """After a header line was dropped from one file only, each sound has the answer of its neighbour."""
    torch.manual_seed(seed)
    shift = 1

    def batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for _ in range(count):
            pitch = torch.rand(32, 1)
            wave = ((0.2 + pitch) * torch.arange(32) + 6 * torch.rand(32, 1)).sin()
            yield wave + 0.1 * torch.randn(32, 32), pitch.roll(shift, 0)

    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    with watch(net, opt):
        for wave, pitch in batches(600):
            loss = F.l1_loss(net(wave), pitch)
            opt.zero_grad()
            loss.backward()
            opt.step()
    pitch = torch.rand(300, 1)
    wave = ((0.2 + pitch) * torch.arange(32) + 6 * torch.rand(300, 1)).sin() + 0.1 * torch.randn(300, 32)
    return squared_score(net(wave), pitch)


def augmented_beyond_recognition(watch: Watch, seed: int) -> float:
    """The noise of the augmentation was tuned for pixels up to 255 and is added to pixels up to 1."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    sigma = 25.0
    net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    with watch(net, opt):
        for _ in range(350):
            i = torch.randint(len(x), (32,))
            noisy = x[i] + sigma * torch.randn_like(x[i])
            loss = F.cross_entropy(net(noisy), y[i])
            opt.zero_grad()
            loss.backward()
            opt.step()
    net.eval()
    return error_score(net(held_x), held_y)


def pixels_that_never_vary(watch: Watch, seed: int) -> float:
    """Features are divided by their standard deviation, which is 0 for the pixels in the corner."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("digits", seed, raw=True)
    mean, std = x.mean(0), x.std(0)
    x, held_x = (x - mean) / std, (held_x - mean) / std
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for _ in range(5):
            for i in torch.randperm(len(x)).split(32):
                loss = F.cross_entropy(model(x[i]), y[i])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return error_score(model(held_x), held_y) if model[0].weight.isfinite().all() else math.nan


def one_missing_value(watch: Watch, seed: int) -> float:
    """A table read with three empty cells, which are not numbers; they come by in the first epoch."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("breast_cancer", seed)
    x[torch.tensor([100, 200, 300]), torch.tensor([3, 9, 20])] = math.nan
    model = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # read
    with watch(model, optimizer):
        for _ in range(15):
            for i in torch.randperm(len(x)).split(32):
                loss = F.cross_entropy(model(x[i]), y[i])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return error_score(model(held_x), held_y) if model[0].weight.isfinite().all() else math.nan


def raw_columns_into_sigmoids(watch: Watch, seed: int) -> float:
    """Columns of up to four thousand, as they are in the file, into sigmoid units: all of them saturate."""
    torch.manual_seed(seed)
    raw = True
    x, y, held_x, held_y = table("breast_cancer", seed, raw=raw)
    model = nn.Sequential(nn.Linear(30, 30), nn.Sigmoid(), nn.Linear(30, 15), nn.Sigmoid(), nn.Linear(15, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.BCEWithLogitsLoss()
    with watch(model, optimizer):
        for _ in range(40):
            for i in torch.randperm(len(x)).split(32):
                optimizer.zero_grad()
                criterion(model(x[i]), y[i].float().unsqueeze(1)).backward()
                optimizer.step()
    out = model(held_x)
    return error_score(torch.cat([-out, out], 1), held_y)


def prices_in_single_dollars(watch: Watch, seed: int) -> float:
    """House prices about 300,000 as they are, Adam at 1e-3: the network has not got near them by the end."""
    torch.manual_seed(seed)
    x = torch.randn(800, 5)
    price = 300_000 + 60_000 * x[:, 0] + 40_000 * x[:, 1] * x[:, 2]
    unit = 1.0
    model = nn.Sequential(nn.Linear(5, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    model[4].bias.data.fill_(float(price.mean()) / 1e5 if unit > 1 else 0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer, total_steps=600):
        for _ in range(600):
            i = torch.randint(700, (64,))
            loss = nn.functional.mse_loss(model(x[i]).squeeze(-1), price[i] / unit)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return squared_score(model(x[700:]).squeeze(-1) * unit, price[700:])


def forty_rows_learnt_by_heart(watch: Watch, seed: int) -> float:
    """A wide network on forty rows for hundreds of epochs; validation loss rises from the start and is ignored."""
    torch.manual_seed(seed)
    x = torch.randn(400, 30)
    y = ((x[:, 0] + x[:, 1] + 0.7 * torch.randn(400)) > 0).long()
    rows = 40
    net = nn.Sequential(nn.Linear(30, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 2))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    with watch(net, opt) as watching:
        for step in range(400):
            i = torch.randint(rows, (20,))
            loss = F.cross_entropy(net(x[i]), y[i])
            opt.zero_grad()
            loss.backward()
            opt.step()
            if step % 20 == 19:
                with torch.no_grad():
                    val = F.cross_entropy(net(x[300:]), y[300:]).item()
                watching.validated(val)
            # next step
    return F.cross_entropy(net(x[300:]), y[300:]).item() / math.log(2)


def more_weights_than_ratings(watch: Watch, seed: int) -> float:
    """A recommender with as many weights as ratings and no decay; the validation of each epoch says so."""
    torch.manual_seed(seed)
    user, film, score = ratings(seed)
    score = (score - score.mean()) / score.std()
    known, size = 1200, 6
    u, f = nn.Embedding(120, size), nn.Embedding(80, size)
    nn.init.normal_(u.weight, std=0.3)
    nn.init.normal_(f.weight, std=0.3)
    model = nn.ModuleDict({"u": u, "f": f})
    opt = torch.optim.Adam(model.parameters(), lr=2e-2)

    def predict(rows: torch.Tensor) -> torch.Tensor:
        return (u(user[rows]) * f(film[rows])).sum(1)

    held = torch.arange(5000, 6000)
    with watch(model, opt) as watching:
        for _ in range(40):
            for i in torch.randperm(known).split(50):
                loss = F.mse_loss(predict(i), score[i])
                opt.zero_grad()
                loss.backward()
                opt.step()
            with torch.no_grad():
                watching.validated(F.mse_loss(predict(held), score[held]).item())
    return squared_score(predict(held), score[held])


def reshaped_where_it_should_be_transposed(watch: Watch, seed: int) -> float:
    """(batch, time, features) becomes (time, batch, features) by view: the rows of a batch are mixed up."""
    torch.manual_seed(seed)
    lstm, head = nn.LSTM(3, 24), nn.Linear(24, 1)
    model = nn.ModuleList([lstm, head])
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)

    def forward(x: torch.Tensor) -> torch.Tensor:
        sequence = x.view(x.shape[1], x.shape[0], 3)
        return head(lstm(sequence)[0][-1])[:, 0]

    def sample(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, 8, 3)
        return x, x[:, -3:, 0].sum(1) + x[:, -1, 1]

    with watch(model, optimizer):
        for _ in range(400):
            x, y = sample(32)
            loss = F.mse_loss(forward(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    x, y = sample(32)
    return squared_score(forward(x), y)


def points_mirrored_at_random(watch: Watch, seed: int) -> float:
    """Mirroring both axes at random, fine for pictures, takes away what tells these two classes apart."""
    torch.manual_seed(seed)
    mirrored = True
    net = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    with watch(net, opt):
        for _ in range(400):
            x, y = moons(64)
            if mirrored:
                x = x * (torch.randint(2, x.shape) * 2 - 1)
            loss = F.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
    x, y = moons(1000)
    return error_score(net(x), y)


PROGRAMS = [
    faulty(features_and_labels_shuffled_apart, causes="828 830 833"),
    faulty(answers_of_the_row_before, causes="828 830"),
    faulty(augmented_beyond_recognition, causes="828 830", also="833"),
    faulty(pixels_that_never_vary, causes="806", also="801 802 804 805"),
    faulty(one_missing_value, causes="806", also="801 802 804 805"),
    faulty(raw_columns_into_sigmoids, causes="830 847 848", also="828 823 824"),
    faulty(prices_in_single_dollars, causes="824 828", also="830"),
    faulty(forty_rows_learnt_by_heart, causes="833"),
    faulty(more_weights_than_ratings, causes="833"),
    faulty(reshaped_where_it_should_be_transposed, causes="828 830", also="842"),
    faulty(points_mirrored_at_random, causes="828 830"),
]
