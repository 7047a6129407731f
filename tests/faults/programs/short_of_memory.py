"""Take steps under a real memory limit, and compare each with the same step without one.

    python short_of_memory.py NAME SHARE...

Prints one line of JSON for each share of the memory that the whole step needs.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.testing import limit_memory, memory_limited

torch.set_num_threads(1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(64, 128, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class BackwardHeavy(nn.Module):
    """Needs little in forward and much in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(256, 8) / 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).softmax(dim=1) @ self.weight.T


class Cell(nn.Module):
    """Called again and again, with keywords and a state, and keeps most of all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.calls = 0

    def forward(self, x: torch.Tensor, *, state: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        for _ in range(3):
            state = torch.tanh(nn.functional.gelu(self.layer(x)) * state.sigmoid())
        return {"state": nn.functional.dropout(state, 0.1)}


class Decoder(nn.Module):
    """Blocks that repeat and keep little, with batch normalisation, and a part that keeps most
    and does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256)) for _ in range(2)
        )
        self.recurrence = Cell()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        state = x
        for _ in range(6):
            state = self.recurrence(x, state=state)["state"]
        return state


def square() -> nn.Linear:
    return nn.Linear(256, 256)


def normed() -> nn.BatchNorm1d:
    return nn.BatchNorm1d(256)


CASES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(8))),
        (8192, 256),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1),
            nn.GroupNorm(4, 16),
            nn.ReLU(),
            nn.Conv2d(16, 3, 3, padding=1),
        ),
        (128, 3, 32, 32),
    ),
    "transformer": (Encoder, (512, 48, 64)),
    "recurrence": (Decoder, (8192, 256)),
    "lstm": (Recurrent, (128, 64, 64)),
    "backward": (BackwardHeavy, (65536, 256)),
    "batch_norm": (
        lambda: nn.Sequential(
            *(
                nn.Sequential(*(layer() for _ in range(3) for layer in (square, normed, nn.ReLU)))
                for _ in range(4)
            )
        ),
        (8192, 256),
    ),
}


class Blocks(nn.Module):
    """Two or more equal children that are no containers, so that they can be recomputed."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def peak_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]


def gradient(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def main(name: str, shares: list[float]) -> None:
    limit_memory(2**45)  # never met: the guard sets malloc as it does under a limit
    make, shape = CASES[name]
    torch.manual_seed(0)
    model = make()
    if isinstance(model, nn.Sequential) and isinstance(model[0], nn.Sequential):
        model = nn.Sequential(*(Blocks(child) for child in model))
    x = torch.randn(shape)

    def loss_of(module: nn.Module) -> Any:
        return lambda batch: module(batch).square().mean()

    reference = copy.deepcopy(model)
    loss_of(reference)(x[:8]).backward()
    reference.load_state_dict(model.state_dict())  # the statistics that the warm-up has moved
    reference.zero_grad()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    torch.manual_seed(1)
    loss_of(reference)(x).backward()
    needed = peak_bytes() - before
    expected, buffers = gradient(reference), dict(reference.named_buffers())
    for share in shares:
        tried = copy.deepcopy(model)
        guard = holdfast.Guard(
            tempfile.mkdtemp(),
            model=tried,
            optimizer=torch.optim.SGD(tried.parameters(), 0.0),
            save_interval_steps=None,
        )
        torch.manual_seed(1)
        with memory_limited(int(share * needed)):
            try:
                result = guard.step(x, loss_of(tried))
            except holdfast.OutOfMemoryError as error:
                print(json.dumps({"share": share, "error": str(error)}), flush=True)
                continue
        found = gradient(tried)
        events = [
            event
            for event in guard.events()
            if event.kind in ("out_of_memory", "recompute", "split")
        ]
        answer = {
            "share": share,
            "attempts": result.attempts,
            "micro_batch_size": result.micro_batch_size,
            "difference": float((found - expected).norm() / expected.norm()),
            "bit_equal": bool(torch.equal(found, expected)),
            "buffers_equal": all(
                torch.equal(value, buffers[key]) for key, value in tried.named_buffers()
            ),
            "events": [[event.kind, event.data.get("promise")] for event in events],
            "recomputed": [event.data["modules"] for event in events if event.kind == "recompute"],
            "observed": guard._engine.diagnosis._observer.failure is None,
            "trained_again": guard.step(x[:8], loss_of(tried)).attempts,
        }
        print(json.dumps(answer), flush=True)


main(sys.argv[1], [float(share) for share in sys.argv[2:]])
