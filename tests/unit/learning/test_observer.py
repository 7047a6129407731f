"""The observer: sampling, guided steps, state, and facts that can be written down."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.checkpoint import checkpoint

from holdfast.learning.observer import Observer
from holdfast.learning.sampling import EXAMINED, SAMPLED, is_selected
from holdfast.learning.subjects import Intent, Subjects

X, Y = torch.randn(64, 6), torch.randint(3, (64,))


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def observed(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Observer:
    subjects = Subjects(models={"model": model}, optimizers={"optimizer": optimizer}, **options)
    observer = Observer(subjects, Intent(), guided=True)
    observer.install()
    return observer


def guided_step(
    observer: Observer, model: nn.Module, optimizer: torch.optim.Optimizer, parts: int = 1
) -> list[Any]:
    """Make a step as a guard does: passes inside the context, then the optimizer, then the end."""
    optimizer.zero_grad()
    losses = []
    with observer.begin_step():
        for x, y in zip(X.chunk(parts), Y.chunk(parts), strict=True):
            loss = F.cross_entropy(model(x), y)
            (loss / parts).backward()
            losses.append(loss.item())
    stepped(observer, optimizer)
    return observer.end_step(sum(losses) / parts)


def stepped(observer: Observer, optimizer: torch.optim.Optimizer) -> None:
    observer.before_step("optimizer")
    optimizer.step()
    observer.after_step("optimizer")


@pytest.mark.parametrize("players", [1, 2, 3])
def test_the_first_rounds_are_observed_and_later_few(players: int) -> None:
    """Eight rounds, then some at no fixed distance, every player alike.

    What is examined is sampled too.
    """
    sampled = [step for step in range(2000 * players) if is_selected(step, players, SAMPLED)]
    examined = [step for step in range(2000 * players) if is_selected(step, players, EXAMINED)]
    later = [step // players for step in sampled if 8 * players <= step < 400 * players]
    assert sampled[: 8 * players] == list(range(8 * players))
    assert set(examined) < set(sampled)
    assert all(later.count(each) == players for each in later)
    assert 0.06 < len(set(later)) / 400 < 0.12
    assert 10 <= sum(step >= 400 * players for step in sampled) / players <= 30
    assert len({b - a for a, b in itertools.pairwise(later)}) > 2


class Listed(nn.Module):
    """Layers in a plain list, and a frozen network that is kept out of the state on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(6, 16)]
        self.kept_out = [nn.Linear(3, 3).requires_grad_(False)]
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept_out[0](self.head(self.layers[0](x).relu()))  # type: ignore[no-any-return]


def test_layers_in_a_plain_list_are_seen() -> None:
    """Weight and bias of a layer that no module owns count as two.

    Frozen ones, and those of a loss, do not.
    """
    model = Listed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    observer = observed(model, optimizer)
    guided_step(observer, model, optimizer)
    assert observer.observations().strays == 2
    observer.close()


def test_micro_batches_are_one_place_and_no_leak() -> None:
    """A step in four parts has one call site, one optimizer step, and clean gradients."""
    model, optimizer = small()
    observer = observed(model, optimizer)
    for _ in range(12):
        guided_step(observer, model, optimizer, parts=4)
    facts = observer.observations()
    assert list(facts.losses) == ["cross_entropy#1"]
    assert facts.losses["cross_entropy#1"].calls == 8 * 4
    assert facts.optimizers["optimizer"].steps == 12
    assert facts.optimizers["optimizer"].leaks == 0
    assert len(facts.optimizers["optimizer"].losses) == 12
    observer.close()


def test_facts_and_state_are_plain_data() -> None:
    """Both can be written as JSON.

    A new observer takes up where the old one was, and tells nothing twice.
    """
    model, optimizer = small()
    observer = observed(model, optimizer)
    found = []
    for _ in range(12):
        with observer.begin_step():
            F.cross_entropy(model(X), Y).backward()  # never cleared
        stepped(observer, optimizer)
        found += observer.end_step(1.5)
    observer.validated(0.5)
    json.dumps(asdict(observer.observations()))
    state = json.loads(json.dumps(observer.state_dict()))
    observer.close()
    assert [finding.rule for finding in found] == ["H811"]

    again = observed(model, optimizer)
    again.load_state_dict(state)
    assert again.steps == 12
    assert again.state_dict() == state
    told = []
    for _ in range(12):
        with again.begin_step():
            F.cross_entropy(model(X), Y).backward()
        stepped(again, optimizer)
        told += again.end_step(1.5)
    assert told == []
    assert [finding.rule for finding in again.findings.reported()] == ["H811"]
    again.close()


def test_recomputed_activations_are_not_counted_twice() -> None:
    """Activation checkpointing runs a block again in backward; its units and losses count once."""

    class Recomputing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.block, x, use_reentrant=False))

    model = Recomputing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    observer = observed(model, optimizer)
    for _ in range(8):
        guided_step(observer, model, optimizer)
    facts = observer.observations()
    for seen in (facts.inputs["model"], facts.losses["cross_entropy#1"]):
        assert (seen.calls, seen.examined) == (8, 6)
    observer.close()


def test_a_scheduler_before_the_first_step_and_one_fed_with_batches_are_seen() -> None:
    """The counts of schedulers are compared with those of the optimizer, without wrapping
    anything.
    """
    model, optimizer = small()
    ahead = LambdaLR(optimizer, lambda _: 1.0)
    plateau = ReduceLROnPlateau(optimizer, patience=10)
    observer = observed(model, optimizer, schedulers={"ahead": ahead, "plateau": plateau})
    for _ in range(30):
        optimizer._opt_called = True  # type: ignore[attr-defined] # torch would only warn
        ahead.step()
        guided_step(observer, model, optimizer)
        plateau.step(1.0)
    observer.finish()
    assert {
        (finding.rule, finding.where)
        for finding in observer.findings.reported()
        if finding.severity != "note"
    } == {
        ("H820", "ahead"),
        ("H854", "plateau"),
    }
    observer.close()
