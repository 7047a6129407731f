"""`Policy.fuse`: many tensors at once where a trial gives the same bits, and only a proposal where it does not."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast.guard import fuse as module


@pytest.fixture(autouse=True)
def _any_gain_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WORTH", 0.0)  # what is faster on this machine is not what is tested


def train(
    run_dir: Path, make: Callable[..., torch.optim.Optimizer], *, fuse: bool
) -> tuple[list[torch.Tensor], torch.optim.Optimizer, dict[str, dict[str, Any]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    batch = torch.randn(6, 8), torch.randint(4, (6,))
    optimizer = make(model.parameters())
    settings: dict[str, Any] = {"max_grad_norm": 1.0, "fuse": fuse, "diagnose": False}
    with holdfast.Guard(run_dir, model=model, optimizer=optimizer, loader=[batch] * 15, **settings) as guard:
        for each in guard.batches(max_epochs=1):
            guard.step(each, lambda given: F.cross_entropy(model(given[0]), given[1]))
        found = {f"{event.kind} {event.data.get('implementation')}": dict(event.data) for event in guard.events()}
    moments = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return [*model.parameters(), *moments], optimizer, {k: v for k, v in found.items() if k.startswith("optimizer_")}


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)])
def test_what_gives_the_same_bits_is_switched_on_and_changes_nothing(tmp_path, make):
    """``foreach`` is used from the trial on, ``fused`` is only proposed; weights and moments are those without."""
    plain, optimizer, found = train(tmp_path / "plain", make, fuse=False)
    assert not found
    assert not optimizer.param_groups[0]["foreach"]
    fused, optimizer, found = train(tmp_path / "fused", make, fuse=True)
    assert optimizer.param_groups[0]["foreach"]
    assert not optimizer.param_groups[0]["fused"]
    assert found["optimizer_fused foreach"]["promise"] == "bit-exact"
    assert "fused=True" in found["optimizer_could_be_faster fused"]["fix"]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(fused, plain, strict=True))


@pytest.mark.parametrize("rate", [1e-3, 1e-6])
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD])
def test_what_rounds_otherwise_is_only_proposed(tmp_path, kind, rate):
    """These add up in another order with ``foreach``, seen or not in the trial: it would be another training."""
    make = lambda parameters: kind(parameters, rate)  # noqa: E731
    plain, _, _ = train(tmp_path / "plain", make, fuse=False)
    fused, optimizer, found = train(tmp_path / "fused", make, fuse=True)
    assert not optimizer.param_groups[0]["foreach"]
    assert list(found) == ["optimizer_could_be_faster foreach"]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(fused, plain, strict=True))


def test_an_optimizer_that_cannot_be_tried_stays_as_it_is(tmp_path, monkeypatch):
    """The trial has no memory: training goes on, and the event says why."""

    def refused(*_: Any) -> Any:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(module, "_run", refused)
    _, optimizer, found = train(tmp_path, torch.optim.AdamW, fuse=True)
    assert found["optimizer_not_tried None"]["error"] == "MemoryError: no room for a copy"
    assert not optimizer.param_groups[0]["foreach"]


def test_a_choice_of_the_caller_stays(tmp_path):
    """Who has set ``foreach`` or ``fused`` has chosen, and an optimizer by other hands is not torch's."""

    class Own(torch.optim.AdamW):
        pass

    for number, make in enumerate((lambda p: torch.optim.AdamW(p, fused=True), Own)):
        assert train(tmp_path / str(number), make, fuse=True)[2] == {}


OPTIONS = {
    "Adam": ({}, {"amsgrad": True, "weight_decay": 0.1}), "AdamW": ({}, {"amsgrad": True}),
    "SGD": ({"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "RMSprop": ({"momentum": 0.9}, {"centered": True}), "Adagrad": ({"lr_decay": 0.1},),
}  # fmt: skip


@pytest.mark.slow  # seconds in all, for what changes with torch alone
@pytest.mark.parametrize("name", [*module._COMPUTES_ALIKE, "NAdam", "RAdam", "ASGD"])
def test_which_compute_alike_is_so_in_this_torch(name):
    """Over 25 steps of 60 settings, rates and gradients from 1e-6 to 1000, those named have the same bits in all."""
    draws, differ = random.Random(name), 0
    for number in range(60):
        rate, scale = 10 ** draws.uniform(-6, 0), 10 ** draws.uniform(-6, 3)
        options = draws.choice(OPTIONS.get(name, ({}, {"weight_decay": 0.1}) if name != "Rprop" else ({},)))
        generator = torch.Generator().manual_seed(number)
        shapes = [(3,), (17, 5), (64, 33), (1,)]
        first = [torch.randn(shape, generator=generator) for shape in shapes]
        parameters = [[nn.Parameter(tensor.clone()) for tensor in first] for _ in range(2)]
        optimizers = [
            getattr(torch.optim, name)(each, lr=rate, foreach=many, **options)
            for each, many in zip(parameters, (False, True), strict=True)
        ]
        for _ in range(25):
            for plain, many in zip(*parameters, strict=True):
                plain.grad = torch.randn(plain.shape, generator=generator) * scale
                many.grad = plain.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
        differ += not all(map(torch.equal, *parameters))
    assert not differ if name in module._COMPUTES_ALIKE else differ > 30
