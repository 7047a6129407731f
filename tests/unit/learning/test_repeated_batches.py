"""H846, batches that come twice, is about loaders: a loop that uses one batch for several steps has no defect."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import holdfast
from holdfast.learning.watch import watch

STEPS = 60
"""More than are observed one after the other."""


class Unsharded(IterableDataset[Tensor]):
    """Each worker makes all of it: the loop gets every batch once from each of them."""

    def __iter__(self) -> Iterator[Tensor]:
        drawn = torch.Generator().manual_seed(0)
        for _ in range(STEPS * 64):
            yield torch.randn(4, generator=drawn)


class Rows(Dataset[Tensor]):
    """Samples that all differ."""

    def __init__(self) -> None:
        self.data = torch.randn(STEPS * 64, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


def players() -> tuple[nn.ModuleDict, dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(0)
    models = {"one": nn.Linear(4, 4), "other": nn.Linear(4, 4)}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.01) for name, model in models.items()}
    return nn.ModuleDict(models), dict(models), dict(optimizers)


def loss_of(models: nn.ModuleDict, batch: Tensor) -> Tensor:
    """A new tensor each time, as after a cast, a move to a device or a normalisation in the loop."""
    scaled = batch / 2
    return F.mse_loss(models["other"](models["one"](scaled)), scaled)


def batches(data: Any) -> Iterator[Tensor]:
    return iter(DataLoader(data, batch_size=8, num_workers=2))


def watched(data: Any, names: tuple[str, ...], *, first_only: bool = False) -> list[str]:
    """Train in a loop of one's own, one step of each name with each batch; return the rules that were found."""
    whole, models, optimizers = players()
    with watch(models, optimizers) as watching:
        for batch in itertools.islice(batches(data), None if data is not ROWS else STEPS):
            given = next(iter(DataLoader(data, batch_size=16))) if first_only else batch
            for name in names:
                whole.zero_grad()
                loss_of(whole, given).backward()
                optimizers[name].step()
    assert watching._observer.failure is None
    return [finding.rule for finding in watching.findings()]


ROWS = Rows()


@pytest.mark.parametrize("names", [("one", "other"), ("one", "one", "one", "other"), ("one",) * 4])
def test_a_batch_that_the_loop_uses_for_several_steps_is_no_defect_of_the_loader(names: tuple[str, ...]) -> None:
    """One batch for both players, several steps of a critic, several passes over a rollout: H846 is silent."""
    assert "H846" not in watched(ROWS, names)


def test_a_loader_that_hands_out_the_same_again_is_found() -> None:
    """Workers that each make the whole stream, also where two players share its batches; one batch for ever."""
    assert "H846" in watched(Unsharded(), ("one",))
    assert "H846" in watched(Unsharded(), ("one", "other"))
    assert "H845" in watched(ROWS, ("one",), first_only=True)


@pytest.mark.parametrize(("hosts_loop", "repeats"), [(True, False), (False, False), (True, True), (False, True)])
def test_a_guard_knows_which_batches_are_new(tmp_path: Path, hosts_loop: bool, repeats: bool) -> None:
    """In `batches` and in a loop of one's own, two steps with one batch are no pair, and pairs of a loader are."""
    whole, models, optimizers = players()
    rows = [torch.randn(8, 4) for _ in range(STEPS)]
    loader = [row.clone() for row in rows for _ in range(1 + repeats)]
    guard = holdfast.Guard(tmp_path, model=models, optimizer=optimizers, loader=loader)
    for batch in guard.batches(max_epochs=1) if hosts_loop else loader:
        for name in ("one", "other"):
            given = batch * 1 if hosts_loop else batch
            guard.step(given, lambda batch: loss_of(whole, batch), optimizer=name)
    guard.close()
    said = [event.data.get("rule") for event in guard.events()]
    assert ("H846" in said) is repeats
