"""Splitting a batch leaves the gradient of the whole; `tests/property/test_accumulation.py` tries any split."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.guard.guarded import ask_for_too_much, guarded, passes_of, the_event
from torch import nn

import holdfast
from holdfast.guard.step.passes import Passed
from holdfast.loader.splitting import micro_batches


def gradient_of(make_loss: Any, batch: Any, run_dir: Any, **policy: Any) -> tuple[torch.Tensor, holdfast.StepResult]:
    """Return the gradient that a step leaves, and its result, for a model that is the same each time."""
    torch.manual_seed(2)
    model = nn.Linear(5, 3).double()
    with guarded(run_dir, model, **policy) as guard:
        result = guard.step(batch, make_loss(model))
    return torch.cat([p.grad.flatten() for p in model.parameters()]), result


def masked_mean(model: nn.Module) -> Any:
    def loss(batch: Any) -> holdfast.Loss:
        mask = batch["mask"]
        errors = model(batch["x"]).square().sum(dim=2) * mask
        return holdfast.Loss(mean=errors.sum() / mask.sum().clamp(min=1), items=mask.sum())

    return loss


LENGTHS = torch.tensor([4, 0, 1, 6, 2, 0, 5, 1])


def frames_and_tokens() -> dict[str, torch.Tensor]:
    """Return a batch of 8 samples with frames in one mask and tokens, other ones, in a second."""
    torch.manual_seed(4)
    return {
        "x": torch.randn(8, 6, 5, dtype=torch.float64),
        "mask": (torch.arange(6) < LENGTHS.unsqueeze(1)).double(),
        "tokens": (torch.arange(6) < LENGTHS.flip(0).unsqueeze(1)).double(),
    }


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_ragged_batches_are_weighted_by_items_and_not_by_micro_batches(tmp_path, micro):
    """Through the guard, gradient, loss and items are those of the whole batch, some samples of which have none."""
    batch = frames_and_tokens()
    whole, expected = gradient_of(masked_mean, batch, tmp_path / "a")
    part, found = gradient_of(masked_mean, batch, tmp_path / "b", micro_batch_size=micro)
    torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)
    assert found.items == expected.items == int(LENGTHS.sum())


def test_a_pair_says_the_same_as_a_loss(tmp_path):
    """`(mean, items)` and `Loss(mean, items)` give the same step, with items as a number or a tensor."""
    batch = torch.randn(6, 5, dtype=torch.float64)
    forms = [
        lambda mean: holdfast.Loss(mean, items=12),
        lambda mean: (mean, 12),
        lambda mean: (mean.reshape(1), torch.tensor([12])),
        lambda mean: holdfast.Loss(mean=mean, items=12.0),
    ]
    gradients = [
        gradient_of(lambda model, form=form: lambda x: form(model(x).square().mean()), batch, tmp_path / str(number))
        for number, form in enumerate(forms)
    ]
    assert all(torch.equal(gradient, gradients[0][0]) for gradient, _ in gradients)
    assert [result.items for _, result in gradients] == [12] * 4


@pytest.mark.parametrize(("rate", "promise"), [(0.0, "equal up to rounding"), (0.4, "equal in distribution")])
def test_what_a_split_promises_is_what_is_recorded(tmp_path, rate, promise):
    """Dropout makes a split equal in distribution; without randomness it is equal up to rounding."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(rate), nn.Linear(4, 1))

    def loss(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 4:
            ask_for_too_much()
        return model(x).square().mean()

    guard = guarded(tmp_path, model)
    guard.step(torch.randn(8, 5), loss)
    assert the_event(guard, "promises").data["split"] == "possible"
    assert the_event(guard, "split").data["promise"] == promise


def test_the_split_check_leaves_no_trace(tmp_path):
    """Trying out a split before training draws no random number, calls nothing of the caller's, moves no buffer."""

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


def two_terms(model: nn.Module) -> Any:
    """Return a loss of two means, over frames and over tokens; NaN where a part has none."""

    def loss(part: Any) -> dict[str, holdfast.Loss]:
        out = model(part["x"])
        return {
            name: holdfast.Loss((errors * part[name]).sum() / part[name].sum(), part[name].sum())
            for name, errors in (("mask", out.square().sum(2)), ("tokens", out.exp().sum(2)))
        }

    return loss


def parted(model: nn.Module, run_dir: Path, loss: Any, batch: Any, samples: int, **options: Any) -> Passed:
    """Return what `Passes.parted` says for a batch of 8."""
    pieces = micro_batches(batch, 8, samples)
    return passes_of(model, run_dir).parted(pieces, 8, loss, list(model.parameters()), lambda: None, **options)


def test_counting_several_terms_first_leaves_no_trace(tmp_path):
    """Random numbers are drawn and buffers are moved as if each part had been run once."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.3), nn.BatchNorm1d(6), nn.Linear(3, 3)).double()

    batch, model, twin = frames_and_tokens(), make(), make()
    torch.manual_seed(6)
    parted(model, tmp_path, two_terms(model), batch, 4)
    found = torch.rand(3)
    torch.manual_seed(6)
    terms = [two_terms(twin)(part) for part, _ in micro_batches(batch, 8, 4)]
    assert torch.equal(found, torch.rand(3))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
    totals = {name: sum(part[name].items for part in terms) for name in terms[0]}
    sum(term.mean * term.items / totals[name] for part in terms for name, term in part.items()).backward()
    for ours, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (lambda calls: [1] * (1 + calls % 2), "1 terms for one part of the batch and 2 for another"),
        (lambda calls: [1, calls], "in one forward pass and of"),
        (lambda calls: [1, 0], "items=0"),
    ],
)
def test_terms_that_do_not_stay_the_same_are_an_error(tmp_path, items, words):
    """Another number of terms, other items in the second pass, or a term over nothing is said, not averaged over."""
    model, calls = nn.Linear(5, 3).double(), []

    def loss(part: Any) -> Any:
        mean = model(part["x"]).square().mean()
        calls.append(part)
        return [holdfast.Loss(mean, count) for count in items(len(calls) - 1)]

    with pytest.raises(holdfast.HoldfastError, match="H203") as caught:
        parted(model, tmp_path, loss, frames_and_tokens(), 4)
    assert words in str(caught.value)


def test_where_every_part_is_bad_the_step_is(tmp_path):
    """Nothing is left out of a batch without a sound part, nor where the caller keeps bad parts: the loss is NaN."""
    batch, model = frames_and_tokens(), nn.Linear(5, 3).double()

    def loss(part: Any) -> torch.Tensor:
        return model(part["x"]).square().mean()

    for bad, drops in (([0], False), ([0, 2, 4, 6], True)):
        batch["x"][bad] = math.nan
        model.zero_grad()
        passed = parted(model, tmp_path, loss, batch, 2, drops=drops)
        assert all(p.grad.isnan().all() for p in model.parameters())
        assert passed.loss.isnan()
        assert passed.dropped == ()
    assert guarded(tmp_path, model, micro_batch_size=2, check_split=False).step(batch, loss).skipped
