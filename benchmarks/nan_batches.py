"""Runs in which one batch in 100 holds a NaN: do they end where the clean run ends?

How: 20 small programs (10 tasks, each with SGD with momentum and AdamW, all with a rate that falls
to zero) train for 600 steps, three times from the same seed: clean; with one NaN in one sample of
every 100th batch, under a guard that skips such steps; and with the same batches under a guard that
makes the step without the sample (``drop_nonfinite_samples``). Compared is the loss over the whole
training set at the end. Beside it the plain loop on the disturbed batches.

To reach: within 1 % of the clean loss, 20 of 20.
"""

from __future__ import annotations

import ast
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_wine
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody spells it

from benchmarks.forks import single_threaded
from benchmarks.results_file import Result, read_options
from holdfast import Guard

STEPS = 600
EVERY = 100
BATCH_SIZE = 32
_WITHIN = 0.01

Loss = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
How = Literal["clean", "skip", "drop", "bare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is learned.

    Args:
        inputs: Shape ``(samples, ...)``; floating point.
        targets: Shape ``(samples, ...)``.
        make: Returns the model.
        loss: Of model, inputs and targets; a mean.
    """

    inputs: torch.Tensor
    targets: torch.Tensor
    make: Callable[[], nn.Module]
    loss: Loss


def _classify(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(inputs), targets)


def _regress(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(inputs).squeeze(-1), targets)


def _reconstruct(model: Any, inputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(inputs), inputs.flatten(1))


def _huber(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.smooth_l1_loss(model(inputs).squeeze(-1), targets)


def _tabular(load: Any) -> tuple[torch.Tensor, torch.Tensor]:
    values, targets = load(return_X_y=True)
    inputs = torch.tensor(values, dtype=torch.float32)
    return (inputs - inputs.mean(0)) / inputs.std(0).clamp_min(1e-6), torch.tensor(targets)


class _Recurrent(nn.Module):
    """Reads the rows of an image one after the other. ``(batch, 8, 8)`` → ``(batch, 10)``."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(8, 24, batch_first=True)
        self.head = nn.Linear(24, 10)

    def forward(self, images: torch.Tensor) -> Any:
        return self.head(self.cell(images)[0][:, -1])


class _Attention(nn.Module):
    """A transformer layer over the rows of an image. ``(batch, 8, 8)`` → ``(batch, 10)``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> Any:
        return self.head(self.layer(self.embed(images)).mean(1))


def _source_code() -> tuple[torch.Tensor, torch.Tensor]:
    """Return windows of 12 characters of a module of Python, one-hot, and the character that
    follows.
    """
    text = Path(ast.__file__).read_text()[:6000]
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text])
    windows = codes.unfold(0, 13, 3)
    return F.one_hot(windows[:, :12], len(letters)).float(), windows[:, 12]


def tasks() -> dict[str, Task]:
    """Return the tasks by name; each with labels that leave some loss to the end."""
    digits, labels = load_digits(return_X_y=True)
    images = torch.tensor(digits / 16, dtype=torch.float32).reshape(-1, 8, 8)
    noise = torch.Generator().manual_seed(5)
    wrong = torch.rand(len(images), generator=noise) < 0.2
    noisy = torch.where(
        wrong, torch.randint(10, (len(images),), generator=noise), torch.tensor(labels)
    )
    cancer, wine, diabetes = map(_tabular, (load_breast_cancer, load_wine, load_diabetes))
    progress = (diabetes[1].float() - diabetes[1].float().mean()) / diabetes[1].float().std()
    windows, letters = _source_code()
    made = windows.shape[1] * windows.shape[2]
    return {
        "digits, perceptron": Task(
            inputs=images,
            targets=noisy,
            loss=_classify,
            make=lambda: nn.Sequential(
                nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)
            ),
        ),
        "digits, convolution": Task(
            inputs=images,
            targets=noisy,
            loss=_classify,
            make=lambda: nn.Sequential(
                nn.Unflatten(1, (1, 8)),
                nn.Conv2d(1, 8, 3),
                nn.ReLU(),
                nn.Flatten(),
                nn.Linear(288, 10),
            ),
        ),
        "digits, BatchNorm": Task(
            inputs=images,
            targets=noisy,
            loss=_classify,
            make=lambda: nn.Sequential(
                nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)
            ),
        ),
        "digits, GRU": Task(inputs=images, targets=noisy, make=_Recurrent, loss=_classify),
        "digits, transformer": Task(inputs=images, targets=noisy, make=_Attention, loss=_classify),
        "digits, autoencoder": Task(
            inputs=images,
            targets=noisy,
            loss=_reconstruct,
            make=lambda: nn.Sequential(
                nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 64)
            ),
        ),
        "breast cancer, logistic": Task(
            inputs=cancer[0], targets=cancer[1], loss=_classify, make=lambda: nn.Linear(30, 2)
        ),
        "diabetes, perceptron": Task(
            inputs=diabetes[0],
            targets=progress,
            loss=_regress,
            make=lambda: nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1)),
        ),
        "wine and its colour, Huber": Task(
            inputs=wine[0],
            targets=wine[0][:, 0] + wine[0][:, 9] ** 2,
            loss=_huber,
            make=lambda: nn.Sequential(nn.Linear(13, 6), nn.Tanh(), nn.Linear(6, 1)),
        ),
        "source code, next character": Task(
            inputs=windows,
            targets=letters,
            loss=_classify,
            make=lambda: nn.Sequential(
                nn.Flatten(), nn.Linear(made, 24), nn.ReLU(), nn.Linear(24, windows.shape[2])
            ),
        ),
    }


def batches(task: Task, *, disturbed: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of a run; one sample of every 100th holds a NaN if it is disturbed."""
    chance = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        chosen = torch.randint(len(task.inputs), (BATCH_SIZE,), generator=chance)
        place = int(torch.randint(BATCH_SIZE, (), generator=chance))
        inputs = task.inputs[chosen].clone()
        if disturbed and step % EVERY == EVERY // 2:
            inputs[place].view(-1)[3] = math.nan
        yield inputs, task.targets[chosen]


def train(task: Task, kind: str, how: How, run_dir: str) -> float:
    """Train one program, and return its loss over all samples."""
    torch.manual_seed(0)
    model = task.make()
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        if kind == "SGD"
        else torch.optim.AdamW(model.parameters(), lr=3e-3)
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    source = batches(task, disturbed=how != "clean")
    if how == "bare":
        for inputs, targets in source:
            optimizer.zero_grad()
            task.loss(model, inputs, targets).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            schedule.step()
    else:
        guard = Guard(
            run_dir,
            model=model,
            optimizer=optimizer,
            scheduler=schedule,
            max_grad_norm=5.0,
            save_interval_steps=None,
            drop_nonfinite_samples=how == "drop",
        )
        with guard:
            for batch in source:
                guard.step(batch, lambda part: task.loss(model, *part))
    model.eval()
    with torch.no_grad():
        return float(task.loss(model, task.inputs, task.targets))


def main() -> None:
    single_threaded()
    options = read_options("nan_batches", __doc__ or "")
    result = Result(
        options=options,
        parameters={"steps": STEPS, "one_nan_batch_in": EVERY, "batch_size": BATCH_SIZE},
    )
    names = list(tasks().items())[: 2 if options.quick else None]
    off: dict[How, list[float]] = {"skip": [], "drop": [], "bare": []}
    for name, task in names:
        for kind in ("SGD", "AdamW"):
            with tempfile.TemporaryDirectory() as folder:
                clean = train(task, kind, "clean", f"{folder}/clean")
                for how, found in off.items():
                    ended = train(task, kind, how, f"{folder}/{how}")
                    found.append(abs(ended / clean - 1))
                    print(
                        f"{name}, {kind}, {how}: {clean:.4f} clean, {ended:.4f} with NaN",
                        flush=True,
                    )
    total = 2 * len(names)
    for how, what in (("skip", "steps skipped"), ("drop", "samples dropped")):
        near = sum(each <= _WITHIN for each in off[how])  # type: ignore[index]
        result.add_count(f"{what}: loss within 1 % of the clean run", near, total, expected=total)
        result.add_samples(f"{what}: relative difference of the loss", "ratio", off[how], digits=5)  # type: ignore[index]
    dead = sum(not math.isfinite(each) for each in off["bare"])
    result.add_count("plain loop: loss is NaN at the end", dead, total)
    result.write()


if __name__ == "__main__":
    main()
