"""Splitting a batch leaves the gradient of the whole: weighted by loss-bearing items, nothing dropped or doubled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast


def gradient_of(make_loss: Any, batch: Any, run_dir: Any, **policy: Any) -> tuple[torch.Tensor, holdfast.StepResult]:
    """Return the gradient that a step leaves, and its result, for a model that is the same each time."""
    torch.manual_seed(2)
    model = nn.Linear(5, 3).double()
    guard = holdfast.Guard(
        run_dir,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        save_interval_steps=None,
        **policy,
    )
    with guard:
        result = guard.step(batch, make_loss(model))
    return torch.cat([p.grad.flatten() for p in model.parameters()]), result


def masked_mean(model: nn.Module) -> Any:
    def loss(batch: Any) -> holdfast.Loss:
        mask = batch["mask"]
        errors = model(batch["x"]).square().sum(dim=2) * mask
        return holdfast.Loss(mean=errors.sum() / mask.sum(), items=mask.sum())

    return loss


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=9).filter(any),
    micro=st.integers(1, 9),
)
def test_ragged_batches_are_weighted_by_items_and_not_by_micro_batches(tmp_path_factory, lengths, micro):
    """Whatever the lengths and the micro-batch size, the gradient and the loss are those of the whole batch."""
    torch.manual_seed(0)
    mask = torch.zeros(len(lengths), 6, dtype=torch.float64)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    batch = {"x": torch.randn(len(lengths), 6, 5, dtype=torch.float64), "mask": mask}
    whole, expected = gradient_of(masked_mean, batch, tmp_path_factory.mktemp("a"))
    parted, found = gradient_of(masked_mean, batch, tmp_path_factory.mktemp("b"), micro_batch_size=micro)
    torch.testing.assert_close(parted, whole, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)
    assert found.items == expected.items == sum(lengths)


@pytest.mark.parametrize("samples", [1, 4, 5, 7, 8])
def test_the_last_short_micro_batch_counts_as_much_as_its_samples(tmp_path, samples):
    """A batch that the micro-batch size does not divide is neither cut short nor over-weighted, for a bare mean."""

    def mean(model: nn.Module) -> Any:
        return lambda x: model(x).square().mean()

    batch = torch.randn(samples, 5, dtype=torch.float64)
    whole, expected = gradient_of(mean, batch, tmp_path / "a")
    parted, found = gradient_of(mean, batch, tmp_path / "b", micro_batch_size=4)
    torch.testing.assert_close(parted, whole, rtol=1e-12, atol=1e-14)
    assert found.items == samples
    assert found.micro_batch_size == min(samples, 4)
    torch.testing.assert_close(found.loss, expected.loss)


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


def test_items_may_be_zero_in_a_part_but_not_in_the_whole(tmp_path):
    """A micro-batch without tokens weighs nothing; a batch without any is an error that leaves no trace."""
    batch = {"x": torch.randn(4, 6, 5, dtype=torch.float64), "mask": torch.zeros(4, 6, dtype=torch.float64)}

    def safe(model: nn.Module) -> Any:
        def loss(part: Any) -> holdfast.Loss:
            items = part["mask"].sum()
            errors = (model(part["x"]).square().sum(dim=2) * part["mask"]).sum()
            return holdfast.Loss(errors / items.clamp(min=1), items)

        return loss

    with pytest.raises(holdfast.HoldfastError, match=r"(?s)items=0.*H203") as caught:
        gradient_of(safe, batch, tmp_path / "a", micro_batch_size=2)
    assert "positive number of items" in str(caught.value)
    batch["mask"][0, :3] = 1
    whole, _ = gradient_of(safe, batch, tmp_path / "b")
    parted, _ = gradient_of(safe, batch, tmp_path / "c", micro_batch_size=2)
    torch.testing.assert_close(parted, whole)


def test_what_a_split_promises_is_what_is_recorded(tmp_path):
    """Dropout makes a split equal in distribution; without randomness it is equal up to rounding."""
    for rate in (0.0, 0.4):
        model = nn.Sequential(nn.Linear(5, 4), nn.Dropout(rate), nn.Linear(4, 1))
        calls = []

        def loss(x: torch.Tensor, model: nn.Module = model, calls: list[int] = calls) -> torch.Tensor:
            calls.append(len(x))
            if len(x) > 4:
                torch.empty(2**50, dtype=torch.uint8)
            return model(x).square().mean()

        guard = holdfast.Guard(
            tmp_path / str(rate),
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            save_interval_steps=None,
        )
        guard.step(torch.randn(8, 5), loss)
        (first,) = [event for event in guard.events() if event.kind == "promises"]
        (split,) = [event for event in guard.events() if event.kind == "split"]
        assert first.data["split"] == "possible"
        assert split.data["promise"] == ("equal in distribution" if rate else "equal up to rounding")


def test_the_rehearsal_leaves_no_trace(tmp_path):
    """Trying out a split before training draws no random number, calls nothing of the caller's, moves no buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    calls: list[int] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return model(x).square().mean()

    torch.manual_seed(4)
    guard = holdfast.Guard(
        tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), save_interval_steps=None
    )
    guard.step(torch.randn(8, 5), loss)
    found = torch.rand(3), model[1].running_mean.clone()
    torch.manual_seed(4)
    twin = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    torch.manual_seed(4)
    x = torch.randn(8, 5)
    twin.load_state_dict({**model.state_dict(), **{k: v for k, v in twin.state_dict().items() if "1." in k}})
    twin(x)
    assert torch.equal(found[0], torch.rand(3))
    assert torch.equal(found[1], twin[1].running_mean)
    assert calls == [8]
