"""Faulty programs whose data, targets, modes or batches are wrong, although model, loss and optimizer are right."""

# ruff: noqa: N812 - the programs are written as users write theirs

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, Dataset, TensorDataset

from benchmarks.not_learning.data import batches, blobs, curve, digits
from benchmarks.not_learning.design.planting import BLOWN, STILL, UNLEARNT, plants
from benchmarks.not_learning.program import Program, Watch

PROGRAMS: list[Program] = []


@plants(PROGRAMS, shows=UNLEARNT)
def inputs_shuffled_without_targets(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for _epoch in range(12):
            x = x[torch.randperm(len(x))]
            for i in range(0, 1400, 40):
                optimizer.zero_grad()
                F.cross_entropy(model(x[i : i + 40]), y[i : i + 40]).backward()
                optimizer.step()


@plants(PROGRAMS, "H833", shows=UNLEARNT)
def targets_shifted_by_one_row(watch: Watch, seed: int) -> None:
    """A header line was dropped from one of two files; the net learns rows by heart, and validation says so."""
    torch.manual_seed(seed)
    x, y = curve(seed, samples=400, features=16)
    y = y.roll(1, dims=0)
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer) as watching:
        for _ in range(60):
            for rows in torch.randperm(300).split(30):
                optimizer.zero_grad()
                F.mse_loss(model(x[rows]), y[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                watching.validated(F.mse_loss(model(x[300:]), y[300:]).item())


@plants(PROGRAMS, "H844", shows=(*UNLEARNT, "H830"))
def constant_input(watch: Watch, seed: int) -> None:
    """Whole numbers divided by whole numbers: all pixels are 0."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    pixels = (x * 255).long()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for xb, yb in batches((pixels // 256).float(), y, 32, 400):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H844", shows=("H815",))
def single_label(watch: Watch, seed: int) -> None:
    """The labels were read from the wrong column: the loss is wonderful and nothing is learnt."""
    torch.manual_seed(seed)
    x, y = blobs(seed)
    table = torch.cat([x, torch.zeros(len(x), 1), y[:, None]], dim=1)
    inputs, labels = table[:, :20], table[:, 20].long()
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for xb, yb in batches(inputs, labels, 32, 400):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H843", shows=(*BLOWN, *UNLEARNT, "H844", "H847"))
def sorted_labels(watch: Watch, seed: int) -> None:
    """One folder for each class, read in order, shuffle=False."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    order = y.argsort()
    loader = DataLoader(TensorDataset(x[order], y[order]), batch_size=20)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer):
        for _ in range(8):
            for xb, yb in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(xb), yb).backward()
                optimizer.step()


@plants(PROGRAMS, "H845", shows=("H833",))
def same_batch_again_and_again(watch: Watch, seed: int) -> None:
    """``next(iter(loader))`` begins the loader anew each time, and it does not shuffle."""
    torch.manual_seed(seed)
    x, y, x_val, y_val = digits(seed)
    loader = DataLoader(TensorDataset(x, y), batch_size=32)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer) as watching:
        for step in range(500):
            xb, yb = next(iter(loader))
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
            if step % 50 == 49:
                with torch.no_grad():
                    watching.validated(F.cross_entropy(model(x_val), y_val).item())


@plants(PROGRAMS, "H856", shows=(*BLOWN, *STILL, "H825", "H847", "H848", "H815"))
def input_in_the_ten_thousands(watch: Watch, seed: int) -> None:
    """Incomes and years beside rates: one column is ten thousand times the others."""
    torch.manual_seed(seed)
    x, y = curve(seed)
    x = x * torch.tensor([1.0, 1, 1, 1, 1e4, 1, 1, 1]) + torch.tensor([0.0, 0, 0, 0, 3e4, 0, 0, 0])
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = optim.SGD(model.parameters(), lr=0.01)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 400):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H856", "H848", shows=(*UNLEARNT, "H847"))
def pixels_up_to_255_into_tanh(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with watch(model, optimizer):
        for xb, yb in batches(255 * x, y, 32, 500):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H806", shows=("H801", "H802", "H804"))
def one_sample_is_not_a_number(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = curve(seed)
    x[567, 3] = float("nan")
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 20, 400):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, "H807", shows=(*BLOWN, *UNLEARNT, "H825", "H847", "H848"))
def outlier_targets(watch: Watch, seed: int) -> None:
    """A missing value is written as -99999 in four rows of a thousand."""
    torch.manual_seed(seed)
    x, y = curve(seed)
    y[torch.randperm(len(y))[:4]] = -99999.0
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 25, 600):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()


class FewLoud(Dataset):
    """Thirty samples of many features with noisy labels."""

    def __init__(self, seed: int, samples: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(samples, 50, generator=generator)
        noise = 2 * torch.randn(samples, generator=generator)
        self.y = ((self.x[:, 0] + self.x[:, 1] + noise) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.x[row], self.y[row]


@plants(PROGRAMS, "H833")
def overfits_few_samples(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    train, validation = DataLoader(FewLoud(seed, 60), batch_size=20, shuffle=True), FewLoud(seed + 100, 300)
    model = nn.Sequential(nn.Linear(50, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer) as watching:
        for _ in range(100):
            model.train()
            for xb, yb in train:
                optimizer.zero_grad()
                F.cross_entropy(model(xb), yb).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                watching.validated(F.cross_entropy(model(validation.x), validation.y).item())


@plants(PROGRAMS, "H834")
def evaluated_in_training_mode(watch: Watch, seed: int) -> None:
    """Nobody calls eval(): the validation loss is that of a net of which most is dropped."""
    torch.manual_seed(seed)
    x, y, x_val, y_val = digits(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.8), nn.Linear(128, 10))
    optimizer = optim.Adam(model.parameters(), lr=2e-3)
    with watch(model, optimizer) as watching:
        for _ in range(15):
            for rows in torch.randperm(1400).split(50):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            with torch.no_grad():
                watching.validated(F.cross_entropy(model(x_val), y_val).item())


@plants(PROGRAMS, "H834", shows=(*BLOWN, *UNLEARNT, "H833", "H825", "H847", "H848"))
def never_back_in_training_mode(watch: Watch, seed: int) -> None:
    """eval() before the first epoch and no train() after: the batch statistics are never measured."""
    torch.manual_seed(seed)
    x, y, x_val, y_val = digits(seed)
    layers: list[nn.Module] = [nn.Linear(64, 48)]
    for _ in range(6):
        layers += [nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 48)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(48, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    model.eval()
    with watch(model, optimizer) as watching:
        for _ in range(10):
            for rows in torch.randperm(1400).split(35):
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                watching.validated(F.cross_entropy(model(x_val), y_val).item())


@plants(PROGRAMS, "H835", shows=(*UNLEARNT, "H827"))
def batch_norm_with_two_samples(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = curve(seed)
    model = nn.Sequential(
        nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(),
        nn.Linear(64, 1),
    )  # fmt: skip
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 2, 900):
            optimizer.zero_grad()
            F.mse_loss(model(xb), yb).backward()
            optimizer.step()


@plants(PROGRAMS, shows=(*UNLEARNT, "H856"))
def augmentation_destroys_the_signal(watch: Watch, seed: int) -> None:
    """The jitter was meant for pixels up to 255; these go up to 1."""
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 500):
            jittered = xb + 25 * torch.randn_like(xb)
            optimizer.zero_grad()
            F.cross_entropy(model(jittered), yb).backward()
            optimizer.step()
