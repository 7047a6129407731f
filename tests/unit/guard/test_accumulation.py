"""Splitting a batch leaves the gradient of the whole: weighted by loss-bearing items, nothing dropped or doubled."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.core.clock import SystemClock
from holdfast.core.policy import Policy
from holdfast.guard.parts import gather_parts
from holdfast.guard.record import RunRecord
from holdfast.guard.splitting.split_safety import SplitSafety
from holdfast.guard.state.buffers import BufferKeeper
from holdfast.guard.step.loss_scale import LossScale
from holdfast.guard.step.passes import Passed, Passes
from holdfast.loader.splitting import micro_batches


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


LENGTHS = torch.tensor([4, 0, 1, 6, 2, 0, 5, 1])


def frames_and_tokens() -> dict[str, torch.Tensor]:
    """Return a batch of 8 samples with frames in one mask and tokens, other ones, in a second."""
    torch.manual_seed(4)
    return {
        "x": torch.randn(8, 6, 5, dtype=torch.float64),
        "mask": (torch.arange(6) < LENGTHS.unsqueeze(1)).double(),
        "tokens": (torch.arange(6) < LENGTHS.flip(0).unsqueeze(1)).double(),
    }


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
) -> tuple[torch.Tensor, Passed]:
    """Return the gradient and what `Passes.parted` says, for a batch of 8."""
    policy = Policy()
    parts = gather_parts(model, torch.optim.SGD(model.parameters(), lr=0.1), None, None)
    promises = SplitSafety(parts, policy, BufferKeeper(parts.models), RunRecord(run_dir, SystemClock()))
    passes = Passes(promises, LossScale("cpu", enabled=False), "cpu", policy.precision)
    model.zero_grad()
    passed = passes.parted(
        micro_batches(batch, 8, samples), 8, loss, list(model.parameters()), lambda: None, **options
    )
    return torch.cat([p.grad.flatten() for p in model.parameters()]), passed


def test_counting_several_terms_first_leaves_no_trace(tmp_path):
    """Random numbers are drawn and buffers are moved as if each part had been run once."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.3), nn.BatchNorm1d(6), nn.Linear(3, 3)).double()

    batch = frames_and_tokens()
    model, twin = make(), make()
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
        found = [holdfast.Loss(mean, count) for count in items(len(calls))]
        calls.append(part)
        return found

    with pytest.raises(holdfast.HoldfastError, match="H203") as caught:
        parted(model, tmp_path, loss, frames_and_tokens(), 4)
    assert words in str(caught.value)


def test_a_mean_of_means_is_what_this_prevents(tmp_path):
    """The usual loop, which divides by the number of parts, misses the gradient of a ragged batch by a tenth."""
    batch = frames_and_tokens()
    batch["mask"][1] = 1.0
    batch["mask"][5, 0] = 1.0
    exact, _ = gradient_of(masked_mean, batch, tmp_path)
    torch.manual_seed(2)
    model = nn.Linear(5, 3).double()
    for part, _ in micro_batches(batch, 8, 1):
        (masked_mean(model)(part).mean / 8).backward()
    usual = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (usual - exact).norm() > 0.1 * exact.norm()
    found, _ = parted(model, tmp_path, masked_mean(model), batch, 1)
    assert (found - exact).norm() <= 1e-12 * exact.norm()


LOSSES_WITH_NAN = {
    "samples": lambda model: lambda part: model(part["x"]).square().mean(),
    "items": masked_mean,
    "terms": two_terms,
}


@pytest.mark.parametrize("kind", LOSSES_WITH_NAN)
@pytest.mark.parametrize("bad", [(0,), (3,), (6,), (0, 3, 7)])
def test_a_part_with_a_bad_loss_is_left_out_and_the_others_weigh_more(tmp_path, kind, bad):
    """NaN or Inf in some parts leaves the gradient of the other samples, and says which were left out."""
    batch = frames_and_tokens()
    batch["x"][list(bad)] = math.nan
    batch["x"][bad[-1]] = math.inf
    batch["mask"][:, 0] = batch["tokens"][:, 0] = 1.0
    model = nn.Linear(5, 3).double()
    found, passed = parted(model, tmp_path, LOSSES_WITH_NAN[kind](model), batch, 2)
    left_out = sorted({sample // 2 for sample in bad})
    assert passed.dropped == tuple((2 * part, 2 * part + 2) for part in left_out)
    kept = [sample for sample in range(8) if sample // 2 not in left_out]
    sound = {name: tensor[kept] for name, tensor in batch.items()}
    model.zero_grad()
    returned = LOSSES_WITH_NAN[kind](model)(sound)
    terms = list(returned.values()) if kind == "terms" else [returned]
    loss = sum(term if kind == "samples" else term.mean for term in terms)
    loss.backward()
    torch.testing.assert_close(
        found, torch.cat([p.grad.flatten() for p in model.parameters()]), rtol=1e-12, atol=1e-14
    )
    torch.testing.assert_close(passed[0], loss.detach(), rtol=1e-12, atol=0)
    assert passed[1] == (len(kept) if kind == "samples" else terms[0].items)


def test_where_every_part_is_bad_the_step_is(tmp_path):
    """Nothing is left out of a batch without a sound part, nor where the caller keeps bad parts: the loss is NaN."""
    batch = frames_and_tokens()
    model = nn.Linear(5, 3).double()
    loss = LOSSES_WITH_NAN["samples"](model)
    batch["x"][0] = math.nan
    gradient, passed = parted(model, tmp_path, loss, batch, 2, drops=False)
    assert gradient.isnan().all()
    assert passed[0].isnan()
    batch["x"][::2] = math.nan
    gradient, passed = parted(model, tmp_path, loss, batch, 2)
    assert gradient.isnan().all()
    assert passed[0].isnan()
    assert passed.dropped == ()
    guard = holdfast.Guard(
        tmp_path,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        save_interval_steps=None,
        micro_batch_size=2,
        check_split=False,
    )
    assert guard.step(batch, loss).skipped
