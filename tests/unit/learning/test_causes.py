"""What H859 to H862 and a moving target rest on is seen in real loops, and not in their healthy twins."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holdfast.learning.watch import watch

STEPS = 12


def facts_of(model: nn.Module, loss: Callable[[], Tensor], clip: str = "") -> dict[str, Any]:
    """Train some steps; `clip`: before or after backward, or ever since the last step."""
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.1)
    with watch(model, optimizer) as watching:
        for _ in range(STEPS):
            if clip == "stale":
                nn.utils.clip_grad_value_(learning, 1.0) if learning[0].grad is not None else None
            optimizer.zero_grad()
            if clip == "before":
                nn.utils.clip_grad_norm_(learning, 1.0)
            loss().backward()
            if clip == "after":
                nn.utils.clip_grad_norm_(learning, 1.0)
            optimizer.step()
    return watching.facts()


@pytest.mark.parametrize(("clip", "early"), [("before", True), ("stale", True), ("after", False), ("", False)])
def test_clipping_is_seen_before_backward(clip: str, early: bool) -> None:
    """With no gradient there, or with that of the last step; between backward and step it is as it should be."""
    model = nn.Linear(4, 2)
    assert (facts_of(model, lambda: model(torch.randn(8, 4)).square().mean(), clip)["early_clips"] >= 5) == early


@pytest.mark.parametrize("fresh", [True, False])
def test_a_frozen_body_that_was_never_trained_is_told_by_its_weights(fresh: bool) -> None:
    """One step on the body blurs the edge of a uniform draw."""
    body = nn.Sequential(nn.Linear(64, 128), nn.Conv1d(1, 128, 8), nn.Linear(128, 128))
    with torch.no_grad():
        for p in body.parameters() if not fresh else ():
            p.add_(0.1 * p.std() * torch.randn_like(p))
    model = nn.ModuleDict({"body": body.requires_grad_(False), "head": nn.Linear(4, 2)})
    drawn = facts_of(model, lambda: model["head"](torch.randn(8, 4)).square().mean())["models"]["model"][
        "still_drawn"
    ]
    assert len(drawn) == 3 * fresh


@pytest.mark.parametrize("seeded", [True, False])
def test_random_numbers_that_come_again_are_seen(seeded: bool) -> None:
    """A generator of each step, and one of the run."""
    model, kept = nn.Linear(4, 2), torch.Generator().manual_seed(0)

    def loss() -> Tensor:
        drawn = torch.randn(8, 4, generator=torch.Generator().manual_seed(0) if seeded else kept)
        return model(torch.randn(8, 4) + drawn).square().mean()

    found = facts_of(model, loss)["same_draws"]
    assert any(steps >= 6 for steps in found.values()) == seeded
    assert all(steps >= 6 for call, steps in found.items() if call == "randn#1") == seeded


@pytest.mark.parametrize(("shift", "decoder", "flagged"), [(0, False, True), (1, False, False), (0, True, False)])
def test_targets_that_are_the_tokens_are_seen(shift: int, decoder: bool, flagged: bool) -> None:
    """Not those that come one later, and not where a decoder is given the tokens a second time."""
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))

    def loss() -> Tensor:
        text = torch.randint(20, (4, 9))
        scores = model(text[:, :8]) + (model(text[:, 1:]) if decoder else 0)
        return F.cross_entropy(scores.flatten(0, 1), text[:, shift : 8 + shift].flatten())

    places = facts_of(model, loss)["losses"]
    assert (places["cross_entropy#1"]["flags"].get("copied_tokens", 0) >= 5) == flagged


@pytest.mark.parametrize("rate", [0.1, 0.0])
def test_a_copy_that_follows_is_told_from_a_teacher_that_stays(rate: float) -> None:
    """Both are computed with in each step, and only one of them changes."""
    model = nn.Linear(4, 4)
    slow = copy.deepcopy(model).requires_grad_(False)

    def loss() -> Tensor:
        x = torch.randn(8, 4)
        with torch.no_grad():
            target = slow(x)
            slow.weight.lerp_(model.weight, rate)
        return F.mse_loss(model(x), target + 1)

    assert facts_of(model, loss)["followed"] == (rate > 0)
