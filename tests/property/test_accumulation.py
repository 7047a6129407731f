"""Accumulation: any split of any ragged batch leaves the gradient of the whole, for every kind
of loss.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast import Loss
from holdfast.core.clock import SystemClock
from holdfast.core.policy.policy import Policy
from holdfast.guard.arguments import gather_parts
from holdfast.guard.record import RunRecord
from holdfast.guard.splitting.split_safety import SplitSafety
from holdfast.guard.splitting.split_trials import Isolation
from holdfast.guard.splitting.two_pass import TwoPass
from holdfast.guard.splitting.weighting import SAMPLES, disagreement, find_weightings, shares
from holdfast.guard.state.buffers import BufferKeeper
from holdfast.guard.state.loss_scale import LossScale
from holdfast.guard.step.passes import Passes, PassResult
from holdfast.loader.splitting import micro_batches

_FAST = settings(deadline=None, max_examples=60)
_WIDEST = 6


@st.composite
def _batches(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Return 1 to 12 samples with frames and tokens, each of 0 to 6 per sample, and at least one
    of both in all.
    """
    lengths = st.lists(st.integers(0, _WIDEST), min_size=1, max_size=12).filter(any)
    frames = draw(lengths)
    tokens = draw(st.permutations(frames))
    torch.manual_seed(draw(st.integers(0, 99)))
    steps = torch.arange(_WIDEST)
    return {
        "x": torch.randn(len(frames), _WIDEST, 4, dtype=torch.float64),
        "frames": steps < torch.tensor(frames).unsqueeze(1),
        "tokens": steps < torch.tensor(tokens).unsqueeze(1),
        "weights": torch.rand(len(frames), dtype=torch.float64) + 0.1,
    }


def _masked(values: torch.Tensor, mask: torch.Tensor) -> Loss:
    return Loss((values * mask).sum() / mask.sum(), mask.sum())


class _Model(nn.Module):
    """One layer, and the losses over what it returns; those of parts without items are NaN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3).double()

    def errors(self, batch: Any) -> torch.Tensor:
        return self.layer(batch["x"]).square().sum(dim=2)

    def bare_mean(self, batch: Any) -> Any:
        return self.errors(batch).mean()

    def frames(self, batch: Any) -> Any:
        return _masked(self.errors(batch), batch["frames"])

    def pair(self, batch: Any) -> Any:
        declared = self.frames(batch)
        return declared.mean, float(declared.items)

    def weights(self, batch: Any) -> Any:
        weights = batch["weights"]
        return Loss((self.errors(batch).mean(1) * weights).sum() / weights.sum(), weights.sum())

    def terms(self, batch: Any) -> Any:
        return [self.frames(batch), _masked(self.layer(batch["x"]).exp().sum(2), batch["tokens"])]

    def named_terms(self, batch: Any) -> Any:
        first, second = self.terms(batch)
        return {
            "first": first,
            "second": second,
            "third": Loss(self.bare_mean(batch), len(batch["x"])),
        }

    def two_pass(self) -> TwoPass:
        def loss(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
            return (outputs.sum(2) * batch["frames"]).square().mean().add(1e-3).sqrt()

        return TwoPass(lambda part: self.layer(part["x"]), loss)


_KINDS = ["bare_mean", "frames", "pair", "weights", "terms", "named_terms", "two_pass"]


def _passed(model: _Model, loss: Any, batch: Any, samples: int) -> PassResult:
    parts = gather_parts(model, torch.optim.SGD(model.parameters(), lr=0.1), None, None)
    with tempfile.TemporaryDirectory() as folder:
        record = RunRecord(Path(folder), SystemClock())
        isolation = Isolation(restore=lambda work: None)
        promises = SplitSafety(parts, Policy(), BufferKeeper(parts.models), record, isolation)
    passes = Passes(promises, LossScale("cpu", enabled=False), "cpu", "fp32")
    size = len(batch["x"])
    pieces = micro_batches(batch, size, samples)
    return passes.parted(pieces, loss, list(model.parameters()), lambda: None, batch=batch)


@_FAST
@given(_batches(), st.integers(1, 12), st.sampled_from(_KINDS))
def test_any_split_of_any_ragged_batch_gives_the_gradient_of_the_whole(
    batch: dict[str, torch.Tensor], samples: int, kind: str
) -> None:
    """For every kind of loss, lengths and part size, gradient and loss are those of one pass to
    1e-12.
    """
    model = _Model()
    loss = model.two_pass() if kind == "two_pass" else getattr(model, kind)
    returned = loss(batch)
    terms = list(returned.values()) if isinstance(returned, dict) else returned
    terms = terms if isinstance(terms, list) else [terms]
    means = [
        term.mean if isinstance(term, Loss) else term[0] if isinstance(term, tuple) else term
        for term in terms
    ]
    sum(means).backward()  # type: ignore[union-attr]
    whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    passed = _passed(model, loss, batch, samples)
    parted = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert (parted - whole).norm() <= 1e-12 * whole.norm()
    torch.testing.assert_close(
        passed[0], torch.as_tensor(sum(means)).detach(), rtol=1e-12, atol=1e-14
    )
    assert passed.dropped == ()


@_FAST
@given(_batches(), st.integers(1, 12), st.sets(st.integers(0, 11), min_size=1))
def test_what_is_left_out_is_what_was_bad_and_the_rest_is_exact(
    batch: dict[str, torch.Tensor], samples: int, bad: set[int]
) -> None:
    """Parts with NaN are named, and the gradient is that of the samples in the other parts, as
    if they were all.
    """
    size = len(batch["x"])
    batch["frames"][:, 0] = True
    bad = {sample % size for sample in bad}
    batch["x"][list(bad)] = torch.nan
    kept = [
        sample
        for sample in range(size)
        if not any(each // samples == sample // samples for each in bad)
    ]
    model = _Model()
    passed = _passed(model, model.frames, batch, samples)
    parted = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    if not kept:
        assert passed.dropped == ()
        assert parted.isnan().all()
        return
    dropped = [sample for start, end in passed.dropped for sample in range(start, end)]
    assert sorted([*dropped, *kept]) == list(range(size))
    model.zero_grad()
    model.frames({name: tensor[kept] for name, tensor in batch.items()}).mean.backward()
    whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert (parted - whole).norm() <= 1e-12 * whole.norm()


@_FAST
@given(_batches(), st.integers(1, 12))
def test_whatever_a_mean_may_be_over_is_shared_out_among_the_parts(
    batch: dict[str, torch.Tensor], samples: int
) -> None:
    """Counts of the parts add up to that of the batch, so shares add up to 1.

    Equal shares are no disagreement.
    """
    size = len(batch["x"])
    parts = micro_batches(batch, size, samples)
    for weighting in find_weightings(batch, size):
        if weighting.kind == "sum":
            assert set(shares(weighting, parts) or ()) == {1.0}
            continue
        total = sum(float(weighting.count(part, few)) for part, few in parts)
        assert abs(total - float(weighting.count(batch, size))) <= 1e-9
        found = shares(weighting, parts)
        assert (found is None) == (total == 0)
        if found is not None:
            assert abs(sum(found) - 1) <= 1e-12
            assert disagreement([weighting, weighting], parts) == 0
    assert shares(SAMPLES, parts) == tuple(few / size for _, few in parts)
