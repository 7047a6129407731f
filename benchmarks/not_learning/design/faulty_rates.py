"""Faulty programs with wrong rates, schedules, initial weights or widths of numbers."""

# ruff: noqa: D101, D102, N812 - the programs are written as users write theirs

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from benchmarks.not_learning.data import batches, blobs, curve, diabetes, digits
from benchmarks.not_learning.design.planting import BLOWN, STILL, UNLEARNT, plants
from benchmarks.not_learning.program import Program, Watch

PROGRAMS: list[Program] = []


@plants(PROGRAMS, "H825", shows=(*BLOWN, *UNLEARNT, "H847", "H848", "H815"))
def rate_of_ten(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = optim.SGD(model.parameters(), lr=10)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 400):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H825", shows=(*BLOWN, *UNLEARNT, "H847", "H848"))
def adam_with_the_rate_of_sgd(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = curve(seed)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = optim.Adam(net.parameters(), lr=1.0)
    with watch(net, optimizer):
        for xb, yb in batches(x, y, 50, 500):
            loss = F.mse_loss(net(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H825", shows=(*BLOWN, *UNLEARNT, "H848"))
def regression_diverges(watch: Watch, seed: int) -> None:
    """Targets in the hundreds and a rate for targets of one: not a number after some steps."""
    torch.manual_seed(seed)
    x, y = diabetes()
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 300):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H825", shows=(*BLOWN, *UNLEARNT, "H848", "H847", "H815"))
def summed_loss_with_the_rate_of_a_mean(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    criterion = nn.CrossEntropyLoss(reduction="sum")
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 64, 400):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H825", shows=(*BLOWN, *UNLEARNT, "H847", "H848", "H815"))
def momentum_of_0999(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = blobs(seed)
    model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 5))
    optimizer = optim.SGD(model.parameters(), lr=0.3, momentum=0.999)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 500):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H824", shows=STILL)
def rate_of_a_billionth(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = optim.Adam(model.parameters(), lr=1e-9)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 500):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H824", shows=STILL)
def sgd_with_a_rate_far_too_low(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = curve(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = optim.SGD(model.parameters(), lr=1e-6)
    with watch(model, optimizer, total_steps=600):
        for xb, yb in batches(x, y, 32, 600):
            loss = F.l1_loss(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H819", shows=(*STILL, "H824"))
def schedule_ends_early(watch: Watch, seed: int) -> None:
    """The schedule was made for 60 steps, the run has 800."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scheduler = optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=60)
    with watch(model, optimizer, scheduler=scheduler, total_steps=800):
        for xb, yb in batches(x, y, 32, 800):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
            scheduler.step()


@plants(PROGRAMS, "H819", "H820", shows=(*STILL, "H824"))
def step_decay_by_batch_instead_of_epoch(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.1)
    with watch(model, optimizer, scheduler=scheduler):
        for _epoch in range(15):
            for rows in torch.randperm(len(x)).split(40):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
                scheduler.step()


@plants(PROGRAMS, "H820", "H819", shows=(*STILL, "H824"))
def schedule_steps_with_each_micro_batch(watch: Watch, seed: int) -> None:
    """Eight scheduler steps for each update: the rate is 0 after an eighth of the run."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10))
    updates = 150
    optimizer = optim.SGD(model.parameters(), lr=0.4)
    scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / updates))
    with watch(model, optimizer, scheduler=scheduler, total_steps=updates):
        for i, (xb, yb) in enumerate(batches(x, y, 8, 8 * updates)):
            (F.cross_entropy(model(xb), yb) / 8).backward()
            if i % 8 == 7:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()


@plants(PROGRAMS, "H854", shows=(*STILL, "H819", "H820", "H824"))
def plateau_fed_with_batch_losses(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    with watch(model, optimizer, scheduler=scheduler):
        for xb, yb in batches(x, y, 16, 800):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            scheduler.step(loss.item())


@plants(PROGRAMS, "H822", shows=(*STILL, "H814", "H815"))
def all_zero_init(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 400):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


def fill_constant(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.05)
        nn.init.zeros_(module.bias)


@plants(PROGRAMS, "H822", shows=UNLEARNT)
def symmetric_init(watch: Watch, seed: int) -> None:
    """All units of a layer are equal and stay equal."""
    torch.manual_seed(seed)
    x, y = curve(seed)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).apply(
        fill_constant
    )
    optimizer = optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    with watch(net, optimizer):
        for xb, yb in batches(x, y, 50, 600):
            optimizer.zero_grad()
            F.mse_loss(net(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H848", shows=STILL)
def deep_sigmoid_net(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    layers: list[nn.Module] = [nn.Linear(64, 32), nn.Sigmoid()]
    for _ in range(6):
        layers += [nn.Linear(32, 32), nn.Sigmoid()]
    model = nn.Sequential(*layers, nn.Linear(32, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 500):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H848", shows=(*UNLEARNT, "H847"))
def saturated_tanh(watch: Watch, seed: int) -> None:
    """Normal weights of deviation one in wide layers: every unit sits at plus or minus one."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.weight, std=3.0)
    nn.init.normal_(model[4].weight, std=1.0)
    optimizer = optim.SGD(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 300):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H847", shows=(*STILL, "H814", "H815", "H848"))
def dead_relu(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for layer in (model[0], model[2]):
        nn.init.constant_(layer.bias, -10.0)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 400):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


class PlainRNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(2, 32)
        self.again = nn.Linear(32, 32, bias=False)
        self.out = nn.Linear(32, 1)
        nn.init.normal_(self.again.weight, std=0.27)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 32)
        for step in range(x.size(1)):
            state = F.relu(self.into(x[:, step]) + self.again(state))
        return self.out(state)


@plants(PROGRAMS, "H848", shows=(*BLOWN, *UNLEARNT, "H825", "H847", "H815"))
def exploding_rnn(watch: Watch, seed: int) -> None:
    """The adding problem with rectified units, large recurrent weights, and no clipping."""
    torch.manual_seed(seed)
    rnn = PlainRNN()
    optimizer = optim.SGD(rnn.parameters(), lr=0.01)
    with watch(rnn, optimizer):
        for _ in range(300):
            values = torch.rand(32, 25)
            marks = torch.zeros(32, 25).scatter_(1, torch.rand(32, 25).argsort(1)[:, :2], 1.0)
            wanted = (values * marks).sum(1, keepdim=True)
            optimizer.zero_grad()
            F.mse_loss(rnn(torch.stack([values, marks], 2)), wanted).backward()
            optimizer.step()


@plants(PROGRAMS, "H858", shows=(*UNLEARNT, "H848", "H847"))
def weight_decay_of_ten(watch: Watch, seed: int) -> None:
    """Taken for a rate: each step takes a tenth of the weights away."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, weight_decay=10.0)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 400):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H857", shows=(*UNLEARNT, "H848"))
def dropout_of_095_everywhere(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = curve(seed)
    model = nn.Sequential(
        nn.Dropout(0.95), nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.95), nn.Linear(32, 32), nn.ReLU(),
        nn.Dropout(0.95), nn.Linear(32, 1),
    )  # fmt: skip
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 50, 500):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H802", shows=("H801", "H804"))
def root_of_zero_backwards(watch: Watch, seed: int) -> None:
    """The loss is finite; the slope of the distance of a vector to itself is not."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = optim.Adam(net.parameters(), lr=1e-3)
    with watch(net, optimizer):
        for xb, yb in batches(x, y, 16, 200):
            z = net(xb)
            distance = (z[:, None] - z[None]).pow(2).sum(-1).sqrt()
            same = (yb[:, None] == yb[None]).float()
            loss = (same * distance + (1 - same) * F.relu(2 - distance)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H801", shows=("H802", "H804", "H825"))
def logarithm_of_zero(watch: Watch, seed: int) -> None:
    """Probabilities are formed first and logarithms after, and soon one of them is exactly 0."""
    torch.manual_seed(seed)
    x, y = blobs(seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 64, 300):
            probability = torch.softmax(model(xb), dim=1)
            loss = -(F.one_hot(yb, 5) * torch.log(probability)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H853", shows=("H823", "H824", "H848", "H828"))
def discriminator_wins(watch: Watch, seed: int) -> None:
    """The minimax form of the loss and a far faster discriminator: nothing comes back to the generator."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
    discriminator = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1), nn.Flatten(0))
    optimizer_g = optim.SGD(generator.parameters(), lr=0.01)
    optimizer_d = optim.Adam(discriminator.parameters(), lr=1e-2)
    models = {"generator": generator, "discriminator": discriminator}
    with watch(models, {"generator": optimizer_g, "discriminator": optimizer_d}, objective="adversarial"):
        for real, _ in batches(x, y, 32, 600):
            fake = generator(torch.randn(32, 8))
            optimizer_d.zero_grad()
            loss_d = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
            loss_d.backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            (-F.softplus(discriminator(fake))).mean().backward()
            optimizer_g.step()
