"""Faulty programs whose loss is fed with, or computes, something else than was meant."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from benchmarks.not_learning.data import batches, blobs, curve, digits, text, windows
from benchmarks.not_learning.design.planting import BLOWN, STILL, UNLEARNT, plants
from benchmarks.not_learning.program import Program, Watch

PROGRAMS: list[Program] = []


@plants(PROGRAMS, "H836", shows=UNLEARNT)
def softmax_before_cross_entropy(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10), nn.Softmax(dim=1))
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 600):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H836", shows=UNLEARNT)
def softmax_twice_in_a_language_model(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    ids, characters = text()
    embed, rnn, head = nn.Embedding(characters, 24), nn.GRU(24, 48, batch_first=True), nn.Linear(48, characters)
    model = nn.ModuleDict({"embed": embed, "rnn": rnn, "head": head})
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for _ in range(300):
            x, y = windows(ids, 16, 16)
            probabilities = F.softmax(head(rnn(embed(x))[0]), dim=-1)
            loss = F.cross_entropy(probabilities.view(-1, characters), y.reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H837", shows=(*STILL, "H847", "H815"))
def rectified_logits(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(64, 64)
            self.fc2 = nn.Linear(64, 10)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(self.fc1(x))
            return F.relu(self.fc2(x))

    net = Net()
    optimizer = optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    with watch(net, optimizer):
        for xb, yb in batches(x, y, 32, 500):
            optimizer.zero_grad()
            F.cross_entropy(net(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H838", shows=UNLEARNT)
def sigmoid_before_bce_with_logits(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(3000, 12)
    y = (x[:, :1] + x[:, 1:2] > 1.8).float()
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
    criterion = nn.BCEWithLogitsLoss()
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 50, 500):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H839", "H855", shows=(*BLOWN, "H840", "H848", "H825"))
def logits_into_nll_loss(watch: Watch, seed: int) -> None:
    """The loss falls without end, and the model learns to make its outputs large."""
    torch.manual_seed(seed)
    x, y = blobs(seed)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    criterion = nn.NLLLoss()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 500):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H855", shows=(*STILL, "H815", "H801", "H802", "H804"))
def clamped_logits_into_bce(watch: Watch, seed: int) -> None:
    """BCELoss complained of values outside [0, 1], so they were clamped."""
    torch.manual_seed(seed)
    x = torch.randn(3000, 10)
    y = (x[:, 0] * x[:, 1] > 0).float()
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    nn.init.normal_(model[2].weight, std=1.0)
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 50, 500):
            out = model(xb).clamp(0, 1)
            loss = F.binary_cross_entropy(out, yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H801", "H855", shows=("H802", "H804"))
def hand_written_bce_on_logits(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = blobs(seed, classes=2)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer):
        for xb, yb in batches(x, y.float(), 32, 200):
            p = model(xb)
            loss = -(yb * p.log() + (1 - yb) * (1 - p).log()).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H855", "H839", shows=(*UNLEARNT, "H840"))
def probabilities_into_kl_div(watch: Watch, seed: int) -> None:
    """The logarithm is missing on the side of the student."""
    torch.manual_seed(seed)
    x, y = blobs(seed, classes=8)
    soft = F.softmax(3 * F.one_hot(y, 8).float(), dim=1)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 8), nn.Softmax(dim=-1))
    criterion = nn.KLDivLoss(reduction="batchmean")
    optimizer = optim.SGD(model.parameters(), lr=0.02)
    with watch(model, optimizer):
        for xb, soft_b in batches(x, soft, 32, 500):
            optimizer.zero_grad()
            loss = criterion(model(xb), soft_b)
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H842", shows=UNLEARNT)
def softmax_over_the_batch(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10), nn.LogSoftmax(dim=0))
    criterion = nn.NLLLoss()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 48, 500):
            optimizer.zero_grad()
            criterion(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H841", shows=UNLEARNT)
def broadcast_in_mse(watch: Watch, seed: int) -> None:
    """Predictions (n, 1) against targets (n,): every prediction is drawn to the mean of the batch."""
    torch.manual_seed(seed)
    x, y = curve(seed)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    criterion = nn.MSELoss()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for xb, yb in batches(x, y[:, 0], 32, 500):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H841", shows=UNLEARNT)
def broadcast_written_by_hand(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = curve(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer):
        for xb, yb in batches(x, y.squeeze(1), 50, 500):
            optimizer.zero_grad()
            loss = ((model(xb) - yb) ** 2).mean()
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H840", "H831", shows=(*BLOWN, *UNLEARNT, "H825", "H848"))
def negated_mse(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = curve(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 50, 400):
            optimizer.zero_grad()
            loss = -F.mse_loss(model(xb), yb)
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H840", "H831", shows=(*BLOWN, *UNLEARNT, "H825", "H848", "H847"))
def negated_cross_entropy(watch: Watch, seed: int) -> None:
    """log_softmax was believed to be negative already after nll_loss."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 400):
            optimizer.zero_grad()
            loss = -F.nll_loss(F.log_softmax(model(xb), dim=-1), yb)
            loss.backward()
            optimizer.step()


@plants(PROGRAMS, "H831", shows=(*BLOWN, *UNLEARNT, "H825", "H848", "H847"))
def maximised_by_the_optimizer(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = blobs(seed)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = optim.Adam(model.parameters(), lr=3e-3, maximize=True)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 400):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H831", shows=(*BLOWN, *UNLEARNT, "H825", "H848"))
def manual_update_with_the_wrong_sign(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = curve(seed)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = optim.SGD(model.parameters(), lr=0.02)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 50, 400):
            loss = F.mse_loss(model(xb), yb)
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                parameter.grad = -gradient
            optimizer.step()


@plants(PROGRAMS, "H830", shows=UNLEARNT)
def batch_and_time_scrambled(watch: Watch, seed: int) -> None:
    """``view`` was used where ``transpose`` was meant, so that each row holds pieces of many samples."""
    torch.manual_seed(seed)
    rnn, head = nn.GRU(3, 32), nn.Linear(32, 2)
    model = nn.ModuleDict({"rnn": rnn, "head": head})
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for _ in range(350):
            sequences = torch.randn(40, 10, 3)
            labels = (sequences[:, :, 0].sum(1) > 0).long()
            _, last = rnn(sequences.view(10, 40, 3))
            loss = F.cross_entropy(head(last[0]), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
