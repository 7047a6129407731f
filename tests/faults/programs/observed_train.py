"""A training script that knows nothing of holdfast, in several shapes.

It prints every loss, bit by bit.

python observed_train.py SHAPE [STEPS] [WORKERS]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

SHAPE = sys.argv[1]
STEPS = int(sys.argv[2]) if len(sys.argv) > 2 else 6
WORKERS = int(sys.argv[3]) if len(sys.argv) > 3 else 0

torch.set_num_threads(1)
torch.manual_seed(1)
random.seed(1)
np.random.seed(1)


class Noisy(torch.utils.data.Dataset):
    """64 samples with noise from python, numpy and torch."""

    read = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.read += 1
        if SHAPE == "bad_sample" and self.read == 50:
            raise KeyError("the 50th sample is missing")
        noise = 0.1 * torch.randn(8) + 0.05 * random.random() + 0.05 * float(np.random.rand())
        return torch.linspace(0, 1, 8) * (index % 7) + noise, torch.tensor(index % 7)


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    loader = torch.utils.data.DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=WORKERS)
    while True:
        yield from loader


def show(*values: torch.Tensor | float) -> None:
    print(*(torch.as_tensor(value).item().hex() for value in values), flush=True)


def network(width: int = 7) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, width)
    )


model = network()
source = batches()


def loss_of_next_batch() -> torch.Tensor:
    inputs, target = next(source)
    return nn.functional.cross_entropy(model(inputs), target)


def plain() -> None:
    """AdamW with clipping and a schedule; each 4 steps an evaluation and a file."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    held_out = torch.utils.data.DataLoader(Noisy(), batch_size=32)
    for step in range(1, STEPS + 1):
        loss = loss_of_next_batch()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        show(loss, norm)
        if step % 4 == 0:
            model.eval()
            with torch.no_grad():
                show(*(model(inputs).sum() for inputs, _ in held_out))
            model.train()
            torch.save(model.state_dict(), "model.pt")


def gan() -> None:
    """Two optimizers that take turns.

    "resumed": they have made 20 steps each before, as a file may say.
    """
    generator, judge = nn.Linear(4, 8), network(1)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (judge, generator)]
    for optimizer in optimizers if SHAPE == "resumed" else []:
        groups = optimizer.state_dict()["param_groups"]
        parameters = enumerate(optimizer.param_groups[0]["params"])
        state = {
            i: {"step": torch.tensor(20.0), "exp_avg": p * 0, "exp_avg_sq": p * p}
            for i, p in parameters
        }
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    for _ in range(STEPS):
        real, _ = next(source)
        fake = generator(torch.randn(8, 4))
        loss_of_judge = judge(fake.detach()).mean() - judge(real).mean()
        optimizers[0].zero_grad()
        loss_of_judge.backward()
        optimizers[0].step()
        loss_of_generator = -judge(fake).mean()
        optimizers[1].zero_grad()
        loss_of_generator.backward()
        optimizers[1].step()
        show(loss_of_judge, loss_of_generator)


def together() -> None:
    """Two optimizers that step after one backward."""
    parameters = list(model.parameters())
    optimizers = [
        torch.optim.SGD(parameters[:2], lr=0.01),
        torch.optim.Adam(parameters[2:], lr=0.01),
    ]
    for _ in range(STEPS):
        loss = loss_of_next_batch()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        show(loss)


def accumulation() -> None:
    """Four backwards for each step, under a scaler that is switched on."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(STEPS):
        for _ in range(4):
            loss = loss_of_next_batch() / 4
            scaler.scale(loss).backward()
            show(loss)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def no_optimizer() -> None:
    """The update is written by hand."""
    for _ in range(STEPS):
        loss = loss_of_next_batch()
        loss.backward()
        with torch.no_grad():
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        show(loss, norm)


def closure() -> None:
    """LBFGS calls backward as often as it likes."""
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    for _ in range(STEPS):
        inputs, target = next(source)

        def evaluate(inputs: torch.Tensor = inputs, target: torch.Tensor = target) -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), target)
            loss.backward()
            return loss

        show(optimizer.step(evaluate))


def checkpointed() -> None:
    """A segment is computed again within backward, by a backward of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(STEPS):
        inputs, target = next(source)
        inputs.requires_grad_()
        output = torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=True)
        loss = nn.functional.cross_entropy(output, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        show(loss)


def compiled() -> None:
    """Model and optimizer are traced; what was made of them is shown."""
    whole = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(STEPS):
        inputs, target = next(source)
        loss = nn.functional.cross_entropy(whole(inputs), target)
        loss.backward()
        step()
        optimizer.zero_grad()
        show(loss)
    print(
        [
            dict(torch._dynamo.utils.counters[name])
            for name in ("stats", "graph_break", "unimplemented")
        ]
    )


SHAPES = {
    "plain": plain,
    "bad_sample": plain,
    "gan": gan,
    "resumed": gan,
    "together": together,
    "accumulation": accumulation,
    "no_optimizer": no_optimizer,
    "closure": closure,
    "checkpointed": checkpointed,
    "compiled": compiled,
}

if __name__ == "__main__":
    SHAPES[SHAPE]()
