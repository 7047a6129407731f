"""Healthy programs with labels and a technique: autocast, freezing, adapters, accumulation, distillation."""

# ruff: noqa: D102, N812 - the programs are written as users write theirs

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from benchmarks.not_learning.data import batches, blobs, digits, spirals
from benchmarks.not_learning.program import Program, Watch


def autocast_bf16(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 64, 500):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(xb), yb)
            loss.backward()
            optimizer.step()


def fine_tuning_tiny_lr(watch: Watch, seed: int) -> None:
    """A model that is good already goes on with lr 1e-5 on slightly rotated classes."""
    torch.manual_seed(seed)
    x, y, x_new, y_new = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    before = optim.Adam(model.parameters(), lr=1e-2)
    for xb, yb in batches(x, y, 64, 200):
        before.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        before.step()
    optimizer = optim.AdamW(model.parameters(), lr=1e-5)
    with watch(model, optimizer):
        for xb, yb in batches(x_new, y_new, 16, 400):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


def frozen_backbone(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    backbone = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Flatten())
    for parameter in backbone.parameters():
        parameter.requires_grad = False
    model = nn.Sequential(backbone, nn.Linear(32 * 36, 10))
    optimizer = optim.Adam(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3)
    with watch(model, optimizer, frozen=["0"]):
        for xb, yb in batches(x, y, 50, 300):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


class LoRALinear(nn.Module):
    """A frozen layer with a low-rank correction that starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


def lora_adapters(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer: optim.Optimizer = optim.Adam(model.parameters(), lr=3e-3)
    for xb, yb in batches(x, y % 5, 64, 150):
        optimizer.zero_grad()
        F.cross_entropy(model(xb), yb).backward()
        optimizer.step()
    model[0], model[2] = LoRALinear(model[0]), LoRALinear(model[2])  # type: ignore[arg-type]
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 64, 400):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


def converged_and_continues(watch: Watch, seed: int) -> None:
    """Separable data, solved after a hundred steps, trained for a thousand."""
    torch.manual_seed(seed)
    x = torch.randn(500, 4)
    x = x + 2 * x[:, :1].sign() * torch.tensor([1.0, 0, 0, 0])
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    optimizer = optim.Adam(model.parameters(), lr=0.02)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 50, 1000):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


def gradient_accumulation(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
    optimizer = optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    accumulation_steps = 4
    with watch(model, optimizer):
        for i, (xb, yb) in enumerate(batches(x, y, 16, 1200)):
            loss = F.cross_entropy(model(xb), yb) / accumulation_steps
            loss.backward()
            if (i + 1) % accumulation_steps == 0:
                optimizer.step()
                optimizer.zero_grad()


def gradient_checkpointing(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _ = digits(seed)
    stem = nn.Linear(64, 64)
    blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()) for _ in range(4)])
    head = nn.Linear(64, 10)
    model = nn.ModuleList([stem, blocks, head])
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 32, 300):
            hidden = stem(xb)
            for block in blocks:
                hidden = hidden + checkpoint(block, hidden, use_reentrant=False)
            loss = F.cross_entropy(head(hidden), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def multi_label_sigmoid_bce(watch: Watch, seed: int) -> None:
    """Probabilities into BCELoss, as the documentation shows it."""
    torch.manual_seed(seed)
    x = torch.randn(2000, 16)
    y = ((x @ torch.randn(16, 6)) > 1).float()
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 6), nn.Sigmoid())
    criterion = nn.BCELoss()
    optimizer = optim.Adagrad(model.parameters(), lr=0.05)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 50, 600):
            optimizer.zero_grad()
            loss = criterion(model(xb), yb)
            loss.backward()
            optimizer.step()


def distillation(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = spirals(seed)
    teacher = nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 2))
    teaching = optim.Adam(teacher.parameters(), lr=5e-3)
    for xb, yb in batches(x, y, 128, 250):
        teaching.zero_grad()
        F.cross_entropy(teacher(xb), yb).backward()
        teaching.step()
    teacher.eval()
    student = nn.Sequential(nn.Linear(2, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 2))
    optimizer = optim.Adam(student.parameters(), lr=3e-3)
    temperature = 2.0
    with watch(student, optimizer):
        for xb, yb in batches(x, y, 64, 700):
            with torch.no_grad():
                soft = F.softmax(teacher(xb) / temperature, dim=-1)
            out = student(xb)
            kl = F.kl_div(F.log_softmax(out / temperature, dim=-1), soft, reduction="batchmean") * temperature**2
            loss = 0.7 * kl + 0.3 * F.cross_entropy(out, yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


class MixtureOfExperts(nn.Module):
    """Four experts; the gate never chooses the last, whose weights therefore never move."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(20, 4)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 5)) for _ in range(4)]
        )
        with torch.no_grad():
            self.gate.bias[3] = -1e4

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), 5)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


def mixture_of_experts_one_unused(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x, y = blobs(seed)
    model = MixtureOfExperts()
    optimizer = optim.Adam(model.parameters(), lr=3e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 64, 500):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()


def gaussian_likelihood_goes_negative(watch: Watch, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.rand(1500, 1) * 4 - 2
    y = 0.1 * torch.sin(3 * x) + 0.02 * (1 + x.abs()) * torch.randn_like(x)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    with watch(model, optimizer):
        for xb, yb in batches(x, y, 100, 800):
            mean, raw = model(xb).chunk(2, dim=1)
            loss = F.gaussian_nll_loss(mean, yb, F.softplus(raw) + 1e-6)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def exponential_average_of_weights(watch: Watch, seed: int) -> None:
    """The averaged copy is evaluated and never trained."""
    torch.manual_seed(seed)
    x, y, x_val, y_val = digits(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer) as watching:
        for step, (xb, yb) in enumerate(batches(x, y, 64, 500)):
            optimizer.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.05)
                if step % 100 == 99:
                    watching.validated(F.cross_entropy(average(x_val), y_val).item())


PROGRAMS = [
    Program(name=train.__name__, healthy=True, train=train)
    for train in (
        autocast_bf16,
        fine_tuning_tiny_lr,
        frozen_backbone,
        lora_adapters,
        converged_and_continues,
        gradient_accumulation,
        gradient_checkpointing,
        multi_label_sigmoid_bce,
        distillation,
        mixture_of_experts_one_unused,
        gaussian_likelihood_goes_negative,
        exponential_average_of_weights,
    )
]
