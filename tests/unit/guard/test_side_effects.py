"""State that a forward pass keeps outside buffers is found at the first step, and named."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

import holdfast


class Counting(nn.Module):
    """Keeps everything that a module should not, and some things that it may."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls = 0
        self.history: list[float] = []
        self.recent: deque[int] = deque(maxlen=3)
        self.seen: dict[str, int] = {"batches": 0}
        self.state = torch.zeros(4)
        self.last: torch.Tensor | None = None
        self.table: torch.Tensor | None = None
        self.name = "constant"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(float(x.sum()))
        self.recent.append(self.calls)
        self.seen["batches"] += 1
        self.state = 0.5 * self.state + x.detach().mean(0)
        if self.table is None:
            self.table = torch.arange(4.0)
        self.last = self.inner(x)
        return self.last + self.table


def test_what_each_forward_pass_changes_is_named_and_what_it_only_overwrites_is_not(tmp_path, caplog):
    """Counters, lists and carried state are one loud event at the first step; caches and last values are none."""
    model = nn.ModuleDict({"a": Counting(), "b": nn.Linear(4, 1)})
    guard = holdfast.Guard(
        tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), save_interval_steps=None
    )
    for _ in range(2):
        guard.step(torch.randn(8, 4), lambda x: model["b"](model["a"](x)).square().mean())
    (said,) = [event.data for event in guard.events() if event.kind == "side_effects"]
    assert said["attributes"] == ["a.calls", "a.history", "a.recent", "a.seen", "a.state"]
    assert "side_effects" in caplog.text
    (promises,) = [event.data for event in guard.events() if event.kind == "promises"]
    assert promises["side_effects"] == said["attributes"]
    assert model["a"].calls == 2
    assert len(model["a"].history) == 2


def test_a_clean_model_says_nothing(tmp_path):
    """Dropout, batch normalisation and recurrent layers have no side effect of this kind."""
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.GRU(4, 2))
    guard = holdfast.Guard(
        tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), save_interval_steps=None
    )
    guard.step(torch.randn(8, 4), lambda x: model(x)[0].square().mean())
    (promises,) = [event.data for event in guard.events() if event.kind == "promises"]
    assert promises["side_effects"] == []
    assert "side_effects" not in {event.kind for event in guard.events()}


def test_what_changes_only_while_gradients_are_on_is_named_too(tmp_path):
    """A center that training passes alone move, as in DINO, is found although it stays under no_grad."""

    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 1)
            self.center = torch.zeros(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x)
            if torch.is_grad_enabled():
                self.center = 0.9 * self.center + 0.1 * out.detach().mean(0)
            return out - self.center

    model = Centered()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holdfast.Guard(tmp_path, model=model, optimizer=optimizer, save_interval_steps=None) as guard:
        guard.step(torch.randn(8, 4), lambda x: model(x).square().mean())
        (promises,) = [event.data for event in guard.events() if event.kind == "promises"]
    assert promises["side_effects"] == ["center"]
