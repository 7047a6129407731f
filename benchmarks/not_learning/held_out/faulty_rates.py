"""Faulty programs whose steps have the wrong size: rates, schedules, clipping, decay."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from benchmarks.not_learning.held_out.data import blobs, digits, library_text, moons, seasons, table, windows
from benchmarks.not_learning.held_out.entry import error_score, faulty, squared_score
from benchmarks.not_learning.program import Watch


def rate_given_as_weight_decay(watch: Watch, seed: int) -> float:
    """SGD with the tuned rate in the place of weight_decay and the tiny decay in the place of the rate."""
    torch.manual_seed(seed)
    images, masks = blobs(120)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), nn.Conv2d(12, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 1, 1)
    )
    lr, decay = 1e-6, 0.05
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=decay)
    with watch(model, optimizer, total_steps=300):
        for _ in range(300):
            i = torch.randint(100, (8,))
            loss = F.binary_cross_entropy_with_logits(model(images[i]), masks[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return float(((model(images[100:]) > 0) != (masks[100:] > 0)).float().mean() / masks[100:].mean())


def lambda_returns_the_rate_itself(watch: Watch, seed: int) -> float:
    """LambdaLR multiplies: a function that returns the wanted rate of 1e-3 makes it 1e-6."""
    torch.manual_seed(seed)
    text, vocab = library_text()
    emb, lstm, out = nn.Embedding(vocab, 24), nn.LSTM(24, 48, batch_first=True), nn.Linear(48, vocab)
    model = nn.ModuleList([emb, lstm, out])
    base, steps = 4e-3, 250
    optimizer = torch.optim.Adam(model.parameters(), lr=base)

    def schedule(step: int) -> float:
        return base * (1 - 0.9 * step / steps)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=schedule)
    with watch(model, optimizer, scheduler=scheduler, total_steps=steps):
        for _ in range(steps):
            x, y = windows(text, 16, 24)
            loss = F.cross_entropy(out(lstm(emb(x))[0]).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
    return loss.item() / math.log(vocab)


def epochs_schedule_stepped_per_batch(watch: Watch, seed: int) -> float:
    """StepLR with a step size of four epochs is stepped after every batch."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=4, gamma=0.5)
    with watch(net, opt, scheduler=scheduler, total_steps=12 * 43) as watching:
        for _ in range(12):
            for i in torch.randperm(len(x)).split(32):
                opt.zero_grad()
                F.cross_entropy(net(x[i]), y[i]).backward()
                opt.step()
                scheduler.step()
            # the end of an epoch
            watching.validated(F.cross_entropy(net(held_x), held_y).item())
    return error_score(net(held_x), held_y)


def decay_of_a_tenth_each_batch(watch: Watch, seed: int) -> float:
    """ExponentialLR(0.9) meant for epochs; a forecaster that stops within a hundred batches."""
    torch.manual_seed(seed)
    series = seasons(250, 41)
    gru, head = nn.GRU(1, 24, batch_first=True), nn.Linear(24, 1)
    model = nn.ModuleDict({"gru": gru, "head": head})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    done = 0
    with watch(model, optimizer, scheduler=scheduler, total_steps=280):
        while done < 280:
            for rows in torch.randperm(200).split(20):
                batch = series[rows, :, None]
                loss = F.smooth_l1_loss(head(gru(batch[:, :-1])[0]), batch[:, 1:])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
                if done % 1 == 0:
                    scheduler.step()
    held = series[200:, :, None]
    return squared_score(head(gru(held[:, :-1])[0]), held[:, 1:])


def warmup_by_whole_division(watch: Watch, seed: int) -> float:
    """The warm-up divides whole numbers, so the factor is 0 until it is over, and it is longer than the run."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("breast_cancer", seed)
    model = nn.Sequential(nn.Linear(30, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    warmup = 1000
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step // warmup))
    with watch(model, optimizer, scheduler=scheduler, total_steps=400):
        for _ in range(400):
            i = torch.randint(len(x), (32,))
            loss = F.cross_entropy(model(x[i]), y[i])
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return error_score(model(held_x), held_y)


def plateau_fed_with_each_batch(watch: Watch, seed: int) -> float:
    """ReduceLROnPlateau is stepped with the loss of every batch, whose noise it takes for a plateau."""
    torch.manual_seed(seed)
    x = torch.rand(2000, 2) * 4 - 2
    y = ((2 * x[:, 0]).sin() * (2 * x[:, 1]).cos())[:, None] + 0.1 * torch.randn(2000, 1)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=4, factor=0.3)
    with watch(net, opt, scheduler=scheduler):
        for _ in range(25):
            for i in torch.randperm(1500).split(50):
                loss = F.mse_loss(net(x[i]), y[i])
                opt.zero_grad()
                loss.backward()
                opt.step()
                scheduler.step(loss.item())
            # the end of an epoch
    return squared_score(net(x[1500:]), y[1500:])


def resumed_at_a_finished_schedule(watch: Watch, seed: int) -> float:
    """The optimizer's state of an earlier, finished run is loaded: with the moments comes its last rate, 0."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("digits", seed)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        return net, torch.optim.Adam(net.parameters(), lr=5e-3)

    def train(net: nn.Module, opt: torch.optim.Optimizer, goal: torch.Tensor, steps: int) -> None:
        for _ in range(steps):
            i = torch.randint(len(x), (32,))
            opt.zero_grad()
            F.cross_entropy(net(x[i]), goal[i]).backward()
            opt.step()

    first, first_opt = build()
    old = torch.optim.lr_scheduler.CosineAnnealingLR(first_opt, T_max=40)
    for _ in range(40):
        train(first, first_opt, y % 2, 1)
        old.step()
    model, optimizer = build()
    optimizer.load_state_dict(first_opt.state_dict())
    # on to the next task
    with watch(model, optimizer):
        train(model, optimizer, y, 300)
    return error_score(model(held_x), held_y)


def adam_with_a_rate_of_one(watch: Watch, seed: int) -> float:
    """The rate of a tutorial for SGD is given to Adam, under a recurrent text model."""
    torch.manual_seed(seed)
    text, vocab = library_text()
    emb, rnn, out = nn.Embedding(vocab, 16), nn.RNN(16, 48, batch_first=True), nn.Linear(48, vocab)
    model = nn.ModuleList([emb, rnn, out])
    optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
    with watch(model, optimizer):
        for _ in range(250):
            x, y = windows(text, 16, 20)
            loss = F.cross_entropy(out(rnn(emb(x))[0]).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return loss.item() / math.log(vocab)


def summed_loss_at_a_mean_rate(watch: Watch, seed: int) -> float:
    """The loss is summed over pixels and batch, the rate is that of a mean: the autoencoder diverges."""
    torch.manual_seed(seed)
    x, _, held, _ = digits(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 64))
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    loss_fn = nn.MSELoss(reduction="sum")
    with watch(net, opt):
        for _ in range(400):
            batch = x[torch.randint(len(x), (32,))]
            loss = loss_fn(net(batch), batch.flatten(1))
            opt.zero_grad()
            loss.backward()
            opt.step()
    return squared_score(net(held), held.flatten(1))


def loss_divided_three_times(watch: Watch, seed: int) -> float:
    """A mean loss is divided by the batch and by the number of batches once more, under plain SGD."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = table("wine", seed)
    net = nn.Sequential(nn.Linear(13, 32), nn.Tanh(), nn.Linear(32, 3))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    with watch(net, opt, total_steps=400):
        for _ in range(50):
            batches = torch.randperm(len(x)).split(17)
            for rows in batches:
                loss = F.cross_entropy(net(x[rows]), y[rows]) / len(rows) / len(batches) / 10
                opt.zero_grad()
                loss.backward()
                opt.step()
    return F.cross_entropy(net(held_x), held_y).item() / math.log(3)


def clipped_to_a_norm_of_zero(watch: Watch, seed: int) -> float:
    """A configuration's `grad_clip: 0` was meant to turn clipping off, and clips everything to 0."""
    torch.manual_seed(seed)
    config = {"grad_clip": 0.0, "lr": 0.1}
    net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, 2))
    opt = torch.optim.SGD(net.parameters(), lr=config["lr"], momentum=0.9)
    with watch(net, opt):
        for _ in range(300):
            x, y = moons(32)
            opt.zero_grad()
            F.cross_entropy(net(x), y).backward()
            if config["grad_clip"] is not None:
                nn.utils.clip_grad_norm_(net.parameters(), config["grad_clip"])
            opt.step()
    x, y = moons(1000)
    return error_score(net(x), y)


def clipped_to_minus_one(watch: Watch, seed: int) -> float:
    """A limit of -1 for "none" turns each gradient round."""
    torch.manual_seed(seed)
    series = seasons(200, 25)
    net = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    max_norm: float | None = -1.0
    with watch(net, opt):
        for _ in range(300):
            rows = series[torch.randint(150, (20,))]
            loss = F.mse_loss(net(rows[:, :24]), rows[:, 24:])
            opt.zero_grad()
            loss.backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            opt.step()
    return squared_score(net(series[150:, :24]), series[150:, 24:])


def clipped_to_almost_nothing(watch: Watch, seed: int) -> float:
    """SGD with a limit of 1e-3 on the norm: every step is a thousandth of what the rate promises."""
    torch.manual_seed(seed)
    x, y, held_x, held_y = digits(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with watch(net, opt, total_steps=400):
        for _ in range(400):
            i = torch.randint(len(x), (32,))
            opt.zero_grad()
            F.cross_entropy(net(x[i]), y[i]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), max_norm=1e-3)
            opt.step()
    return error_score(net(held_x), held_y)


def decay_that_eats_the_weights(watch: Watch, seed: int) -> float:
    """weight_decay=5 in Adam, where 5e-4 was meant: all weights are pulled to 0 and stay there."""
    torch.manual_seed(seed)
    x = torch.rand(700, 3) * 4 - 2
    y = (x[:, :1] * 2).sin() * x[:, 1:2] + 0.05 * torch.randn(700, 1)
    model = nn.Sequential(nn.Linear(3, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, weight_decay=5.0)
    with watch(model, optimizer):
        for _ in range(500):
            i = torch.randint(600, (64,))
            loss = F.huber_loss(model(x[i]), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return squared_score(model(x[600:]), y[600:])


PROGRAMS = [
    faulty(rate_given_as_weight_decay, causes="824", also="828 823"),
    faulty(lambda_returns_the_rate_itself, causes="824", also="828 823 819"),
    faulty(epochs_schedule_stepped_per_batch, causes="819 820", also="824 828 823 832"),
    faulty(decay_of_a_tenth_each_batch, causes="819 820", also="824 828 823 832"),
    faulty(warmup_by_whole_division, causes="819", also="820 823 824 828"),
    faulty(plateau_fed_with_each_batch, causes="854", also="820 819 824 832"),
    faulty(resumed_at_a_finished_schedule, causes="819", also="823 824 828"),
    faulty(adam_with_a_rate_of_one, causes="825", also="826 818 847 848 828 827"),
    faulty(summed_loss_at_a_mean_rate, causes="825", also="826 801 802 804 827 828 847 848"),
    faulty(loss_divided_three_times, causes="824", also="828 823"),
    faulty(clipped_to_a_norm_of_zero, causes="816 815 817", also="818 823 828"),
    faulty(clipped_to_minus_one, causes="816 817", also="818 831 826 825 828 801 802"),
    faulty(clipped_to_almost_nothing, causes="818", also="824 823 828"),
    faulty(decay_that_eats_the_weights, causes="828 830", also="823 824 847 848"),
]
