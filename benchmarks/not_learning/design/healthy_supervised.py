"""Healthy programs that learn labels or targets by an ordinary loop: classifiers, regressions, schedulers."""

# ruff: noqa: D101, D102, N812 - the programs are written as users write theirs

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.not_learning.data import batches, blobs, curve, diabetes, digits, spirals
from benchmarks.not_learning.program import Program, Watch


def digits_mlp_adam(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    with watch(model, optimizer):
        for inputs, labels in batches(x, y, 32, 800):
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(12)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(24)
        self.fc = nn.Linear(24 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.fc(x.flatten(1))


def digits_cnn_batchnorm(watch: Watch, seed: int) -> None:
    """Epochs over a DataLoader, momentum, step decay, and an evaluation after each epoch."""
    torch.manual_seed(seed)
    x, y, x_val, y_val = digits(seed)
    loader = DataLoader(TensorDataset(x.view(-1, 1, 8, 8), y), batch_size=50, shuffle=True)
    net = ConvNet()
    optimizer = optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.3)
    with watch(net, optimizer, scheduler=scheduler) as watching:
        for _ in range(15):
            net.train()
            for data, target in loader:
                optimizer.zero_grad(set_to_none=True)
                F.cross_entropy(net(data), target).backward()
                optimizer.step()
            scheduler.step()
            net.eval()
            with torch.no_grad():
                watching.validated(F.cross_entropy(net(x_val.view(-1, 1, 8, 8)), y_val).item())


def digits_groupnorm_small_batches(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    images = (x - x.mean()) / x.std()
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, bias=False),
        nn.GroupNorm(4, 16),
        nn.GELU(),
        nn.Conv2d(16, 16, 3, bias=False),
        nn.GroupNorm(4, 16),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    opt = optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    with watch(model, opt):
        for xb, yb in batches(images, y, 4, 900):
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            opt.step()
            opt.zero_grad()


def regression_unscaled_targets(watch: Watch, seed: int) -> None:
    """Targets between 25 and 346, never scaled; the loss is in the thousands and that is all right."""
    torch.manual_seed(seed)
    x, y = diabetes()
    net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    with watch(net, optimizer):
        for epoch in range(60):
            permutation = torch.randperm(len(x))
            for i in range(0, len(x), 40):
                indices = permutation[i : i + 40]
                optimizer.zero_grad()
                loss = F.mse_loss(net(x[indices]), y[indices])
                loss.backward()
                optimizer.step()
            if epoch % 20 == 0:
                assert loss.item() > 0


def regression_heavy_tails_huber(watch: Watch, seed: int) -> None:
    """One target in fifty is far off; the loss is made for that."""
    torch.manual_seed(seed)
    x, y = curve(seed)
    y = y + 20 * torch.randn_like(y) * (torch.rand_like(y) < 0.02)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = optim.RMSprop(model.parameters(), lr=1e-3)
    loss_fn = nn.SmoothL1Loss()
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 64, 700):
            optimizer.zero_grad()
            loss_fn(model(xb), yb).backward()
            optimizer.step()


def spirals_one_cycle(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = spirals(seed)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    steps = 1000
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=steps)
    with watch(model, optimizer, scheduler=scheduler, total_steps=steps):
        for xb, yb in batches(x, y, 64, steps):
            logits = model(xb).squeeze(1)
            loss = F.binary_cross_entropy_with_logits(logits, yb.float())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()


def warmup_from_zero_cosine_to_zero(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = blobs(seed)
    model = nn.Sequential(nn.Linear(20, 64), nn.LayerNorm(64), nn.SiLU(), nn.Linear(64, 5))
    total, warm = 600, 60
    optimizer = optim.AdamW(model.parameters(), lr=3e-3)

    def factor(step: int) -> float:
        if step < warm:
            return step / warm
        return 0.5 * (1 + torch.cos(torch.tensor((step - warm) / (total - warm) * torch.pi)).item())

    scheduler = optim.lr_scheduler.LambdaLR(optimizer, factor)
    with watch(model, optimizer, scheduler=scheduler, total_steps=total):
        for xb, yb in batches(x, y, 32, total):
            loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def plateau_on_validation(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = curve(seed, samples=1500)
    x_train, y_train, x_val, y_val = x[:1200], y[:1200], x[1200:], y[1200:]
    model = nn.Sequential(nn.Linear(8, 48), nn.ELU(), nn.Linear(48, 1))
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5, factor=0.5)
    with watch(model, optimizer, scheduler=scheduler) as watching:
        for _ in range(30):
            model.train()
            for rows in torch.randperm(1200).split(60):
                optimizer.zero_grad()
                loss = ((model(x_train[rows]) - y_train[rows]) ** 2).mean()
                loss.backward()
                optimizer.step()
            model.eval()
            with torch.inference_mode():
                val_loss = ((model(x_val) - y_val) ** 2).mean().item()
            scheduler.step(val_loss)
            watching.validated(val_loss)


def dropout_and_label_smoothing(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(
        nn.Dropout(0.2), nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 256), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(256, 10),
    )  # fmt: skip
    criterion = nn.CrossEntropyLoss(label_smoothing=0.2)
    optimizer = optim.NAdam(model.parameters(), lr=1e-3)
    model.train()
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 64, 500):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()


def class_imbalance_weighted(watch: Watch, seed: int) -> None:
    """Three positives in a hundred: many batches hold nothing but negatives."""
    torch.manual_seed(seed)
    x = torch.randn(4000, 12)
    score = x[:, 0] + x[:, 1] * x[:, 2]
    y = (score > score.quantile(0.97)).float()
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(20.0))
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 800):
            loss = criterion(model(xb), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def multi_task_two_heads(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    ink = x.sum(1, keepdim=True) / 20
    trunk = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    heads = nn.ModuleDict({"digit": nn.Linear(64, 10), "ink": nn.Linear(64, 1)})
    model = nn.ModuleDict({"trunk": trunk, "heads": heads})
    optimizer = optim.Adam([{"params": trunk.parameters()}, {"params": heads.parameters(), "lr": 5e-3}], lr=1e-3)
    with watch(model, optimizer):
        for step in range(600):
            rows = torch.randint(0, len(x), (48,))
            hidden = trunk(x[rows])
            digit_loss = F.cross_entropy(heads["digit"](hidden), y[rows])
            ink_loss = F.l1_loss(heads["ink"](hidden), ink[rows])
            optimizer.zero_grad()
            (digit_loss + 0.3 * ink_loss).backward()
            optimizer.step()
            if step % 200 == 0:
                assert digit_loss.isfinite()


def little_to_learn(watch: Watch, seed: int) -> None:
    """Regression with a correlation of 0.3: the loss can fall by a tenth only."""
    torch.manual_seed(seed)
    x = torch.randn(3000, 5)
    y = 0.3 * x[:, 0] + torch.randn(3000)
    model = nn.Linear(5, 1)
    optimizer = optim.SGD(model.parameters(), lr=0.02)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 64, 600):
            loss = F.mse_loss(model(xb)[:, 0], yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def noisy_labels(watch: Watch, seed: int) -> None:
    """Half of the labels are random: the loss stays high although the model learns."""
    torch.manual_seed(seed)
    x, y = blobs(seed, samples=4000)
    y = torch.where(torch.rand(len(y)) < 0.5, torch.randint(0, 5, (len(y),)), y)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 64, 600):
            optimizer.zero_grad()
            F.nll_loss(F.log_softmax(model(xb), dim=1), yb).backward()
            optimizer.step()


PROGRAMS = [
    Program(name=train.__name__, healthy=True, train=train)
    for train in (
        digits_mlp_adam,
        digits_cnn_batchnorm,
        digits_groupnorm_small_batches,
        regression_unscaled_targets,
        regression_heavy_tails_huber,
        spirals_one_cycle,
        warmup_from_zero_cosine_to_zero,
        plateau_on_validation,
        dropout_and_label_smoothing,
        class_imbalance_weighted,
        multi_task_two_heads,
        little_to_learn,
        noisy_labels,
    )
]
