"""Splitting a batch leaves the gradient of the whole.

`tests/property/test_accumulation.py` tries any split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import ask_for_too_much, guarded, passes_of, the_event
from torch import nn

import holdfast
from holdfast.guard.splitting import split_trials
from holdfast.guard.step.passes import PassResult
from holdfast.loader.splitting import micro_batches

LENGTHS = torch.tensor([4, 0, 1, 6, 2, 0, 5, 1])


def frames_and_tokens() -> dict[str, torch.Tensor]:
    """Return a batch of 8 samples with frames in one mask and tokens, other ones, in a second."""
    torch.manual_seed(4)
    return {
        "x": torch.randn(8, 6, 5, dtype=torch.float64),
        "mask": (torch.arange(6) < LENGTHS.unsqueeze(1)).double(),
        "tokens": (torch.arange(6) < LENGTHS.flip(0).unsqueeze(1)).double(),
    }


@pytest.mark.parametrize(
    ("rate", "promise"), [(0.0, "equal up to rounding"), (0.4, "equal in distribution")]
)
def test_what_a_split_promises_is_what_is_recorded(tmp_path, rate, promise):
    """Dropout makes a split equal in distribution.

    Without randomness it is equal up to rounding.
    """
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(rate), nn.Linear(4, 1))

    def loss(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 4:
            ask_for_too_much()
        return model(x).square().mean()

    guard = guarded(tmp_path, model)
    guard.step(torch.randn(8, 5), loss)
    assert the_event(guard, "promises").data["split"] == "possible"
    assert the_event(guard, "split").data["promise"] == promise


@pytest.mark.parametrize(
    ("shape", "promise"), [((), "changes training"), ((4,), "equal in distribution")]
)
def test_a_split_of_a_loss_with_noise_promises_what_the_noise_allows(tmp_path, shape, promise):
    """Noise that samples share is drawn anew by each part, and averages out."""
    model = nn.Linear(5, 4)

    def loss(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 4:
            ask_for_too_much()
        return (model(x) + torch.randn((len(x), *shape) if shape else ())).square().mean()

    guard = guarded(tmp_path, model)
    guard.step(torch.randn(8, 5), loss)
    assert the_event(guard, "split").data["promise"] == promise


def test_the_split_check_leaves_no_trace(tmp_path):
    """Trying out a split before training draws no random number, calls nothing of the caller's,
    moves no buffer.
    """

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))

    model, twin, calls = make(), make(), []

    def loss(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return model(x).square().mean()

    torch.manual_seed(4)
    guarded(tmp_path, model).step(torch.randn(8, 5), loss)
    found = torch.rand(3)
    torch.manual_seed(4)
    twin(torch.randn(8, 5))
    assert torch.equal(found, torch.rand(3))
    assert torch.equal(model[1].running_mean, twin[1].running_mean)
    assert calls == [8]


class CallCounter(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x)


@pytest.mark.parametrize("micro_batch_size", [4, "auto"])
def test_a_trial_in_this_process_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_batch_size: Any
) -> None:
    """If the process cannot be forked, a trial restores the buffers that its calls have changed."""
    monkeypatch.setattr(split_trials, "backward_works_in_a_copy", lambda: False)
    model = CallCounter()
    sizes = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 4:
            ask_for_too_much()
        sizes.append(len(x))
        return model(x).square().mean()

    guard = guarded(
        tmp_path, model, micro_batch_size=micro_batch_size, allow_split_with=("buffers",)
    )
    guard.step(torch.randn(8, 5), loss)

    assert len(sizes) > 2
    assert sizes[-2:] == [4, 4]
    assert model.calls == 2


def two_terms(model: nn.Module) -> Any:
    """Return a loss of two means, over frames and over tokens; NaN where a part has none."""

    def loss(part: Any) -> dict[str, holdfast.Loss]:
        out = model(part["x"])
        return {
            name: holdfast.Loss((errors * part[name]).sum() / part[name].sum(), part[name].sum())
            for name, errors in (("mask", out.square().sum(2)), ("tokens", out.exp().sum(2)))
        }

    return loss


def parted(
    model: nn.Module, run_dir: Path, loss: Any, batch: Any, samples: int, **options: Any
) -> PassResult:
    """Return what `Passes.parted` says for a batch of 8."""
    pieces = micro_batches(batch, 8, samples)
    return passes_of(model, run_dir).parted(
        pieces, loss, list(model.parameters()), lambda: None, **options
    )


def test_counting_several_terms_first_leaves_no_trace(tmp_path):
    """Random numbers are drawn and buffers are moved as if each part had been run once."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(5, 3), nn.Dropout(0.3), nn.BatchNorm1d(6), nn.Linear(3, 3)
        ).double()

    batch, model, twin = frames_and_tokens(), make(), make()
    torch.manual_seed(6)
    parted(model, tmp_path, two_terms(model), batch, 4)
    found = torch.rand(3)
    torch.manual_seed(6)
    terms = [two_terms(twin)(part) for part, _ in micro_batches(batch, 8, 4)]
    assert torch.equal(found, torch.rand(3))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    totals = {name: sum(part[name].items for part in terms) for name in terms[0]}
    sum(
        term.mean * term.items / totals[name] for part in terms for name, term in part.items()
    ).backward()
    for ours, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (
            lambda calls: [1] * (1 + calls % 2),
            "1 terms for one part of the batch and 2 for another",
        ),
        (lambda calls: [1, 1 + calls], "in one forward pass and of"),
        (lambda calls: [1, 0], "items=0"),
    ],
)
def test_terms_that_do_not_stay_the_same_are_an_error(tmp_path, items, words):
    """Another number of terms, other items in the second pass, or a term over nothing is said,
    not averaged over.
    """
    model, calls = nn.Linear(5, 3).double(), []

    def loss(part: Any) -> Any:
        mean = model(part["x"]).square().mean()
        calls.append(part)
        return [holdfast.Loss(mean, count) for count in items(len(calls) - 1)]

    with pytest.raises(holdfast.HoldfastError, match="H203") as caught:
        parted(model, tmp_path, loss, frames_and_tokens(), 4)
    assert words in str(caught.value)
