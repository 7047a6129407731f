"""A loss that compares samples is split exactly in two passes.

Same gradient, random numbers, buffers, refusals.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.unit.guard.guarded import ask_for_too_much, events, guarded, passes_of
from torch import nn

import holdfast
from holdfast.guard.splitting.two_pass import TwoPass
from holdfast.guard.step.passes import PassResult
from holdfast.loader.splitting import micro_batches

SIZES = (3, 4, 1, 4)  # of the parts of 12 samples


class Encoder(nn.Module):
    """Embeds samples, with dropout and a parameter that only the loss uses."""

    def __init__(self, *middle: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), *middle, nn.Linear(8, 4))
        self.log_scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)

    def embed(self, part: Any) -> Any:
        return [self(each.to(self.log_scale.dtype)) for each in part]


def pieces(batch: Any, sizes: tuple[int, ...] = SIZES) -> list[tuple[Any, int]]:
    """Return parts of 12 samples, of unequal sizes."""
    cut = [part for part, _ in micro_batches(batch, 12, 1)]
    found, start = [], 0
    for size in sizes:
        columns = zip(*cut[start : start + size], strict=True)
        found.append((tuple(torch.cat(column) for column in columns), size))
        start += size
    return found


def run(
    model: nn.Module,
    run_dir: Path,
    loss: Any,
    batch: Any,
    inputs: Any = None,
    sizes: tuple[int, ...] = SIZES,
) -> PassResult:
    """Run forward and backward of a step in unequal parts, alone."""
    model.zero_grad()
    every = list(model.parameters())
    return passes_of(model, run_dir).parted(
        pieces(batch, sizes), loss, every, lambda: inputs, batch=batch
    )


def two_views() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(12, 5, dtype=torch.float64), torch.randn(12, 5, dtype=torch.float64)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def assert_close(
    found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-12
) -> None:
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=tolerance, atol=max(1e-14, tolerance / 100))


def contrast(model: Any) -> Callable[[Any, Any], torch.Tensor]:
    def loss(outputs: Any, batch: Any) -> torch.Tensor:
        left, right = (F.normalize(each, dim=1) for each in outputs)
        return F.cross_entropy(left @ right.T * model.log_scale.exp(), torch.arange(len(left)))

    return loss


def variance(model: Any) -> Callable[[Any, Any], torch.Tensor]:
    return lambda outputs, batch: F.relu(1 - (outputs[0].var(dim=0) + 1e-4).sqrt()).mean()


def hard_triplets(model: Any) -> Callable[[Any, Any], torch.Tensor]:
    def loss(outputs: Any, batch: Any) -> torch.Tensor:
        same = torch.arange(12) % 3 == torch.arange(12).unsqueeze(1) % 3
        apart = torch.cdist(outputs[0], outputs[0])
        return F.relu(
            apart.where(same, -1.0).amax(1) - apart.where(~same, 1e9).amin(1) + 0.5
        ).mean()

    return loss


LOSSES = [contrast, variance, hard_triplets]  # and more in benchmarks/accumulation


@pytest.mark.parametrize("make_loss", LOSSES, ids=lambda make: make.__name__)
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_two_passes_give_the_gradient_of_one(tmp_path, make_loss, rate):
    """For losses that compare samples, with dropout too, the gradient is that of one graph over
    all parts.
    """
    model = Encoder(nn.Dropout(rate)).double()
    batch, loss = two_views(), make_loss(model)
    torch.manual_seed(3)
    # The masks that the parts draw
    columns = zip(*(model.embed(part) for part, _ in pieces(batch)), strict=True)
    whole = loss([torch.cat(column) for column in columns], batch)
    whole.backward()
    expected, random_after = gradients(model), torch.get_rng_state()
    torch.manual_seed(3)
    found = run(model, tmp_path, TwoPass(model.embed, loss), batch)
    assert_close(gradients(model), expected)
    torch.testing.assert_close(found.loss, whole.detach(), rtol=1e-12, atol=0)
    assert found.items == 12
    assert torch.equal(torch.get_rng_state(), random_after)


class Codes(nn.Module):
    """Replaces its buffer in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("used", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.used = self.used * 0.5 + x.detach().mean()
        return x + self.used


def test_buffers_move_once_for_each_part(tmp_path):
    """Running statistics, replaced tensors and what the loss itself counts end as after one pass
    over the parts.
    """

    def make() -> Any:
        torch.manual_seed(0)
        model = Encoder(nn.BatchNorm1d(8), Codes()).double()
        model.register_buffer("losses", torch.zeros(1))
        return model

    def counting(model: Any) -> Callable[[Any, Any], torch.Tensor]:
        def loss(outputs: Any, batch: Any) -> torch.Tensor:
            model.losses += 1
            return outputs[0].square().mean().sqrt()

        return loss

    batch = (torch.randn(12, 5, dtype=torch.float64),)
    parts = [part for part, _ in pieces(batch, (4, 4, 4))]
    model, twin = make(), make()
    outputs = torch.cat([twin(part[0]) for part in parts])
    counting(twin)([outputs], batch).backward()
    run(model, tmp_path, TwoPass(model.embed, counting(model)), batch, sizes=(4, 4, 4))
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, rtol=1e-12, atol=0)
    assert (int(model.body[2].num_batches_tracked), float(model.losses)) == (3, 1)
    assert_close(gradients(model), gradients(twin))


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (lambda x: x.mean(), "[()] for 3 samples"),
        (lambda x: x[:2], "[(2, 5)] for 3 samples"),
        (lambda x: [x, 3], "[(3, 5), int]"),
        (lambda x: x[:, : len(x)], "[(4, 4)] for 4 samples, and [(3, 3)] for others"),
        (lambda x: [x] * len(x), "[(4, 5), (4, 5), (4, 5), (4, 5)]"),
    ],
)
def test_outputs_that_cannot_be_joined_are_named(tmp_path, outputs, words):
    """Whatever has no batch dimension, or not the same shape in each part, is an error that says
    what it is.
    """
    model = Encoder()
    with pytest.raises(holdfast.HoldfastError, match="H201") as caught:
        run(
            model,
            tmp_path,
            TwoPass(lambda part: outputs(part[0]), variance(model)),
            (torch.randn(12, 5),),
        )
    assert words in str(caught.value)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("way", ["number", "out of memory", "recompute", "fp16", "bf16"])
def test_a_guard_splits_it_in_every_way_that_it_splits(tmp_path, way):
    """By number, after out-of-memory, with recompute and in half precision, the update is that
    of the whole batch.
    """

    def train(name: str, **policy: Any) -> tuple[list[torch.Tensor], holdfast.StepResult]:
        torch.manual_seed(5)
        model: Any = Encoder(Block(), Block()) if way == "recompute" else Encoder()
        model = model if way in ("fp16", "bf16") else model.double()
        short = way in ("out of memory", "recompute") and name == "parted"

        def embed(part: Any) -> Any:
            if short and len(part[0]) > 4:
                ask_for_too_much()
            return model.embed(part)

        with guarded(tmp_path / name, model, **policy) as guard:
            result = guard.step(batch, TwoPass(embed, contrast(model)))
            assert guard.step(batch, TwoPass(embed, contrast(model))).skipped is False
        return [p.detach().clone() for p in model.parameters()], result

    batch = two_views()
    half: Any = {"precision": way} if way in ("fp16", "bf16") else {}
    whole, expected = train("whole", **half)
    parted, found = train(
        "parted", **half, **({"micro_batch_size": 5} if way in ("number", "fp16", "bf16") else {})
    )
    assert found.micro_batch_size < 12
    tolerance = {"fp16": 1e-3, "bf16": 1e-2}.get(way, 1e-12)
    for each, other in zip(parted, whole, strict=True):
        torch.testing.assert_close(each, other, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.loss, expected.loss, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("layer", "rule"), [(nn.BatchNorm1d(8), "H206"), (nn.Softmax(dim=0), "H207")]
)
def test_outputs_that_mix_samples_are_refused(tmp_path, layer, rule):
    """Batch normalisation by its name, and any other mixing by the gradient that it changes, are
    refused.
    """
    model = Encoder(layer).double()
    with (
        guarded(tmp_path, model, micro_batch_size=4) as guard,
        pytest.raises(holdfast.HoldfastError) as caught,
    ):
        guard.step(two_views(), TwoPass(model.embed, contrast(model)))
    assert caught.value.rule == rule


@pytest.mark.parametrize("declared", [False, True])
def test_a_penalty_on_a_gradient_is_split_exactly(tmp_path, declared):
    """A loss that differentiates by itself, such as R1 or WGAN-GP, may be split, of one term and
    of several.
    """
    found = []
    for size in ("auto", 3):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

        def penalised(batch: torch.Tensor, model: nn.Module = model) -> Any:
            x = batch.detach().requires_grad_()
            scores = model(x)
            (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
            penalty = slope.square().sum(dim=1).mean()
            terms = [holdfast.Loss(scores.mean(), len(x)), holdfast.Loss(penalty, len(x))]
            return terms if declared else scores.mean() + penalty

        with guarded(tmp_path / str(size), model, micro_batch_size=size) as guard:
            result = guard.step(torch.randn(8, 4).double(), penalised)
            promises = [event.data["split"] for event in events(guard, "promises")]
        assert promises == ([] if size == "auto" else ["possible"])
        assert result.micro_batch_size == (8 if size == "auto" else 3)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*found, rtol=1e-12, atol=0)
